"""The report of evaluation runs: what is unfinished, a section per benchmark, and where every number comes from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from revisit.benchmarks import registry
from revisit.benchmarks.base import Metric
from revisit.evaluation.comparison import Table as Compared
from revisit.evaluation.comparison import compare_folder
from revisit.evaluation.records import Stored
from revisit.evaluation.store import partial_text, read_json, read_results, unfinished
from revisit.report.comparisons import difference_tables, ranked, seed_tables, value_table
from revisit.report.document import Block, Cell, Provenance, Section, Table, Text

MAIN_TEXT = (
    "Best in bold, second best underlined, 95 % intervals in brackets. Differences are paired by item: p-value of a permutation test after "
    "Holm's correction over the table, and the bootstrap interval at the level of that test."
)


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
        runs.append(Run(path.parent, path.parent.relative_to(folder).as_posix(), results, keys))
    return runs


def unfinished_section(runs: Iterable[Run]) -> list[Section]:
    """What is incomplete, with the command that finishes it; empty if every run is complete."""
    lines = []
    for run in runs:
        if missing := unfinished(run.results):
            cells = "; ".join(partial_text(cell) for cell in missing.cells)
            lines.append((run.name, f"{len(missing.cells)} of {missing.total}", cells, " ; ".join(missing.commands)))
    if not lines:
        return []
    heads = ("Run", "Without a result", "Which", "Command that finishes it")
    caption = "These runs are not finished: the tables below lack the combinations of model, method and benchmark listed here."
    return [Section("Incomplete", [Table(heads, lines, caption, left=4)])]


def main_sections(runs: Sequence[Run], resamples: int) -> list[Section]:
    """A section per benchmark: values, differences to plain decoding, and sub-settings."""
    found: dict[str, dict[int, list[Compared]]] = {}  # benchmark -> number of the run -> its tables
    problems: list[str] = []
    for number, run in enumerate(runs):
        if run.keys:
            for table in compare_folder(run.place, resamples=resamples, problems=problems, keys=run.keys):
                found.setdefault(table.benchmark, {}).setdefault(number, []).append(table)
    if not found and not problems:
        return []
    sections = [Section("Main results", [Text(MAIN_TEXT), *map(Text, problems)])]
    for benchmark in found:
        blocks: list[Block] = []
        for number, tables in found[benchmark].items():
            complete = (cell for cell in runs[number].results["cells"] if cell["status"] == "complete")
            cells = [cell for cell in complete if cell["benchmark"]["name"] == benchmark]
            for protocol in dict.fromkeys((table.version, table.variant) for table in tables):
                same = [table for table in tables if (table.version, table.variant) == protocol]
                blocks += [value_table(same), *difference_tables(same), *seed_tables(same)]
            blocks += [*detail_tables(cells, benchmark), *provenance_of_cells(cells)]
        sections.append(Section(registry.title(benchmark), blocks, level=3))
    return sections


def cell_name(cell: Stored, cells: Iterable[Stored]) -> str:
    """A cell's method, with its seed if the method was run with several."""
    label = str(cell["method"]["label"])
    seeds = {other["seed"] for other in cells if other["method"]["label"] == label}
    return f"{label}, seed {cell['seed']}" if len(seeds) > 1 else label


def detail_tables(cells: Iterable[Stored], benchmark: str) -> list[Table]:
    """Sub-settings (POPE's sources and settings, MMMU's subjects) as rows, methods as columns, a table per model."""
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
        lines = []
        for part in parts:
            line: list[Cell | str] = [part.replace("_", " ")]
            for kind in kinds:
                metric = metrics.get(f"{part}/{kind}")
                line += ranked(own, metric) if metric else [""] * len(own)
            lines.append(line)
        heads = ("Setting", *(cell_name(cell, own) for _ in kinds for cell in own))
        title = registry.title(benchmark) if label == benchmark else label
        caption = f"{title}, {model}: {registry.parts(benchmark)}."
        groups = [(kind, len(own)) for kind in kinds]
        found.append(Table(heads, lines, caption, groups, folded=len(parts) > 9))
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
