"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from revisit.eval.benchmarks import registry
from revisit.eval.compare import Comparison, compare
from revisit.eval.log import LOGS, Log, read_logs, unfinished
from revisit.eval.report.comparisons import (
    READING,
    difference_tables,
    footnotes,
    ranked,
    short_names,
    value_table,
    verdict,
)
from revisit.eval.report.document import Block, Cell, Provenance, Section, Table, Text
from revisit.eval.report.figures import forest

MOST_COLUMNS = 10  # of numbers in a table; more are split by model


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
    """Return the headline, then a section per benchmark and run: values, differences to the baseline, and sub-settings.

    `out` is where the report will be: links to samples start there.
    """
    found: dict[tuple[str, str], list[Comparison]] = {}  # (benchmark, run) -> its comparisons
    problems: list[str] = []
    for name, logs in runs.items():
        if any(log.scores for log in logs):
            for table in compare(logs, resamples=resamples, problems=problems):
                found.setdefault((table.benchmark, name), []).append(table)
    if not found and not problems:
        return []
    sections = [_headline(found), Section("Main results", [*map(Text, problems)])]
    for benchmark, name in sorted(found, key=lambda key: [pair[0] for pair in found].index(key[0])):
        tables = found[benchmark, name]
        logs = [log for log in runs[name] if log.scores is not None and log.spec.benchmark_name == benchmark]
        blocks: list[Block] = []
        for protocol in dict.fromkeys((table.scorer, table.variant) for table in tables):
            same = [table for table in tables if (table.scorer, table.variant) == protocol]
            wide = sum(len(table.metrics) for table in same) > MOST_COLUMNS
            blocks += [value_table(part) for part in ([[table] for table in same] if wide else [same])]
            blocks += [*difference_tables(same)]
        blocks += [*detail_tables(logs, benchmark), _samples(logs, out), *provenance_of(logs)]
        sections.append(Section(f"{registry.title(benchmark)} · {name}", blocks, level=3))
    return [*sections, Section("How to read the tables", [Text(READING)], level=3)]


def _headline(found: Mapping[tuple[str, str], Sequence[Comparison]]) -> Section:
    """Return one sentence per table, and the differences that they are about."""
    tables = [
        (f"{registry.title(benchmark)} · {table.title} · {name}", table)
        for (benchmark, name), same in found.items()
        for table in same
    ]
    sentences = [verdict(table) for _, table in tables]
    figure = forest(tables, " ".join(sentences))
    return Section("In short", [*(Text(text, kind="verdict") for text in sentences), *([figure] if figure else [])])


def _samples(logs: Sequence[Log], out: Path) -> Text:
    """Return a link to the samples of these logs, or the command that writes their page."""
    page = logs[0].folder / "view" / "index.html"
    if not page.is_file():
        return Text(f"To see every sample: revisit view {shlex.quote(str(logs[0].folder))}")
    labels = {log.spec.benchmark for log in logs}
    chosen = f"#{urlencode({'benchmark': labels.pop()})}" if len(labels) == 1 else ""
    return Text("See every sample", quote(Path(os.path.relpath(page, out)).as_posix()) + chosen)


def _name(log: Log, logs: Iterable[Log]) -> str:
    """Return a log's method, with its seed if the method was run with several."""
    seeds = {other.spec.seed for other in logs if other.spec.method == log.spec.method}
    return f"{log.spec.method}, seed {log.spec.seed}" if len(seeds) > 1 else log.spec.method


def detail_tables(logs: Iterable[Log], benchmark: str) -> list[Table]:
    """Return the sub-settings (POPE's sources and settings, MMMU's subjects): a row for each method in each, a table per model."""
    by_model: dict[tuple[str, str], list[Log]] = {}  # benchmarks with other options apart
    for log in logs:
        by_model.setdefault((log.spec.model, log.spec.benchmark), []).append(log)
    found = []
    for (model, label), own in by_model.items():
        assert own[0].scores is not None
        metrics = {name: metric for name, metric in own[0].scores.shown.items() if "/" in name}
        names = [name.rsplit("/", 1) for name, metric in metrics.items() if metric.better]
        parts = list(dict.fromkeys(part for part, _ in names))
        kinds = [kind for kind in dict.fromkeys(kind for _, kind in names) if kind != "recall"]
        if len(parts) < 2:
            continue
        called = [_name(log, own) for log in own]
        short = short_names(called)
        lines: list[list[Cell | str]] = []
        for part in parts:
            columns = [
                ranked(own, metric) if (metric := metrics.get(f"{part}/{kind}")) else [""] * len(own) for kind in kinds
            ]
            for place, (name, values) in enumerate(zip(called, zip(*columns, strict=True), strict=True)):
                lines.append(["" if place else part.replace("_", " "), short[name], *values])
        title = registry.title(benchmark) if label == benchmark else label
        caption = f"{title}, {model}: {registry.parts(benchmark)}.{footnotes(short)}"
        found.append(Table(("Setting", "Method", *kinds), lines, caption, left=2, folded=len(parts) > 9))
    return found


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
    """Return versions, machine and settings of every run and study, by name; each has `written`, `environment` and `settings`."""
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
    settings = [
        Provenance(name, ", ".join(f"{key} {value}" for key, value in about["settings"].items()))
        for name, about in sources.items()
    ]
    heads = ("What", "Command", "Written", "Commit", "torch / transformers", "Machine")
    table = Table(heads, rows, "Commands, versions and machines.", left=6)
    return Section("Provenance", [table, *settings])


def sources_of(runs: Mapping[str, Sequence[Log]]) -> dict[str, dict[str, Any]]:
    """Return the commands of all runs for `provenance_section`, each once."""
    found: dict[str, dict[str, Any]] = {}
    for name, logs in runs.items():
        for log in logs:
            about = log.request.model_dump(mode="json", include={"written", "environment"})
            decoding = {key: value for key, value in log.spec.decoding.items() if value is not None}
            known = [entry for key, entry in found.items() if key.startswith(f"run {name}")]
            if not any(entry["environment"] == about["environment"] for entry in known):
                number = f", command {len(known) + 1}" if known else ""
                found[f"run {name}{number}"] = {**about, "settings": {"model": log.spec.model, **decoding}}
    return found
