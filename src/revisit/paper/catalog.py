"""The paper's tables and figures: what each one measures, on which models, and what it takes to measure it again.

The entries are in data/catalog.json, numbered in the order of the paper's source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from revisit.decoding.method import METHODS as registry
from revisit.errors import unknown

METHODS = ("greedy", "dola", "vcd", "m3id", "code", "sid", "revisit")


@dataclass(frozen=True)
class PaperModel:
    """A model of the paper: its Hub id and billions of parameters.

    InternVL 2.5 is published in a format of its own: give a folder converted to transformers' format as NAME=FOLDER.
    """

    name: str
    hub: str
    billions: float

    @property
    def gigabytes(self) -> float:
        """The download, at two bytes a parameter."""
        return 2 * self.billions


@dataclass(frozen=True)
class Row:
    """One table or figure of the paper.

    `items` is the number of questions for each method, `tokens` the mean length of an answer (177 for CHAIR is the paper's own count, the
    others are assumed), `passes` how often everything is decoded.
    """

    key: str
    title: str
    where: str
    kind: str  # grid, ablation, study or methods
    models: tuple[str, ...]
    benchmark: str
    items: int
    tokens: float
    methods: tuple[str, ...] = METHODS
    published: str = ""  # its table of published.json
    passes: int = 1
    data: str = ""  # what has to be downloaded
    disk: float = 0.1  # gigabytes of data
    further: tuple[str, ...] = ()  # other benchmarks of the row


def _row(entry: dict[str, Any]) -> Row:
    row: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    if "settings" in row:  # of an ablation: settings of ReVisiT besides plain decoding
        row["methods"] = ("greedy", *("revisit",) * row.pop("settings"))
    elif row["kind"] == "methods":  # every built-in method
        row["methods"] = ("greedy", *(name for name in registry.names() if name not in ("greedy", "chain")))
    return Row(**row)


_DATA: dict[str, Any] = json.loads(resources.files("revisit.paper").joinpath("data/catalog.json").read_text("utf-8"))
MODELS = {entry["name"]: PaperModel(**entry) for entry in _DATA["models"]}
ROWS = {row.key: row for row in map(_row, _DATA["rows"])}
# The thresholds that the paper's tables report; everywhere else its default of 1e-5 is used.
ALPHAS = {("vqav2", "Qwen2.5-VL-7B"): 1e-2, ("vqav2", "InternVL3-8B"): 1e-1}


def find(names: str) -> list[Row]:
    """Return the rows of these names, separated by commas; `all` for every one of the paper."""
    keys = [name.strip() for name in names.split(",") if name.strip()]
    if keys == ["all"]:
        return [row for row in ROWS.values() if row.kind != "methods"]
    for key in keys:
        if key not in ROWS:
            raise unknown("table", key, [*ROWS, "all"])
    return [ROWS[key] for key in keys]


def answers(row: Row, limit: int | None = None) -> int:
    """Return the number of answers that one model of a row takes."""
    return min(row.items, limit or row.items) * len(row.methods) * row.passes
