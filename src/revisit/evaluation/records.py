"""Every record that `revisit eval` stores, field by field; `revisit eval --schema` prints them as JSON Schema.

Files carry a schema number and a checksum over all their other fields, lines of answers a checksum each. Records with
another schema number are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA = 3
CHECK = 16  # characters of a line's checksum


class Record(BaseModel):
    """Base of all records: unknown fields are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Answer(Record):
    """One line of `answers.jsonl`: what an engine answered to one question."""

    id: str = Field(description="The item's id in its benchmark.")
    item: str = Field(description="SHA-256 over the prompt and the hashes of its pictures.")
    prompt: str = Field(description="The question as it was asked, before the model's chat template.")
    text: str = Field(description="The answer, without special tokens and surrounding blanks.")
    tokens: tuple[int, ...] = Field(description="The generated token ids, up to and with the end token.")
    counters: dict[str, int | float] = Field(
        default_factory=dict,
        description="`steps`, `applied`, `changed` (steps the method saw, acted on, and changed the favorite of), "
        "`vision_tokens`, `plausible` (sizes of the plausible sets, added up).",
    )
    seconds: float = Field(default=0.0, description="The answer's share of its batch's time.")
    finish: Literal["stop", "length"] = Field(
        default="stop", description="Why it ended: `stop` at an end token, `length` at the longest answer allowed."
    )

    def to_json(self, cell: str = "") -> str:
        """The line without its line end; texts are escaped, so no text can contain a line end.

        `cell` enters the checksum, so that a line of another cell is not taken for one of this.
        """
        body = self.model_dump(mode="json")
        return compact({**body, "check": checksum({**body, "cell": cell})[:CHECK]})

    @classmethod
    def from_json(cls, text: str, cell: str = "") -> Answer:
        """The inverse of `to_json`; raises ValueError for anything else, also for a line whose checksum is wrong."""
        raw = json.loads(text)
        if not isinstance(raw, dict):
            raise ValueError("not an answer")
        if raw.pop("check", None) != checksum({**raw, "cell": cell})[:CHECK]:
            raise ValueError("its checksum does not fit")
        try:
            return cls.model_validate(raw, strict=False)
        except ValidationError as error:
            raise ValueError(f"not an answer: {first_problem(error)}") from error


class CellRecord(Record):
    """`cell.json`: what could change an answer of the cell."""

    schema_: int = Field(alias="schema", description="Number of this format.")
    key: str = Field(
        description="SHA-256 of `identity` as canonical JSON; its first twelve digits end the folder's name."
    )
    identity: dict[str, Any] = Field(
        description="Model files, engine and versions, the method with its settings, the benchmark with its version and options, "
        "decoding settings and seed."
    )
    checksum: str = Field(description="SHA-256 over all other fields.")


class ScoresRecord(Record):
    """`scores.json`: the terms of each metric, item by item."""

    schema_: int = Field(alias="schema", description="Number of this format.")
    key: str = Field(description="The cell's, as in `cell.json`.")
    version: str = Field(description="The benchmark's scoring rule.")
    items: dict[str, str] = Field(description="Item id → `item` of its answer.")
    per_item: dict[str, dict[str, tuple[float, float]]] = Field(
        description="Metric → unit (an item or a group of items) → numerator and denominator; the metric is the ratio of sums."
    )
    checksum: str = Field(description="SHA-256 over all other fields.")


class MetricRecord(Record):
    """One metric of a cell."""

    value: float | None = Field(
        description="Unrounded, on the official scale; null where the official division is by zero."
    )
    low: float | None = Field(description="Lower end of the interval.")
    high: float | None = Field(description="Upper end of the interval.")
    interval: Literal["wilson", "bootstrap"] | None = Field(description="How the interval was found.")
    level: float | None = Field(description="Its level, 0.95.")
    better: Literal["higher", "lower"] | None = Field(description="The better direction; null where there is none.")
    show: float = Field(description="Factor between the value and what is printed.")
    decimals: int = Field(description="Digits that are printed.")
    rounded: int | None = Field(default=None, description="Digits to which the official script rounds before printing.")
    n: int = Field(description="Items behind the value.")


class SkippedRecord(Record):
    """An item whose picture could not be read."""

    id: str = Field(description="The item's id.")
    image: str = Field(description="The picture's path.")
    reason: str = Field(description="Why it could not be read.")


class Provenance(Record):
    """The command that asked for a cell."""

    argv: list[str] = Field(description="The command line.")
    data: str | None = Field(default=None, description="The data folder.")
    limit: int | None = Field(default=None, description="`--limit`.")
    seed: int = Field(default=0, description="`--seed`.")
    batch_size: int = Field(default=1, description="`--batch-size`.")


