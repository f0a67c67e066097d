"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.eval.benchmarks import registry
from revisit.eval.compare import Comparison, compare
from revisit.eval.log import LOGS, Log, read_logs, unfinished
from revisit.eval.report.comparisons import READING, finding, tables_of, verdict
from revisit.eval.report.document import Section, Table, Text


def find_runs(folder: Path) -> dict[str, list[Log]]:
    """Return the logs of every output folder at or below a folder, by a name for it."""
    places = sorted({path.parent.parent for path in folder.rglob(f"{LOGS}/*.jsonl")})
    names = {place: place.relative_to(folder).as_posix() for place in places}
    return {folder.resolve().name if name == "." else name: read_logs(place) for place, name in names.items()}


def unfinished_section(runs: Mapping[str, Sequence[Log]]) -> list[Section]:
    """Return what is incomplete, with the command that finishes it; empty if every run is complete."""
    notices = [Text(f"{name}: {notice}") for name, logs in runs.items() if (notice := unfinished(logs))]
    return [Section("Incomplete", [*notices])] if notices else []


def main_sections(runs: Mapping[str, Sequence[Log]], resamples: int) -> list[Section]:
    """Return the headline, then a section per comparison: values, differences to the baseline, and how to see the samples."""
    found: dict[str, Comparison] = {}
    for name, logs in runs.items():
        with suppress(RevisitError):  # no log is finished, or compare has warned that none can be compared
            for table in compare(logs, resamples=resamples):
                found[f"{registry.title(table.benchmark)} · {table.title} · {name}"] = table
    if not found:
        return []
    verdicts = [Text(verdict(table), kind="verdict") for table in found.values()]
    sections = [Section(finding(found.values()), [*verdicts]), Section("Main results", [])]
    for title, table in found.items():
        samples = Text(f"To see every sample: revisit view {shlex.quote(str(table.logs[0].folder))}")
        sections.append(Section(title, [*tables_of(table), samples], level=3))
    return [*sections, Section("How to read the tables", [Text(READING)], level=3)]


def provenance_section(sources: Mapping[str, Mapping[str, Any]]) -> Section:
    """Return versions and machine of every run and study, by name; each has `written` and `environment`."""
    rows = []
    for name, about in sources.items():
        machine = about["environment"]
        versions = machine["libraries"]
        rows.append(
            (
                name,
                shlex.join(machine["argv"]),
                about["written"][:19],
                f"{versions.get('torch', '–')} / {versions.get('transformers', '–')}",
                f"{machine['platform'].split('-')[0]} {machine['machine']}, {machine['cpus']} CPUs",
            )
        )
    heads = ("What", "Command", "Written", "torch / transformers", "Machine")
    table = Table(heads, rows, "Commands, versions and machines.", left=5)
    return Section("Provenance", [table])


def sources_of(runs: Mapping[str, Sequence[Log]]) -> dict[str, dict[str, Any]]:
    """Return the commands of all runs for `provenance_section`, each once."""
    found: dict[str, dict[str, Any]] = {}
    for name, logs in runs.items():
        for log in logs:
            about = log.request.model_dump(mode="json", include={"written", "environment"})
            known = [entry for key, entry in found.items() if key.startswith(f"run {name}")]
            if not any(entry["environment"] == about["environment"] for entry in known):
                number = f", command {len(known) + 1}" if known else ""
                found[f"run {name}{number}"] = about
    return found
