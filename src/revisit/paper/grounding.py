"""GT versus Hal: how much probability goes to words for what the image shows, and to words for what it does not.

At every token of a caption the output distribution is restricted to the object vocabulary; GT max and Hal max are the
largest probabilities of a shown and of an absent object's word. The caption is then written once more by teacher
forcing with every vision token removed, and both are taken again.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from revisit.errors import RevisitError
from revisit.eval.report.comparisons import p_value
from revisit.eval.report.document import Block, Cell, Table, Text
from revisit.eval.run import Reporter
from revisit.eval.statistics import holm
from revisit.models.parts import ModelParts
from revisit.paper.steps import select
from revisit.paper.study import Result, Stored, Subject, captions_text, number, track

Floats = NDArray[np.float64]
# Per token, in percent: GT and Hal with the image, GT and Hal without it. What is tested are differences of these columns.
COLUMNS = ("gt_with", "hal_with", "gt_without", "hal_without")
TESTED = {"with_image": (1, -1, 0, 0), "without_image": (0, 0, 1, -1), "delta": (1, -1, -1, 1)}


def maxima(logits: Tensor, shown: Tensor) -> Tensor:
    """Return the largest probability, in percent, of a shown and of an absent word.  (n, words), (words,) -> (n, 2)"""
    p = 100 * logits.double().softmax(-1)
    return torch.stack([p[:, shown].amax(-1), p[:, ~shown].amax(-1)], dim=-1)


def signed_rank(differences: Floats) -> float:
    """Return the p-value of the two-sided Wilcoxon signed-rank test with Pratt's treatment of zeros; NaN if all are zero."""
    from scipy.stats import wilcoxon

    if not np.any(differences):
        return math.nan
    return float(wilcoxon(differences, zero_method="pratt", alternative="two-sided").pvalue)


def compare(sets: dict[str, Floats]) -> list[Result]:
    """Return one row per set of tokens (n, 4): averages, medians, tests; Holm's correction is over the sets, for each quantity."""
    differences = {q: [values @ np.array(signs) for values in sets.values()] for q, signs in TESTED.items()}
    tests = {q: [signed_rank(d) for d in found] for q, found in differences.items()}
    adjusted = {q: holm(found) for q, found in tests.items()}
    rows = []
    for place, (name, values) in enumerate(sets.items()):
        row: Result = {"setting": name, "n": len(values)}
        row |= {key: _mean(values[:, column]) for column, key in enumerate(COLUMNS)}
        for q in TESTED:
            found = differences[q][place]
            median = float(np.median(found)) if len(found) else None
            row[q] = {"median": median, "p": _known(tests[q][place]), "p_holm": _known(adjusted[q][place])}
        rows.append(row)
    return rows


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def gt_vs_hal(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: all tokens, tokens of hallucinated captions, hallucinated steps; with the image and without it."""
    captions = subject.captions(reporter)
    model, processor = subject.loaded
    vocabulary, head = subject.vocabulary, ModelParts.of(model).head
    chosen = select(captions, processor.tokenizer, vocabulary)
    steps = {caption.item.id: [mention.first for mention in kept] for caption, kept in chosen.kept}
    nothing = [np.zeros((0, 4))]
    everywhere, hallucinated, at_steps = list(nothing), list(nothing), list(nothing)
    for caption in track(reporter, "with and without the image", captions):
        shown = vocabulary.mask(caption.truth)
        if not bool(shown.any()) or bool(shown.all()) or not caption.tokens:
            continue
        ids = vocabulary.tensor(head.device)
        parts = []
        for vision in (True, False):
            states = subject.forced_states(caption, vision=vision)
            with torch.no_grad():
                parts.append(maxima(head.logits(states, ids).cpu(), shown).numpy())
        rows = np.concatenate(parts, axis=1)  # (tokens, 4)
        everywhere.append(rows)
        if caption.item.id in chosen.hallucinated:
            hallucinated.append(rows)
        at_steps.append(rows[steps.get(caption.item.id, [])])
    if len(everywhere) == 1:
        raise RevisitError("No image shows an object whose word is a single token, so GT and Hal cannot be compared.")
    sets = {
        "All tokens": np.concatenate(everywhere),
        "All tokens in hallucinated captions": np.concatenate(hallucinated),
        "Hallucinated steps": np.concatenate(at_steps),
    }
    return {
        "captions": len(captions),
        "hallucinated_captions": len(chosen.hallucinated),
        "captions_without_ground_truth_word": len(captions) + 1 - len(everywhere),
        "selection": chosen.counts,
        "vocabulary": vocabulary.summary(),
        "rows": compare(sets),
    }


def draw(result: Stored, name: str) -> list[Block]:
    """Draw the averages and the tests."""
    text = "Averages of the largest probability (%) of a shown (GT) and of an absent (Hal) object's word, over the object words."
    return [Text(captions_text(result) + text), _averages(result["rows"]), _tests(result["rows"])]


def _averages(rows: list[Result]) -> Table:
    lines = []
    for row in rows:
        for condition, key in (("with image", "with"), ("without image", "without")):
            gt, hal = row[f"gt_{key}"], row[f"hal_{key}"]
            bold = [0, 0] if gt is None or hal is None else [int(gt > hal), int(hal > gt)]
            pair = (Cell(number(gt), bold[0]), Cell(number(hal), bold[1]))
            lines.append((row["setting"], condition, f"{row['n']:,}", *pair))
    heads = ("Tokens", "Condition", "N", "GT Max Avg", "Hal Max Avg")
    return Table(heads, lines, "GT Max Avg and Hal Max Avg (%); the larger is bold.", left=2)


def _tests(rows: list[Result]) -> Table:
    lines = [
        (
            row["setting"],
            f"{row['n']:,}",
            *(text for q in TESTED for text in (number(row[q]["median"], 3), p_value(row[q]["p_holm"]))),
        )
        for row in rows
    ]
    return Table(
        ("Tokens", "N", *("median", "p (Holm)") * 3),
        lines,
        "Wilcoxon signed-rank tests (two-sided, Pratt) of d = GT − Hal with the image, without it, and of their difference Δ; "
        "medians in points of percent, Holm's correction over the three sets of tokens.",
        groups=(("", 1), ("d with image", 2), ("d without image", 2), ("Δ", 2)),
    )
