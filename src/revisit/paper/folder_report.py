"""`revisit report`: evaluation runs, ablations and studies at or below a folder as one document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from revisit.errors import RevisitError
from revisit.evaluation.records import Stored
from revisit.evaluation.store import slug
from revisit.paper.ablation import FILE as ABLATION
from revisit.paper.ablation import INTRODUCTION, ablation_sections, read_ablation
from revisit.paper.studies import FOLDER, read_study, study_sections
from revisit.paper.study import CAPTIONS
from revisit.report.document import Document, Section, Text
from revisit.report.run_report import Run, main_sections, provenance_section, read_runs, unfinished_section


def build(folder: Path, *, resamples: int = 4999, out: Path | None = None) -> Document:
    """The report of a folder.

    Args:
        folder: Where `revisit eval`, `ablate`, `analyze` or `reproduce` wrote.
        resamples: Draws of the paired tests.
        out: Where the report will be written; the folder itself by default.

    Raises:
        RevisitError: If the folder does not exist or contains nothing to report.
    """
    if not folder.is_dir():
        raise RevisitError(f"{folder} is not a folder; give the --out folder of `revisit eval`, `ablate` or `analyze`.")
    runs = read_runs(folder)
    panels = {run.place: read_ablation(run.place) for run in runs if (run.place / ABLATION).exists()}
    files = sorted(path for path in folder.rglob("*.json") if path.parent.name == FOLDER)
    studies = [
        {**read_study(path), "name": slug(path.relative_to(folder).with_suffix("").as_posix(), 100)} for path in files
    ]
    if not runs and not studies:
        raise RevisitError(
            f"Nothing to report in {folder}: no results.json of `revisit eval` or `ablate`, no studies of `revisit analyze`."
        )
    shown = [_main_cells(run, panels.get(run.place)) for run in runs if not _captions_only(run.place)]
    sections = unfinished_section(runs) + main_sections(shown, resamples, out or folder)
    if panels:
        sections.append(Section("Ablations", [Text(INTRODUCTION)]))
    for run in runs:
        if run.place in panels:
            sections += ablation_sections(panels[run.place], run.results, f"ablation-{slug(run.name)}")
    sections += study_sections(studies)
    sources: dict[str, Stored] = {f"run {run.name}": run.results for run in runs}
    sections.append(provenance_section(sources | {f"study {study['name']}": study for study in studies}))
    models = {cell["model"]["name"] for run in runs for cell in run.results["cells"]}
    models = models or {study["settings"]["model"] for study in studies}
    lead = f"Models: {', '.join(sorted(models))}. Everything was measured by the commands printed below each table."
    return Document("ReVisiT: results", lead, sections)


def _captions_only(place: Path) -> bool:
    """Whether a run only holds the captions that studies read."""
    return place.name == CAPTIONS and (place.parent / FOLDER).is_dir()


def _main_cells(run: Run, about: Stored | None) -> Run:
    """The run without the cells that only belong to an ablation."""
    if about is None:
        return run
    varied = {row["method"] for panel in about["panels"] for row in panel["rows"]}
    cells = [c for c in run.results["cells"] if c["key"] in run.keys and c["method"]["label"] not in varied]
    asked = {_question(cell) for cell in cells if cell["method"]["label"] != "greedy"}
    return replace(run, keys=frozenset(cell["key"] for cell in cells if _question(cell) in asked))


def _question(cell: Stored) -> tuple[str, str]:
    return cell["model"]["name"], cell["benchmark"]["label"]
