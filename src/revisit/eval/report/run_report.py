"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.eval import benchmarks
from revisit.eval.benchmarks.base import Scores
from revisit.eval.compare import Comparison, compare
from revisit.eval.controls import NO_IMAGE, is_blind
from revisit.eval.log import LOGS, Log, read_logs, unfinished
from revisit.eval.report.comparisons import READING, heading, ranked, tables_of, verdict
from revisit.eval.report.document import Block, Cell, Section, Table, Text
from revisit.eval.report.figures import forest


def find_runs(folder: Path) -> dict[str, list[Log]]:
    """Return the logs of every output folder at or below a folder, by a name for it."""
    places = sorted({path.parent.parent for path in folder.rglob(f"{LOGS}/*.jsonl")})
    names = {place: place.relative_to(folder).as_posix() for place in places}
    return {folder.resolve().name if name == "." else name: read_logs(place) for place, name in names.items()}


def unfinished_section(runs: Mapping[str, Sequence[Log]]) -> list[Section]:
    """Return what is incomplete, with the command that finishes it; empty if every run is complete."""
    notices = [Text(f"{name}: {notice}") for name, logs in runs.items() if (notice := unfinished(logs))]
    return [Section("Incomplete", [*notices])] if notices else []


def compare_runs(runs: Mapping[str, Sequence[Log]], resamples: int) -> dict[str, Comparison]:
    """Return the comparisons of all runs by title."""
    found: dict[str, Comparison] = {}
    for name, logs in runs.items():
        with suppress(RevisitError):  # no log is finished, or compare has warned that none can be compared
            for table in compare(logs, resamples=resamples):
                found[f"{benchmarks.title(table.benchmark)} · {table.title} · {name}"] = table
    return found


def main_sections(tables: Mapping[str, Comparison]) -> list[Section]:
    """Return a summary, then a section per comparison: values, differences to the baseline, and how to see the samples."""
    if not tables:
        return []
    verdicts = [verdict(table) for table in tables.values()]
    plot = forest(tables, " ".join(verdicts))
    sections = [
        Section("Summary", [*(Text(text, kind="verdict") for text in verdicts), *plot]),
        Section("Main results", []),
    ]
    for title, table in tables.items():
        samples = Text(f"To see every sample: revisit view {shlex.quote(str(table.logs[0].folder))}")
        sections.append(Section(title, [*tables_of(table), samples], level=3))
    return [*sections, Section("How to read the tables", [Text(READING)], level=3)]


def all_results(runs: Mapping[str, Sequence[Log]]) -> list[Section]:
    """Return the main metric of every log of several runs, best first, with its controls and environment; empty for a single run.

    Runs of other people can be put next to one's own. A log with lines that do not match their checksums is not shown.
    """
    complete = [(name, log, log.scores) for name, logs in runs.items() for log in logs if log.scores is not None]
    if len({name for name, _, _ in complete}) < 2:
        return []
    blocks: list[Block] = [
        Text(f"Rejected: {log.damaged} lines of {log.path} do not match their checksums.")
        for _, log, _ in complete
        if log.damaged
    ]
    tables: dict[tuple[str, str, int], list[tuple[str, Log, Scores]]] = {}
    for name, log, scores in complete:
        if not log.damaged and not is_blind(log.spec.method):
            tables.setdefault((log.spec.benchmark, log.spec.scorer, len(scores.items)), []).append((name, log, scores))
    for (label, scorer, n), rows in tables.items():
        metric = rows[0][2].shown[rows[0][2].headline]
        sign = -1 if metric.better == "higher" else 1
        rows.sort(key=lambda row: sign * row[2].metrics[metric.name])
        cells = ranked([log for _, log, _ in rows], metric, intervals=True)
        lines: list[list[Cell | str]] = []
        for (name, log, _), cell in zip(rows, cells, strict=True):
            blind = [o for o in runs[name] if o.spec.control == NO_IMAGE and _asks(o) == _asks(log) and o.scores]
            without = metric.text(blind[0].scores.metrics[metric.name]) if blind and blind[0].scores else "not run"
            libraries = log.spec.libraries
            versions = f"{libraries.get('torch') or '–'} / {libraries.get('transformers') or '–'}"
            lines.append([log.spec.model, log.spec.method, name, f"{log.spec.device}, {versions}", cell, without])
        heads = ("Model", "Method", "Run", "Device, torch / transformers", heading(metric), "greedy, no image")
        blocks.append(Table(heads, lines, f"{label} ({scorer}, n = {n}).", left=4))
    return [Section("All results", blocks)]


def _asks(log: Log) -> tuple[Any, ...]:
    """Return what a log and its control share."""
    spec = log.spec
    return spec.model, spec.fingerprint, spec.benchmark, spec.scorer, spec.seed, str(spec.decoding), log.request.asked


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
