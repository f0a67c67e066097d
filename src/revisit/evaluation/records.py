"""Every record that `revisit eval` stores; docs/evaluation.md describes the fields.

Files carry a schema number and a checksum over all their other fields, lines of answers a checksum each. Records with
another schema number are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA = 3
CHECK = 16  # characters of a line's checksum


Stored: TypeAlias = Mapping[str, Any]  # a record, or a part of one, as plain data


class Record(BaseModel):
    """Base of all records: unknown fields are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FileRecord(Record):
    """Base of all records that are a file of their own."""

    schema_: int = Field(alias="schema")
    checksum: str


class Answer(Record):
    """One line of `answers.jsonl`: what an engine answered to one question."""

    id: str
    item: str
    prompt: str
    text: str
    tokens: tuple[int, ...]
    counters: dict[str, int | float] = Field(default_factory=dict)
    seconds: float = 0.0
    finish: Literal["stop", "length"] = "stop"

    def to_json(self, cell: str = "") -> str:
        """The line without its line end; texts are escaped, so no text can contain a line end.

        `cell` is part of the checksum, so that a line of another cell is rejected.
        """
        body = self.model_dump(mode="json")
        line = {**body, "check": checksum({**body, "cell": cell})[:CHECK]}
        return json.dumps(line, ensure_ascii=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str, cell: str = "") -> Answer:
        """The inverse of `to_json`; raises ValueError for anything else, also for a line whose checksum is wrong."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not an answer")
        if raw.pop("check", None) != checksum({**raw, "cell": cell})[:CHECK]:
            raise ValueError("its checksum does not match")
        try:
            return cls.model_validate(raw, strict=False)
        except ValidationError as error:
            raise ValueError(f"not an answer: {first_problem(error)}") from error


class CellRecord(FileRecord):
    """`cell.json`: what could change an answer of the cell."""

    key: str
    identity: dict[str, Any]


class ScoresRecord(FileRecord):
    """`scores.json`: the terms of each metric, item by item."""

    key: str
    version: str
    items: dict[str, str]
    per_item: dict[str, dict[str, tuple[float, float]]]


class MetricRecord(Record):
    """One metric of a cell."""

    value: float | None
    low: float | None
    high: float | None
    interval: Literal["wilson", "bootstrap"] | None
    level: float | None
    better: Literal["higher", "lower"] | None
    show: float
    decimals: int
    rounded: int | None = None
    n: int


class SkippedRecord(Record):
    """An item whose picture could not be read."""

    id: str
    image: str
    reason: str


class Provenance(Record):
    """The command that asked for a cell."""

    argv: list[str]
    data: str | None = None
    limit: int | None = None
    seed: int = 0
    batch_size: int = 1


class CellEntry(Record):
    """A cell in `results.json`."""

    key: str
    path: str = Field(pattern=r"^cells/[A-Za-z0-9._-]*-[0-9a-f]{12}$")
    status: Literal["complete", "unfinished", "unreadable images"]
    model: dict[str, Any]
    method: dict[str, Any]
    benchmark: dict[str, Any]
    decoding: dict[str, Any]
    seed: int
    batch_size: int
    items: int
    answers: int
    skipped: list[SkippedRecord]
    new_tokens: int
    seconds: float
    counters: dict[str, int | float]
    metrics: dict[str, MetricRecord] = Field(default_factory=dict)
    counts: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    provenance: Provenance


class PanelRecord(Record):
    """A panel of an ablation."""

    key: str
    title: str
    settings: list[str]
    rows: list[dict[str, Any]]
    made: dict[str, Any]  # command, settings and environment


class AblationRecord(FileRecord):
    """`ablation.json`: the panels whose methods are cells of the `results.json` next to it."""

    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    panels: list[PanelRecord]


class StudyRecord(FileRecord):
    """`studies/*.json`: one of the studies of `revisit analyze`."""

    study: str
    written: str
    command: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]


class RunRecord(FileRecord):
    """`results.json`: a run's plan and its cells, rewritten as a whole after every cell."""

    status: Literal["running", "complete", "incomplete"]
    written: str
    seconds: float
    environment: dict[str, Any]
    settings: dict[str, Any]
    cells: list[CellEntry]


def checksum(value: Mapping[str, Any]) -> str:
    """SHA-256 of a record's fields as canonical JSON, its own checksum left out."""
    fields = {name: field for name, field in value.items() if name != "checksum"}
    text = json.dumps(fields, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A record's fields with the checksum over them."""
    plain = json.loads(json.dumps(value, default=repr))
    return {**plain, "checksum": checksum(plain)}


def first_problem(error: ValidationError) -> str:
    """The first thing that is wrong with a record: where, and what."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return f"{place[:100]}: {problem['msg']}" if place else str(problem["msg"])
