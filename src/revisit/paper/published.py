"""The paper's tables and figures, their numbers, and tables that compare measured values with them.

`ROWS` and `MODELS` are in data/catalog.json, in the order of the paper's source; the numbers are in data/published.json.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

from revisit.errors import RevisitError, unknown
from revisit.eval.report.document import Cell, Table
from revisit.io.records import Fields

# On the printed scale: value and 95 % interval, NaN where there is none.
Measured: TypeAlias = tuple[float, float, float]
METHODS = ("greedy", "dola", "vcd", "m3id", "code", "sid", "revisit")


class PaperModel(NamedTuple):
    """A model of the paper: its Hub id and billions of parameters.

    InternVL 2.5 is not published in transformers' format: pass a converted folder as NAME=FOLDER.
    """

    name: str
    hub: str
    billions: float


@dataclass(frozen=True)
class Exhibit:
    """One table or figure of the paper."""

    key: str
    title: str
    where: str
    kind: str  # grid, ablation, study or latency
    models: tuple[str, ...]
    benchmark: str
    items: int
    data: str  # to download
    answers: int = len(METHODS)  # per item
    published: str = ""  # its table in published.json

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of the printed table, or all of the paper's."""
        return tuple(table(self.published)[self.models[0]]) if self.kind == "grid" else METHODS


def _read(name: str) -> Fields:
    found: Fields = json.loads(resources.files("revisit.paper").joinpath(f"data/{name}").read_text("utf-8"))
    return found


_CATALOG = _read("catalog.json")
MODELS = {entry["name"]: PaperModel(**entry) for entry in _CATALOG["models"]}
ROWS = {entry["key"]: Exhibit(**{**entry, "models": tuple(entry["models"])}) for entry in _CATALOG["rows"]}
# The thresholds that the paper's tables report; everywhere else its default of 1e-5 is used.
ALPHAS = {("vqav2", "Qwen2.5-VL-7B"): 1e-2, ("vqav2", "InternVL3-8B"): 1e-1}


def find(names: str) -> list[Exhibit]:
    """Return the rows of these names, separated by commas; `all` for every one."""
    keys = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not keys:
        raise RevisitError("No table: `revisit reproduce --list` lists them, `revisit reproduce all` runs them all.")
    for key in keys:
        if key not in (*ROWS, "all"):
            raise unknown("table", key, [*ROWS, "all"])
    return list(ROWS.values()) if "all" in keys else [ROWS[key] for key in keys]


@functools.cache
def data() -> Fields:
    """Return the numbers, in `tables`, and their `source`."""
    return _read("published.json")


def table(name: str) -> Any:
    """Return one of the paper's tables: `chair`, `pope_full`, `ablation`, `projection`, …"""
    return data()["tables"][name]


def verdict(theirs: float, measured: Measured | None, digits: int) -> str:
    """Return `inside`, `outside`, `no interval` or `not run`; the published value is rounded to `digits` decimals.

    An interval without width, which resampling gives if all items are alike, counts as none.
    """
    if measured is None:
        return "not run"
    _, low, high = measured
    if math.isnan(low) or low == high:
        return "no interval"
    half = 0.5 * 10.0**-digits
    return "inside" if low - half <= theirs <= high + half else "outside"


def decimals(value: float) -> int:
    """Return the number of decimals of a published number, at least one."""
    return len(repr(float(value)).partition(".")[2])


def comparison_table(
    theirs: Mapping[str, Mapping[str, float]], ours: Mapping[str, Mapping[str, Measured]], caption: str
) -> Table:
    """Compare by method or setting: for every metric the published value, the measured one with its interval, difference and verdict."""
    metrics = list(next(iter(theirs.values())))
    # a column has as many decimals as its longest number: 29.4 among 31.05 is 29.40
    digits = {metric: max(decimals(values[metric]) for values in theirs.values()) for metric in metrics}
    lines: list[list[Cell | str]] = []
    counts: dict[str, int] = {}
    for name, values in theirs.items():
        line: list[Cell | str] = [name]
        for metric in metrics:
            value, measured = values[metric], ours.get(name, {}).get(metric)
            result = verdict(value, measured, digits[metric])
            counts[result] = counts.get(result, 0) + 1
            line.append(f"{value:.2f}")
            if measured is None:
                line += ["–", "not run"]
                continue
            mean, low, high = measured
            bounds = "" if result == "no interval" else f"[{low:.2f}, {high:.2f}]"
            line += [Cell(f"{mean:.2f}", small=bounds), Cell(f"{mean - value:+.2f}", small=result)]
        lines.append(line)
    summary = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    heads = ("", *("published", "ours", "difference") * len(metrics))
    groups = tuple((metric, 3) for metric in metrics)
    return Table(heads, lines, f"{caption} {summary}.", groups=groups)
