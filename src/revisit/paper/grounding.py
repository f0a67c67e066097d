"""GT versus Hal: how much probability goes to words for what the picture shows, and to words for what it does not.

At every token of a caption the output distribution is restricted to the object vocabulary; GT max and Hal max are the
largest probabilities of a shown and of an absent object's word. The caption is then written once more by teacher
forcing with every vision token removed, and both are taken again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revisit.errors import RevisitError
from revisit.evaluation.runner import Reporter
from revisit.evaluation.statistics import holm
from revisit.paper.forcing import Forced
from revisit.paper.steps import select
from revisit.paper.study import Result, Subject, images, spoken, track

Floats = NDArray[np.float64]


@dataclass
class Maxima:
    """Per token, in percent: columns are GT with the image, Hal with it, GT without it, Hal without it."""

    values: Floats  # (tokens, 4)

    @property
    def with_image(self) -> Floats:
        """GT minus Hal with the image."""
        return self.values[:, 0] - self.values[:, 1]

    @property
    def without_image(self) -> Floats:
        """GT minus Hal without it."""
        return self.values[:, 2] - self.values[:, 3]

    @property
    def delta(self) -> Floats:
        """What the image adds to the difference."""
        return self.with_image - self.without_image


def maxima(logits: Tensor, shown: Tensor) -> Tensor:
    """Largest probability, in percent, of a shown and of an absent word.  (n, words), (words,) -> (n, 2)"""
    p = 100 * logits.double().softmax(-1)
    return torch.stack([p[:, shown].amax(-1), p[:, ~shown].amax(-1)], dim=-1)


def signed_rank(differences: Floats) -> tuple[float, float]:
    """(statistic, p-value) of the two-sided Wilcoxon signed-rank test with Pratt's treatment of zeros.

    NaN where no difference is other than zero: there is then nothing to rank.
    """
    from scipy.stats import wilcoxon

    if not np.any(differences):
        return math.nan, math.nan
    result = wilcoxon(differences, zero_method="pratt", alternative="two-sided")
    return float(result.statistic), float(result.pvalue)


def compare(settings: dict[str, Maxima]) -> list[Result]:
    """One row per set of tokens: averages, medians, tests; Holm's correction is over the sets, for each quantity."""
    quantities = ("with_image", "without_image", "delta")
    tests = {q: [signed_rank(getattr(m, q)) for m in settings.values()] for q in quantities}
    adjusted = {q: holm([p for _, p in found]) for q, found in tests.items()}
    rows = []
    for number, (name, found) in enumerate(settings.items()):
        averages = found.values.mean(0) if len(found.values) else np.full(4, math.nan)
        row: Result = {
            "setting": name,
            "n": len(found.values),
            "gt_with": float(averages[0]),
            "hal_with": float(averages[1]),
            "gt_without": float(averages[2]),
            "hal_without": float(averages[3]),
        }
        for q in quantities:
            differences = getattr(found, q)
            row[q] = {
                "median": float(np.median(differences)) if len(differences) else math.nan,
                "statistic": tests[q][number][0],
                "p": tests[q][number][1],
                "p_holm": adjusted[q][number],
            }
        rows.append(row)
    return rows


def gt_vs_hal(subject: Subject, reporter: Reporter) -> Result:
    """The study: all tokens, tokens of hallucinated captions, hallucinated steps; with the image and without it."""
    captions = subject.captions(reporter)
    model, processor = subject.loaded
    vocabulary, end = subject.vocabulary, subject.end
    chosen = select(captions, processor.tokenizer, vocabulary, end)
    steps: dict[str, list[int]] = {}
    for caption, mention in chosen.kept:
        steps.setdefault(caption.item.id, []).append(mention.first)
    forced = Forced(model, processor)
    everywhere, hallucinated, at_steps = [], [], []
    skipped = 0
    for caption in track(reporter, "with and without the image", captions):
        shown = vocabulary.mask(caption.truth)
        tokens = spoken(caption, end)
        if not bool(shown.any()) or bool(shown.all()) or not tokens:
            skipped += 1
            continue
        ids = vocabulary.tensor(forced.parts.head.device)
        parts = []
        for vision in (True, False):
            states = forced.states(caption.item.prompt, images(caption.item), tokens, vision=vision)
            with torch.no_grad():
                parts.append(maxima(forced.parts.head.logits(states, ids).cpu(), shown).numpy())
        rows = np.concatenate(parts, axis=1)  # (tokens, 4)
        everywhere.append(rows)
        if caption.item.id in chosen.hallucinated:
            hallucinated.append(rows)
        at_steps.append(rows[steps.get(caption.item.id, [])])
    if not everywhere:
        raise RevisitError("No picture shows an object whose word is a single token, so GT and Hal cannot be compared.")
    settings = {
        "All tokens": _joined(everywhere),
        "All tokens in hallucinated captions": _joined(hallucinated),
        "Hallucinated steps": _joined(at_steps),
    }
    return {
        "captions": len(captions),
        "hallucinated_captions": len(chosen.hallucinated),
        "captions_without_ground_truth_word": skipped,
        "selection": chosen.counts,
        "vocabulary": vocabulary.summary(),
        "rows": _without_nan(compare(settings)),
    }


def _joined(parts: list[Floats]) -> Maxima:
    return Maxima(np.concatenate(parts) if parts else np.zeros((0, 4)))


def _without_nan(value: Any) -> Any:
    """NaN as null: JSON has no other word for "nothing to say"."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value
