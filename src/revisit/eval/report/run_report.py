"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from revisit.eval.benchmarks import registry
from revisit.eval.benchmarks.base import Scores
from revisit.eval.compare import Comparison, compare
from revisit.eval.controls import NO_IMAGE, is_blind
from revisit.eval.log import LOGS, Log, read_logs, unfinished
from revisit.eval.report.comparisons import READING, finding, heading, ranked, tables_of, verdict
from revisit.eval.report.document import Block, Cell, Provenance, Section, Table, Text
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


def main_sections(runs: Mapping[str, Sequence[Log]], resamples: int, out: Path) -> list[Section]:
    """Return the headline, then a section per comparison: values, differences to the baseline, samples, commands.

    `out` is where the report will be: links to samples start there.
    """
    found: list[tuple[str, Comparison]] = []
    problems: list[str] = []
    for name, logs in runs.items():
        if any(log.scores for log in logs):
            found += [(name, table) for table in compare(logs, resamples=resamples, problems=problems)]
    if not found and not problems:
        return []
    titled = [(f"{registry.title(table.benchmark)} · {table.title} · {name}", table) for name, table in found]
    sections = [_headline(titled), *all_results(runs), Section("Main results", [*map(Text, problems)])]
    for title, table in titled:
        blocks = [*tables_of(table), _samples(table.logs, out), *provenance_of(table.logs)]
        sections.append(Section(title, blocks, level=3))
    return [*sections, Section("How to read the tables", [Text(READING)], level=3)]


def _headline(tables: Sequence[tuple[str, Comparison]]) -> Section:
    """Return one sentence per table, and the differences that they are about."""
    sentences = [verdict(table) for _, table in tables]
    figure = forest(tables, " ".join(sentences))
    return Section(
        finding(table for _, table in tables),
        [*(Text(text, kind="verdict") for text in sentences), *([figure] if figure else [])],
    )


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


def _samples(logs: Sequence[Log], out: Path) -> Text:
    """Return a link to the samples of these logs, or the command that writes their page."""
    page = logs[0].folder / "view" / "index.html"
    if not page.is_file():
        return Text(f"To see every sample: revisit view {shlex.quote(str(logs[0].folder))}")
    labels = {log.spec.benchmark for log in logs}
    chosen = f"#{urlencode({'benchmark': labels.pop()})}" if len(labels) == 1 else ""
    return Text("See every sample", quote(Path(os.path.relpath(page, out)).as_posix()) + chosen)


def provenance_of(logs: Iterable[Log]) -> list[Provenance]:
    """Return the commands behind some logs, each once, and the settings that decide their answers."""
    found = []
    for log in logs:
        request = log.request
        data = Path(request.data).name if request.data else None
        names = {"limit": request.limit, "seed": log.spec.seed, "batch size": request.batch_size, "data": data}
        text = ", ".join(f"{key} {value}" for key, value in names.items() if value is not None)
        found.append(Provenance(request.command, text))
    return list(dict.fromkeys(found))


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
                (machine["git"] or "–")[:12],
                f"{versions.get('torch', '–')} / {versions.get('transformers', '–')}",
                f"{machine['platform'].split('-')[0]} {machine['machine']}, {machine['cpus']} CPUs",
            )
        )
    heads = ("What", "Command", "Written", "Commit", "torch / transformers", "Machine")
    table = Table(heads, rows, "Commands, versions and machines.", left=6)
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
