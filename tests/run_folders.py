"""Checks a whole run folder: every file against its checksum, every number against the terms it was made from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from revisit.benchmarks.base import ratio
from revisit.errors import RevisitError
from revisit.evaluation.records import CellRecord
from revisit.evaluation.store import digest, read_record, read_results, read_scores, sort_lines


@dataclass
class Verdict:
    """What was checked, and every sentence about what is wrong."""

    cells: int = 0
    answers: int = 0
    problems: list[str] = field(default_factory=list)


def verify(output: Path) -> Verdict:
    """Reads everything that a run folder holds; nothing is changed."""
    if not output.is_dir():
        raise RevisitError(f"{output} is not a folder; pass the --out folder of a `revisit eval` run.")
    if not (output / "results.json").exists() and not (output / "cells").exists():
        raise RevisitError(f"{output} contains no run; pass the --out folder of a `revisit eval` run.")
    verdict = Verdict()
    entries: dict[str, dict[str, Any]] = {}
    try:
        entries = {entry["path"]: entry for entry in read_results(output)["cells"]}
    except RevisitError as error:
        verdict.problems.append(str(error))
    folders = {path.relative_to(output).as_posix() for path in sorted(output.glob("cells/*"))}
    for path in sorted(folders | entries.keys()):
        verdict.cells += 1
        try:
            _verify_cell(output / path, entries.get(path), verdict)
        except RevisitError as error:
            verdict.problems.append(str(error))
        except OSError as error:
            verdict.problems.append(f"{error.filename or output / path} cannot be read: {error.strerror}.")
    return verdict


def _verify_cell(folder: Path, entry: dict[str, Any] | None, verdict: Verdict) -> None:
    if entry is not None and entry["status"] == "unfinished" and not folder.exists():
        return  # planned, and not begun
    about = read_record(folder / "cell.json", CellRecord)
    if about.key != digest(about.identity) or not folder.name.endswith(about.key[:12]):
        verdict.problems.append(f"{folder / 'cell.json'} does not belong to the folder {folder.name}.")
    answers, damaged = sort_lines(folder / "answers.jsonl")
    verdict.answers += len(answers)
    verdict.problems += [f"{folder / 'answers.jsonl'}, line {n} is damaged ({why[:200]})." for n, why in damaged]
    if entry is None or entry["status"] != "complete":
        return  # not scored yet
    scores = read_scores(folder)
    known = {(line.id, line.item) for line in answers}
    if missing := [item for item, content in scores.items.items() if (item, content) not in known]:
        verdict.problems.append(
            f"{folder / 'answers.jsonl'} lacks {len(missing)} scored answers, the first to item {missing[0]!r}."
        )
    if entry["key"] != about.key or entry["answers"] != len(scores.items):
        verdict.problems.append(f"The entry of {folder.name} in results.json does not match its scores.json.")
    for name, metric in entry["metrics"].items():
        value = ratio(scores.per_item[name].values()) if name in scores.per_item else math.nan
        if name in scores.per_item and not _same(value, metric["value"]):
            verdict.problems.append(
                f"{name} of {folder.name} is {metric['value']} in results.json but {value} by its scores.json."
            )


def _same(value: float, stored: float | None) -> bool:
    return math.isnan(value) if stored is None else math.isclose(value, stored, rel_tol=1e-9, abs_tol=1e-12)
