"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from revisit.benchmarks import registry
from revisit.benchmarks.base import Metric
from revisit.evaluation.comparison import Table as Compared
from revisit.evaluation.comparison import compare_folder
from revisit.evaluation.records import Stored
from revisit.evaluation.store import read_json, read_results, unfinished
from revisit.report.comparisons import (
    READING,
    difference_tables,
    footnotes,
    ranked,
    short_names,
    value_table,
    verdict,
)
from revisit.report.document import Block, Cell, Provenance, Section, Table, Text
from revisit.report.figures import forest

MOST_COLUMNS = 10  # of figures in a table; more are split by model


@dataclass(frozen=True)
class Run:
    """The results of one output folder; `keys` are the finished cells that the main tables show."""

    place: Path
    name: str
    results: Stored
    keys: frozenset[str]


def read_runs(folder: Path) -> list[Run]:
    """Every evaluation run at or below a folder."""
    runs = []
    for path in sorted(folder.rglob("results.json")):
        found = read_json(path)
        if not isinstance(found, dict) or "cells" not in found:
            continue  # a results.json of another program
        results = read_results(path.parent)
        keys = frozenset(cell["key"] for cell in results["cells"] if cell["status"] == "complete")
        name = path.parent.relative_to(folder).as_posix()
        runs.append(Run(path.parent, folder.resolve().name if name == "." else name, results, keys))
    return runs


def unfinished_section(runs: Iterable[Run]) -> list[Section]:
    """What is incomplete, with the command that finishes it; empty if every run is complete."""
    notices = [Text(f"{run.name}: {notice}") for run in runs if (notice := unfinished(run.results))]
    return [Section("Incomplete", [*notices])] if notices else []


def main_sections(runs: Sequence[Run], resamples: int, out: Path) -> list[Section]:
    """The headline, then a section per benchmark and run: values, differences to the baseline, and sub-settings.

    `out` is where the report will be: links to samples start there.
    """
    found: dict[str, dict[int, list[Compared]]] = {}  # benchmark -> number of the run -> its tables
    problems: list[str] = []
    for number, run in enumerate(runs):
        if run.keys:
            for table in compare_folder(run.place, resamples=resamples, problems=problems, keys=run.keys):
                found.setdefault(table.benchmark, {}).setdefault(number, []).append(table)
    if not found and not problems:
        return []
    sections = [_headline(runs, found), Section("Main results", [Text(READING), *map(Text, problems)])]
    for benchmark in found:
        for number, tables in found[benchmark].items():
            blocks: list[Block] = []
            complete = (cell for cell in runs[number].results["cells"] if cell["status"] == "complete")
            cells = [cell for cell in complete if cell["benchmark"]["name"] == benchmark]
            for protocol in dict.fromkeys((table.version, table.variant) for table in tables):
                same = [table for table in tables if (table.version, table.variant) == protocol]
                wide = sum(len(table.metrics) for table in same) > MOST_COLUMNS
                blocks += [value_table(part) for part in ([[table] for table in same] if wide else [same])]
                blocks += [*difference_tables(same)]
            blocks += [
                *detail_tables(cells, benchmark),
                _samples(runs[number], cells, out),
                *provenance_of_cells(cells),
            ]
            sections.append(Section(f"{registry.title(benchmark)} · {runs[number].name}", blocks, level=3))
    return sections


def _headline(runs: Sequence[Run], found: Mapping[str, Mapping[int, Sequence[Compared]]]) -> Section:
    """One sentence per table, and the differences that they are about."""
    tables = [
        (f"{registry.title(benchmark)} · {table.title} · {runs[number].name}", table)
        for benchmark, by_run in found.items()
        for number, same in by_run.items()
        for table in same
    ]
    sentences = [verdict(table) for _, table in tables]
    figure = forest(tables, " ".join(sentences))
    return Section("In short", [*(Text(text, kind="verdict") for text in sentences), *([figure] if figure else [])])


def _samples(run: Run, cells: Sequence[Stored], out: Path) -> Text:
    """A link to the samples of these cells, or the command that writes their page."""
    page = run.place / "view" / "index.html"
    if not page.is_file():
        return Text(f"To see every sample: revisit view {shlex.quote(str(run.place))}")
    labels = {cell["benchmark"]["label"] for cell in cells}
    chosen = f"#{urlencode({'benchmark': labels.pop()})}" if len(labels) == 1 else ""
    return Text("See every sample", quote(Path(os.path.relpath(page, out)).as_posix()) + chosen)


def cell_name(cell: Stored, cells: Iterable[Stored]) -> str:
    """A cell's method, with its seed if the method was run with several."""
    label = str(cell["method"]["label"])
    seeds = {other["seed"] for other in cells if other["method"]["label"] == label}
    return f"{label}, seed {cell['seed']}" if len(seeds) > 1 else label


def detail_tables(cells: Iterable[Stored], benchmark: str) -> list[Table]:
    """Sub-settings (POPE's sources and settings, MMMU's subjects): a row for each method in each, a table per model."""
    by_model: dict[tuple[str, str], list[Stored]] = {}  # benchmarks with other options apart
    for cell in cells:
        by_model.setdefault((cell["model"]["name"], cell["benchmark"]["label"]), []).append(cell)
    found = []
    for (model, label), own in by_model.items():
        metrics = {name: Metric.from_record(name, about) for name, about in own[0]["metrics"].items() if "/" in name}
        names = [name.rsplit("/", 1) for name, metric in metrics.items() if metric.better]
        parts = list(dict.fromkeys(part for part, _ in names))
        kinds = [kind for kind in dict.fromkeys(kind for _, kind in names) if kind != "recall"]
        if len(parts) < 2:
            continue
        called = [cell_name(cell, own) for cell in own]
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


def provenance_of_cells(cells: Iterable[Stored]) -> list[Provenance]:
    """The commands that produced some cells, each once, and the settings that decide their answers."""
    found = []
    for cell in cells:
        made = cell["provenance"]
        names = {"limit": made["limit"], "seed": made["seed"], "batch size": made["batch_size"]}
        names["data"] = Path(made["data"]).name if made["data"] else None
        text = ", ".join(f"{key} {value}" for key, value in names.items() if value is not None)
        found.append(Provenance(shlex.join(made["argv"]), text))
    return list(dict.fromkeys(found))


def provenance_section(sources: Mapping[str, Stored]) -> Section:
    """Versions, machine and full settings of every run and study, by name."""
    rows = []
    for name, about in sources.items():
        machine = about["environment"]
        libraries = machine["libraries"]
        rows.append(
            (
                name,
                shlex.join(machine["argv"]),
                about["written"],
                (machine["git"] or "–")[:12],
                f"{libraries.get('torch', '–')} / {libraries.get('transformers', '–')}",
                f"{machine['platform'].split('-')[0]} {machine['machine']}, {machine['cpus']} CPUs",
            )
        )
    settings = json.dumps([about["settings"] for about in sources.values()], ensure_ascii=False, default=str)
    heads = ("What", "Command", "Written", "Commit", "torch / transformers", "Machine")
    table = Table(heads, rows, "Commands, versions and machines.", left=6)
    return Section("Provenance", [table, Provenance("settings", settings)])
