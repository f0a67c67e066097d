"""The paper's studies by name, their files, and `revisit report`: one document of the runs, ablations and studies in a folder.

It has a section per comparison of a run, incomplete logs, and the origin of every number.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from revisit.errors import RevisitError
from revisit.eval import benchmarks
from revisit.eval.benchmarks.base import Metric, Scores
from revisit.eval.compare import Comparison, compare, group_of
from revisit.eval.controls import NO_IMAGE
from revisit.eval.log import LOGS, Log, read_logs, unfinished
from revisit.eval.report.comparisons import LEGEND, finding, heading, ranked, tables_of, verdict
from revisit.eval.report.document import Block, Cell, Document, Section, Table, Text
from revisit.eval.report.figures import forest
from revisit.eval.run import Reporter
from revisit.eval.spec import environment
from revisit.io.files import inside, make_folder, slug, write_json
from revisit.io.records import Fields, read_json
from revisit.paper import ablation, cases, grounding, projection, steps
from revisit.paper.study import CAPTIONS, Result, Stored, Subject, command, provenance

FOLDER = "studies"  # below the output folder
INCOMPLETE = "Incomplete"
INTRODUCTION = (
    "Object words are CHAIR's synonyms of COCO categories that the model's tokenizer writes as one token; a word is "
    "ground truth (GT) for an image if its category is in it, otherwise it is hallucinated (Hal)."
)


class Study(NamedTuple):
    """A study: the functions that run it and draw its result."""

    title: str
    run: Callable[[Subject, Reporter], Result]
    draw: Callable[[Stored, str], list[Block]]
    methods: tuple[str, ...] = ("greedy",)  # the default; empty if nothing is decoded


# In the order of the report.
STUDIES = {
    "hallucinated-steps": Study("Ground-truth words at hallucinated steps", steps.hallucinated_steps, steps.draw),
    "gt-vs-hal": Study("GT and Hal probabilities, with and without the image", grounding.gt_vs_hal, grounding.draw),
    "projection": Study("What single vision tokens predict", projection.projection, projection.draw, ()),
    "case-study": Study("Case studies", cases.case_studies, cases.draw, ("revisit",)),
}


def run_study(name: str, subject: Subject, reporter: Reporter) -> Stored:
    """Run a study and write its file: the result with command, settings and environment. Return the content of the file."""
    folder = make_folder(inside(subject.out, FOLDER))  # before the work, which would be lost
    result = STUDIES[name].run(subject, reporter)
    record = {
        "study": name,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "settings": subject.settings(),
        "environment": environment(),
        "result": result,
    }
    write_json(inside(folder, f"{name}-{slug(subject.model)}-{slug(subject.data)}.json"), record)
    return record


def read_studies(folder: Path) -> list[Fields]:
    """Return the studies below a folder, in the order of `STUDIES`; `name` is unique in the folder."""
    studies = []
    for path in sorted(path for path in folder.rglob("*.json") if path.parent.name == FOLDER):
        found = read_json(path)
        if not isinstance(found, dict) or found.get("study") not in STUDIES or "environment" not in found:
            raise RevisitError(f"{path} is not a study of `revisit analyze`; move it away.")
        studies.append({**found, "name": slug(path.relative_to(folder).with_suffix("").as_posix(), 100)})
    return sorted(studies, key=lambda study: list(STUDIES).index(study["study"]))


def study_section(study: Stored) -> Section:
    """Draw a study's file as a section."""
    settings, kind = study["settings"], STUDIES[study["study"]]
    blocks = kind.draw(study["result"], study.get("name") or study["study"])
    return Section(f"{kind.title} · {settings['model']} · {settings['data']}", [*blocks, provenance(study)], level=3)


def build(folder: Path, *, resamples: int = 4999) -> Document:
    """Build the report of a folder.

    Args:
        folder: Where `revisit eval`, `ablate`, `analyze` or `reproduce` wrote.
        resamples: Draws of the paired tests.

    Raises:
        RevisitError: If the folder contains nothing to report.
    """
    runs = find_runs(folder)
    places = {name: logs[0].folder for name, logs in runs.items()}
    panels = {name: found for name, place in places.items() if (found := ablation.read_panels(place))}
    studies = read_studies(folder)
    if not studies and not any(log.scores for logs in runs.values() for log in logs):
        state = " ".join(filter(None, map(unfinished, runs.values())))
        raise RevisitError(
            f"Nothing to report in {folder}: no finished log, no study of `revisit analyze`. {state}".strip()
        )
    captions = {name for name, place in places.items() if place.name == CAPTIONS and (place.parent / FOLDER).is_dir()}
    shown = {name: _main_logs(logs, panels.get(name, ())) for name, logs in runs.items() if name not in captions}
    tables = compare_runs(shown, resamples)
    sections = unfinished_section(runs) + main_sections(tables) + all_results(shown)
    if panels:
        sections.append(Section("Ablations", [Text(ablation.INTRODUCTION)]))
    for name, stored in panels.items():
        sections += ablation.ablation_sections(stored, runs[name], f"ablation-{slug(name)}")
    if studies:
        sections += [Section("Analyses", [Text(INTRODUCTION)]), *map(study_section, studies)]
    sections.append(provenance_section(sources_of(runs) | {f"study {study['name']}": study for study in studies}))
    models = {log.spec.model for logs in runs.values() for log in logs}
    models |= {study["settings"]["model"] for study in studies}
    lead = f"Models: {', '.join(sorted(models))}. Everything was measured by the commands listed under Provenance."
    return Document(finding(tables.values()), lead, sections)


