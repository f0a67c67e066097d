"""All studies by name: what `revisit analyze` and `revisit reproduce` run, and `revisit report` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from revisit.evaluation.environment import environment
from revisit.evaluation.records import Stored, StudyRecord
from revisit.evaluation.runner import Reporter
from revisit.evaluation.store import make_folder, read_record, slug, write_record
from revisit.paper import cases, check, grounding, latency, pointing, projection, steps
from revisit.paper.catalog import METHODS
from revisit.paper.study import Result, Subject, command
from revisit.report.document import Block, Provenance, Section, Text

FOLDER = "studies"  # below the output folder
INTRODUCTION = (
    "Object words are CHAIR's synonyms of COCO categories that the model's tokenizer writes as one token; a word is "
    "ground truth (GT) for a picture if its category is in it, otherwise it is hallucinated (Hal)."
)


@dataclass(frozen=True)
class Study:
    """A study: how it is run, and how its result is drawn."""

    title: str
    run: Callable[[Subject, Reporter], Result]
    draw: Callable[[Stored, str], list[Block]]
    methods: tuple[str, ...] = ("greedy",)  # by default; none if it decodes nothing
    subject: type[Subject] = Subject


# In the order of the report.
STUDIES = {
    "latency": Study("Latency", latency.time_methods, latency.draw, METHODS),
    "hallucinated-steps": Study("Ground-truth words at hallucinated steps", steps.hallucinated_steps, steps.draw),
    "gt-vs-hal": Study("GT and Hal probabilities, with and without the image", grounding.gt_vs_hal, grounding.draw),
    "projection": Study("What single vision tokens say", projection.projection, projection.draw, ()),
    "pointing": Study(
        "Is the selected patch on the object?",
        pointing.pointing,
        pointing.draw,
        pointing.SETTINGS,
        pointing.BoxedPictures,
    ),
    "case-study": Study("Case studies", cases.case_studies, cases.draw, ("revisit",)),
    "check": Study("Which words does the picture support?", check.check_study, check.draw, subject=check.Checked),
}


def run_study(name: str, subject: Subject, reporter: Reporter) -> Path:
    """Runs a study and writes its file: what was measured, with the command, the settings and the machine."""
    result = STUDIES[name].run(subject, reporter)
    settings = subject.settings()
    if not STUDIES[name].methods:
        settings |= {"methods": None, "max_new_tokens": None, "batch_size": None}
    return save(name, subject, settings, result)


def save(name: str, subject: Subject, settings: dict[str, Any], result: Result) -> Path:
    """Writes a study's file below the subject's output."""
    path = make_folder(Path(subject.output) / FOLDER) / f"{name}-{slug(subject.model)}-{slug(subject.data)}.json"
    record = {
        "study": name,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "settings": settings,
        "environment": environment(),
        "result": result,
    }
    write_record(path, record, StudyRecord)
    return path


def read_study(path: Path) -> dict[str, Any]:
    """A study's file as plain data; raises RevisitError if it is damaged."""
    return read_record(path, StudyRecord).model_dump(mode="json", by_alias=True)


def study_section(study: Stored) -> Section:
    """A study's file as a section."""
    about = study["settings"]
    found = STUDIES[study["study"]]
    blocks = found.draw(study["result"], study.get("name") or study["study"])
    return Section(f"{found.title} · {about['model']} · {about['data']}", [*blocks, provenance(study)], level=3)


def study_sections(studies: Iterable[Stored]) -> list[Section]:
    """All studies in the order of `STUDIES`."""
    order = list(STUDIES)
    sections = [study_section(study) for study in sorted(studies, key=lambda study: order.index(study["study"]))]
    return [Section("Analyses", [Text(INTRODUCTION)]), *sections] if sections else []


def provenance(about: Stored) -> Provenance:
    """The command and settings of a study or an ablation."""
    kept = {k: v for k, v in about["settings"].items() if v is not None and not isinstance(v, (dict, list))}
    return Provenance(about["command"], ", ".join(f"{k} {v}" for k, v in kept.items()))