class CellEntry(Record):
    """A cell in `results.json`."""

    key: str = Field(description="As in `cell.json`.")
    path: str = Field(pattern=r"^cells/[A-Za-z0-9._-]*-[0-9a-f]{12}$", description="Its folder below the output.")
    status: Literal["complete", "unfinished", "unreadable images"] = Field(
        description="`unfinished`: planned, and not answered to the end. `unreadable images`: some could not be read, and "
        "`--skip-bad-images` was not given. Only complete cells have metrics."
    )
    model: dict[str, Any] = Field(description="Name, fingerprint, precision, device, engine and versions.")
    method: dict[str, Any] = Field(
        description="Label, name, settings, and hashes of source files from outside this package."
    )
    benchmark: dict[str, Any] = Field(
        description="Label (name and options that are not defaults), name, options, version, headline metric, SHA-256 of each "
        "annotation file."
    )
    decoding: dict[str, Any] = Field(description="Longest answer, temperature, top_p, top_k, beams.")
    seed: int = Field(description="Seed of sampling; 0 without.")
    batch_size: int = Field(description="Answers made together.")
    items: int = Field(description="Questions planned.")
    answers: int = Field(description="Questions answered.")
    skipped: list[SkippedRecord] = Field(description="Items whose picture could not be read.")
    new_tokens: int = Field(description="Generated tokens in all.")
    seconds: float = Field(description="Time in all.")
    counters: dict[str, int | float] = Field(description="The answers' counters, added up.")
    metrics: dict[str, MetricRecord] = Field(
        default_factory=dict, description="By name; none until the cell is complete."
    )
    counts: dict[str, Any] = Field(default_factory=dict, description="Whole numbers behind the metrics.")
    notes: list[str] = Field(default_factory=list, description="What a reader of the numbers must know.")
    provenance: Provenance = Field(description="The command that asked for it.")


class PanelRecord(Record):
    """A panel of an ablation."""

    key: str = Field(description="Its name on the command line or in the YAML file.")
    title: str = Field(description="Its heading.")
    columns: list[str] = Field(description="Headings of the settings that vary.")
    settings: list[str] = Field(description="Names of the settings that vary.")
    rows: list[dict[str, Any]] = Field(description="`method` (its label), `cells` (as printed), `values`, `main`.")
    made: dict[str, Any] | None = Field(default=None, description="Command, settings and machine of the panel.")


class AblationRecord(Record):
    """`ablation.json`: the panels whose methods are cells of the `results.json` beside it."""

    schema_: int = Field(alias="schema", description="Number of this format.")
    command: str = Field(description="The last command line.")
    settings: dict[str, Any] = Field(description="Its plan.")
    environment: dict[str, Any] = Field(description="Versions and machine.")
    panels: list[PanelRecord] = Field(description="The panels, of earlier commands too.")
    checksum: str = Field(description="SHA-256 over all other fields.")


class StudyRecord(Record):
    """`studies/*.json`: one of the studies of `revisit analyze`."""

    schema_: int = Field(alias="schema", description="Number of this format.")
    study: str = Field(description="Its name on the command line.")
    written: str = Field(description="When, in UTC.")
    command: str = Field(description="The command line.")
    settings: dict[str, Any] = Field(description="Model, data, limit, method, precision.")
    environment: dict[str, Any] = Field(description="Versions and machine.")
    result: dict[str, Any] = Field(description="What was measured; docs/studies.md describes each study.")
    checksum: str = Field(description="SHA-256 over all other fields.")


class RunRecord(Record):
    """`results.json`: a run's plan and its cells, rewritten as a whole after every cell."""

    schema_: int = Field(alias="schema", description="Number of this format.")
    status: Literal["running", "complete", "incomplete"] = Field(
        description="`running` (or killed), `complete`, `incomplete` (unreadable pictures)."
    )
    written: str = Field(description="When, in UTC.")
    seconds: float = Field(description="How long the last command took.")
    environment: dict[str, Any] = Field(description="Versions, platform, commit of this package, command line.")
    settings: dict[str, Any] = Field(description="The last command's plan.")
    cells: list[CellEntry] = Field(description="One entry per cell; a second command on the same output adds to them.")
    checksum: str = Field(description="SHA-256 over all other fields.")


RECORDS: dict[str, type[Record]] = {
    "results.json": RunRecord,
    "cells/*/cell.json": CellRecord,
    "cells/*/answers.jsonl": Answer,
    "cells/*/scores.json": ScoresRecord,
    "ablation.json": AblationRecord,
    "studies/*.json": StudyRecord,
}


def schemas() -> dict[str, Any]:
    """JSON Schema of every stored record, by the file it stands in."""
    found = {file: record.model_json_schema() for file, record in RECORDS.items()}
    answers = found["cells/*/answers.jsonl"]
    answers["properties"]["check"] = {
        "description": f"First {CHECK} digits of the SHA-256 over all other fields and the last 12 characters of the folder's name.",
        "type": "string",
    }
    return found


def compact(value: Any) -> str:
    """JSON on one line in ASCII."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


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
