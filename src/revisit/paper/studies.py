"""All studies by name: what `revisit analyze` and `revisit reproduce` run, and `revisit report` draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.eval.report.document import Block, Provenance, Section, Text
from revisit.eval.run import Reporter
from revisit.eval.spec import environment
from revisit.explain.files import make_folder, slug, write_json
from revisit.explain.records import read_json
from revisit.paper import cases, grounding, latency, projection, steps
from revisit.paper.catalog import METHODS
from revisit.paper.study import Result, Stored, Subject, command

FOLDER = "studies"  # below the output folder
INTRODUCTION = (
    "Object words are CHAIR's synonyms of COCO categories that the model's tokenizer writes as one token; a word is "
    "ground truth (GT) for an image if its category is in it, otherwise it is hallucinated (Hal)."
)


@dataclass(frozen=True)
class Study:
    """How a study is run, and how its result is drawn."""

    title: str
    run: Callable[[Subject, Reporter], Result]
    draw: Callable[[Stored, str], list[Block]]
    methods: tuple[str, ...] = ("greedy",)  # by default; none if nothing is decoded
    only: str | None = None  # the only method that it studies


# In the order of the report.
STUDIES = {
    "latency": Study("Latency", latency.time_methods, latency.draw, METHODS),
    "hallucinated-steps": Study("Ground-truth words at hallucinated steps", steps.hallucinated_steps, steps.draw),
    "gt-vs-hal": Study("GT and Hal probabilities, with and without the image", grounding.gt_vs_hal, grounding.draw),
    "projection": Study("What single vision tokens predict", projection.projection, projection.draw, ()),
    "case-study": Study("Case studies", cases.case_studies, cases.draw, ("revisit",), "revisit"),
}


def run_study(name: str, subject: Subject, reporter: Reporter) -> Path:
    """Run a study and write its file: what was measured, with the command, the settings and the machine."""
    result = STUDIES[name].run(subject, reporter)
    settings = subject.settings()
    if not STUDIES[name].methods:
        settings |= {"methods": None, "max_new_tokens": None, "batch_size": None}
    return save(name, subject, settings, result)


def save(name: str, subject: Subject, settings: dict[str, Any], result: Result) -> Path:
    """Write a study's file below the subject's output."""
    path = make_folder(Path(subject.output) / FOLDER) / f"{name}-{slug(subject.model)}-{slug(subject.data)}.json"
    record = {
        "study": name,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "settings": settings,
        "environment": environment(),
        "result": result,
    }
    write_json(path, record)
    return path


def read_study(path: Path) -> dict[str, Any]:
    """Return a study's file; raise RevisitError if it is something else."""
    found = read_json(path)
    if not isinstance(found, dict) or found.get("study") not in STUDIES or "environment" not in found:
        raise RevisitError(f"{path} is not a study of `revisit analyze`; move it away.")
    return found


def study_section(study: Stored) -> Section:
    """Draw a study's file as a section."""
    about = study["settings"]
    found = STUDIES[study["study"]]
    blocks = found.draw(study["result"], study.get("name") or study["study"])
    return Section(f"{found.title} · {about['model']} · {about['data']}", [*blocks, provenance(study)], level=3)


def study_sections(studies: Iterable[Stored]) -> list[Section]:
    """Draw all studies in the order of `STUDIES`."""
    order = list(STUDIES)
    sections = [study_section(study) for study in sorted(studies, key=lambda study: order.index(study["study"]))]
    return [Section("Analyses", [Text(INTRODUCTION)]), *sections] if sections else []


def provenance(about: Stored) -> Provenance:
    """Return the command and settings of a study or an ablation."""
    kept = {k: v for k, v in about["settings"].items() if v is not None and not isinstance(v, (dict, list))}
    return Provenance(about["command"], ", ".join(f"{k} {v}" for k, v in kept.items()))