def _main_logs(logs: Sequence[Log], panels: Sequence[Stored]) -> list[Log]:
    """Leave out the logs that belong to an ablation only."""
    varied = {method for panel in panels for method in panel["rows"]}
    kept = [log for log in logs if log.spec.method not in varied]
    others = {(log.spec.model, log.spec.benchmark) for log in kept if log.spec.method != "greedy" or not varied}
    return [log for log in kept if (log.spec.model, log.spec.benchmark) in others]


# -- runs -----------------------------------------------------------------------------------------------------------


def find_runs(folder: Path) -> dict[str, list[Log]]:
    """Return the logs of a folder and all folders in it that `revisit eval` wrote to, by the path of the folder."""
    runs = sorted({path.parent.parent for path in folder.rglob(f"{LOGS}/*.jsonl")})
    return {
        folder.resolve().name if run == folder else run.relative_to(folder).as_posix(): read_logs(run) for run in runs
    }


def unfinished_section(runs: Mapping[str, Sequence[Log]]) -> list[Section]:
    """Return the section about incomplete runs, with the commands that finish them; empty if all are complete."""
    notices: list[Block] = [Text(f"{name}: {notice}") for name, logs in runs.items() if (notice := unfinished(logs))]
    return [Section(INCOMPLETE, notices)] if notices else []


def compare_runs(runs: Mapping[str, Sequence[Log]], resamples: int) -> dict[str, Comparison]:
    """Return the comparisons of all runs by title."""
    tables: dict[str, Comparison] = {}
    for name, logs in runs.items():
        with suppress(RevisitError):  # no log is finished, or compare has warned that none can be compared
            for table in compare(logs, resamples=resamples):
                tables[f"{benchmarks.title(table.benchmark)} · {table.title} · {name}"] = table
    return tables


def main_sections(tables: Mapping[str, Comparison]) -> list[Section]:
    """Return a summary, then a section per comparison with its tables and the command that shows the samples."""
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
    return [*sections, Section("How to read the tables", [Text(LEGEND)], level=3)]


def all_results(runs: Mapping[str, Sequence[Log]]) -> list[Section]:
    """Return the main metric of every log of several runs, best first, with its control and environment; empty for a single run.

    Logs with damaged lines are rejected: the runs may come from other people.
    """
    complete = [(name, log, log.scores) for name, logs in runs.items() for log in logs if log.scores is not None]
    if len({name for name, _, _ in complete}) < 2:
        return []
    blocks: list[Block] = [
        Text(f"Rejected because of damaged lines ({log.damaged}): {log.path}.") for _, log, _ in complete if log.damaged
    ]
    tables: dict[tuple[str, str, int], list[tuple[str, Log, Scores]]] = {}
    for name, log, scores in complete:
        if not log.damaged and not log.spec.method.control:
            tables.setdefault((log.spec.benchmark, log.spec.scorer, len(scores.items)), []).append((name, log, scores))
    for (label, scorer, n), rows in tables.items():
        metric = rows[0][2].shown[rows[0][2].headline]
        sign = -1 if metric.better == "higher" else 1
        rows.sort(key=lambda row: sign * row[2].metrics[metric.name])
        cells = ranked([log for _, log, _ in rows], metric, intervals=True)
        lines: list[list[Cell | str]] = []
        for (name, log, _), cell in zip(rows, cells, strict=True):
            device = f"{log.spec.device}, {_versions(log.spec.libraries)}"
            lines.append(
                [log.spec.model, str(log.spec.method), name, device, cell, _without_image(log, runs[name], metric)]
            )
        heads = ("Model", "Method", "Run", "Device, torch / transformers", heading(metric), "greedy, no image")
        blocks.append(Table(heads, lines, f"{label} ({scorer}, n = {n}).", left=4))
    return [Section("All results", blocks)]


def _without_image(log: Log, run: Sequence[Log], metric: Metric) -> str:
    """Return the value of a metric in the control without the image that belongs to a log."""
    for control in run:
        same = group_of(control) == group_of(log) and control.spec.seed == log.spec.seed
        same &= control.request.items_hash == log.request.items_hash
        if same and control.scores and control.spec.method.control == NO_IMAGE:
            return metric.text(control.scores.metrics[metric.name])
    return "not run"


def _versions(libraries: Mapping[str, str | None]) -> str:
    return f"{libraries.get('torch') or '–'} / {libraries.get('transformers') or '–'}"


# -- provenance ------------------------------------------------------------------------------------------------------


def provenance_section(sources: Mapping[str, Stored]) -> Section:
    """Return the section with the command, versions and machine of every source: `written` and `environment` by name."""
    rows = []
    for name, source in sources.items():
        machine = source["environment"]
        computer = f"{machine['platform'].split('-')[0]} {machine['machine']}, {machine['cpus']} CPUs"
        command = shlex.join(machine["argv"])
        rows.append((name, command, source["written"][:19], _versions(machine["libraries"]), computer))
    heads = ("What", "Command", "Written", "torch / transformers", "Machine")
    return Section("Provenance", [Table(heads, rows, "Commands, versions and machines.", left=5)])


def sources_of(runs: Mapping[str, Sequence[Log]]) -> dict[str, Fields]:
    """Return the different commands of all runs, as sources of `provenance_section`."""
    sources: dict[str, Fields] = {}
    for name, logs in runs.items():
        commands: list[Fields] = []
        for request in (log.request for log in logs):
            if request.environment not in commands:
                commands.append(request.environment)
                number = f", command {len(commands)}" if len(commands) > 1 else ""
                sources[f"run {name}{number}"] = {"written": request.time, "environment": request.environment}
    return sources
