"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from revisit.eval.benchmarks import registry
from revisit.eval.compare import Comparison, compare
from revisit.eval.log import LOGS, Log, read_logs, unfinished
from revisit.eval.report.comparisons import READING, finding, tables_of, verdict
from revisit.eval.report.document import Section, Table, Text
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
    sections = [_headline(titled), Section("Main results", [*map(Text, problems)])]
    for title, table in titled:
        sections.append(Section(title, [*tables_of(table), _samples(table.logs, out)], level=3))
    return [*sections, Section("How to read the tables", [Text(READING)], level=3)]


def _headline(tables: Sequence[tuple[str, Comparison]]) -> Section:
    """Return one sentence per table, and the differences that they are about."""
    sentences = [verdict(table) for _, table in tables]
    figure = forest(tables, " ".join(sentences))
    return Section(
        finding(table for _, table in tables),
        [*(Text(text, kind="verdict") for text in sentences), *([figure] if figure else [])],
    )


def _samples(logs: Sequence[Log], out: Path) -> Text:
    """Return a link to the samples of these logs, or the command that writes their page."""
    page = logs[0].folder / "view" / "index.html"
    if not page.is_file():
        return Text(f"To see every sample: revisit view {shlex.quote(str(logs[0].folder))}")
    labels = {log.spec.benchmark for log in logs}
    chosen = f"#{urlencode({'benchmark': labels.pop()})}" if len(labels) == 1 else ""
    return Text("See every sample", quote(Path(os.path.relpath(page, out)).as_posix()) + chosen)


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
