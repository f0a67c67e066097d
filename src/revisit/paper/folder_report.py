"""`revisit report`: evaluation runs, ablations and studies at or below a folder as one document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from revisit.errors import RevisitError
from revisit.eval.log import Log, unfinished
from revisit.eval.report.document import Document, Section, Text
from revisit.eval.report.run_report import (
    find_runs,
    main_sections,
    provenance_section,
    sources_of,
    unfinished_section,
)
from revisit.explain.files import slug
from revisit.paper.ablation import INTRODUCTION, ablation_sections, read_panels
from revisit.paper.studies import FOLDER, read_study, study_sections
from revisit.paper.study import CAPTIONS, Stored


def build(folder: Path, *, resamples: int = 4999, out: Path | None = None) -> Document:
    """Build the report of a folder.

    Args:
        folder: Where `revisit eval`, `ablate`, `analyze` or `reproduce` wrote.
        resamples: Draws of the paired tests.
        out: Where the report will be written; the folder itself by default.

    Raises:
        RevisitError: If the folder does not exist or contains nothing to report.
    """
    if not folder.is_dir():
        raise RevisitError(f"{folder} is not a folder; give the --out folder of `revisit eval`, `ablate` or `analyze`.")
    runs = find_runs(folder)
    places = {name: logs[0].folder for name, logs in runs.items()}
    panels = {name: found for name, place in places.items() if (found := read_panels(place))}
    files = sorted(path for path in folder.rglob("*.json") if path.parent.name == FOLDER)
    studies = [
        {**read_study(path), "name": slug(path.relative_to(folder).with_suffix("").as_posix(), 100)} for path in files
    ]
    if not studies and not any(log.scores for logs in runs.values() for log in logs):
        state = " ".join(filter(None, map(unfinished, runs.values())))
        raise RevisitError(
            f"Nothing to report in {folder}: no finished log, no study of `revisit analyze`. {state}".strip()
        )
    captions = {name for name, place in places.items() if place.name == CAPTIONS and (place.parent / FOLDER).is_dir()}
    shown = {name: _main_logs(logs, panels.get(name, ())) for name, logs in runs.items() if name not in captions}
    sections = unfinished_section(runs) + main_sections(shown, resamples, out or folder)
    if panels:
        sections.append(Section("Ablations", [Text(INTRODUCTION)]))
    for name, own in panels.items():
        sections += ablation_sections(own, runs[name], f"ablation-{slug(name)}")
    sections += study_sections(studies)
    sections.append(provenance_section(sources_of(runs) | {f"study {study['name']}": study for study in studies}))
    models = {log.spec.model for logs in runs.values() for log in logs}
    models = models or {study["settings"]["model"] for study in studies}
    lead = f"Models: {', '.join(sorted(models))}. Everything was measured by the commands listed under Provenance."
    return Document("ReVisiT: results", lead, sections)


def _main_logs(logs: Sequence[Log], panels: Sequence[Stored]) -> list[Log]:
    """Return the logs that do not only belong to an ablation."""
    varied = {method for panel in panels for method in panel["rows"]}
    kept = [log for log in logs if log.spec.method not in varied]
    others = {(log.spec.model, log.spec.benchmark) for log in kept if log.spec.method != "greedy" or not varied}
    return [log for log in kept if (log.spec.model, log.spec.benchmark) in others]
