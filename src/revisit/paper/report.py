"""The paper's studies by name, their files, and `revisit report`: one document of the runs, ablations and studies in a folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from revisit.errors import RevisitError
from revisit.eval.log import Log, unfinished
from revisit.eval.report.comparisons import finding
from revisit.eval.report.document import Block, Document, Section, Text
from revisit.eval.report.run_report import (
    all_results,
    compare_runs,
    find_runs,
    main_sections,
    provenance_section,
    sources_of,
    unfinished_section,
)
from revisit.eval.run import Reporter
from revisit.eval.spec import environment
from revisit.io.files import inside, make_folder, slug, write_json
from revisit.io.records import read_json
from revisit.paper import ablation, cases, grounding, projection, steps
from revisit.paper.study import CAPTIONS, Result, Stored, Subject, command, provenance

FOLDER = "studies"  # below the output folder
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
    folder = make_folder(inside(subject.output, FOLDER))  # before the work, which would be lost
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


def read_studies(folder: Path) -> list[dict[str, Any]]:
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
