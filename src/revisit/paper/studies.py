"""All studies by name: what `revisit analyze` and `revisit reproduce` run, and `revisit report` draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisit.evaluation.plan import label
from revisit.evaluation.runner import Reporter
from revisit.methods.revisit import ReVisiT
from revisit.models.config import load_config
from revisit.paper.cases import case_studies
from revisit.paper.check import check_study
from revisit.paper.grounding import gt_vs_hal
from revisit.paper.pointing import SETTINGS, BoxedPictures, pointing
from revisit.paper.projection import projection
from revisit.paper.steps import hallucinated_steps
from revisit.paper.study import NO_CAPTIONS, Result, Subject, save
from revisit.paper.words import vision_words


@dataclass(frozen=True)
class Choices:
    """What some studies let the caller choose."""

    settings: Mapping[str, Any] | None = None  # of ReVisiT, for case studies
    count: int = 4  # case studies that are printed in full
    methods: tuple[str, ...] = SETTINGS  # for pointing


Outcome = tuple[Result, Result]  # the result, and what replaces settings of the subject in the file


def _case_study(subject: Subject, choices: Choices, reporter: Reporter) -> Outcome:
    method = ReVisiT.recommended(load_config(subject.model).model_type, **(choices.settings or {}))
    return case_studies(subject, method, choices.count, reporter), {"method": label(method)}


STUDIES: dict[str, Callable[[Subject, Choices, Reporter], Outcome]] = {
    "hallucinated-steps": lambda subject, choices, reporter: (hallucinated_steps(subject, reporter), {}),
    "gt-vs-hal": lambda subject, choices, reporter: (gt_vs_hal(subject, reporter), {}),
    "projection": lambda subject, choices, reporter: (projection(subject, reporter), NO_CAPTIONS),
    "vision-words": lambda subject, choices, reporter: (vision_words(subject, reporter), NO_CAPTIONS),
    "case-study": _case_study,
    "check": lambda subject, choices, reporter: (check_study(subject, reporter), {}),
    "pointing": lambda subject, choices, reporter: (
        pointing(subject, choices.methods, reporter),
        {"method": list(choices.methods)},
    ),
}


def subject_of(study: str) -> type[Subject]:
    """The kind of subject that a study is about."""
    return BoxedPictures if study in ("pointing", "check") else Subject


def run_study(study: str, subject: Subject, choices: Choices, reporter: Reporter) -> Path:
    """Runs a study and returns the file that holds its result."""
    result, settings = STUDIES[study](subject, choices, reporter)
    return save(subject, study, result, settings)
