"""GT versus Hal: the probability of words for objects in the image (GT), and for absent objects (Hal).

At every token of a caption the output distribution is restricted to the object vocabulary; GT max and Hal max are the largest
probabilities of a GT and of a Hal word. Both are measured again by teacher forcing without the vision tokens of the prompt.
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
from revisit.paper.steps import select
from revisit.paper.study import Result, Stored, Subject, captions_text, number, track

Floats = NDArray[np.float64]
# Per token, in percent: GT and Hal with the image, GT and Hal without it. Differences of these columns are tested.
COLUMNS = ("gt_with", "hal_with", "gt_without", "hal_without")
TESTED = {"with_image": (1, -1, 0, 0), "without_image": (0, 0, 1, -1), "delta": (1, -1, -1, 1)}


def maxima(logits: Tensor, shown: Tensor) -> Tensor:
    """Return the largest probability, in percent, of a GT and of a Hal word.  (n, words), (words,) bool -> (n, 2)"""
    p = 100 * logits.double().softmax(-1)
    return torch.stack([p[:, shown].amax(-1), p[:, ~shown].amax(-1)], dim=-1)


def signed_rank(differences: Floats) -> float:
    """Return the p-value of the two-sided Wilcoxon signed-rank test with Pratt's treatment of zeros; NaN if all are zero."""
    from scipy.stats import wilcoxon

    if not np.any(differences):
        return math.nan
    return float(wilcoxon(differences, zero_method="pratt", alternative="two-sided").pvalue)


def compare(sets: dict[str, Floats]) -> list[Result]:
    """Return averages, medians and tests of each set of tokens (n, 4); Holm's correction is over the sets, for each difference."""
    rows: list[Result] = [
        {"setting": name, "n": len(values), **{key: _mean(values[:, n]) for n, key in enumerate(COLUMNS)}}
        for name, values in sets.items()
    ]
    for key, signs in TESTED.items():
        differences = [values @ np.array(signs) for values in sets.values()]
        tests = [signed_rank(found) for found in differences]
        for row, found, p, adjusted in zip(rows, differences, tests, holm(tests), strict=True):
            median = float(np.median(found)) if len(found) else None
            p_values = {name: None if math.isnan(value) else value for name, value in (("p", p), ("p_holm", adjusted))}
            row[key] = {"median": median, **p_values}
    return rows


def _mean(values: Floats) -> float | None:
    return float(values.mean()) if len(values) else None


def gt_vs_hal(subject: Subject, reporter: Reporter) -> Result:
    """Run the study on all tokens, the tokens of hallucinated captions, and the hallucinated steps."""
    captions = subject.captions(reporter)
    vocabulary = subject.vocabulary
    chosen = select(captions, subject.loaded[1].tokenizer, vocabulary)
    steps = {caption.item.id: [mention.first for mention in kept] for caption, kept in chosen.kept}
    measured: dict[str, Floats] = {}  # image -> (tokens, 4)
    for caption in track(reporter, "with and without the image", captions):
        shown = torch.zeros(len(vocabulary.words), dtype=torch.bool)
        shown[vocabulary.indices(caption.truth)] = True
        if not bool(shown.any()) or bool(shown.all()) or not caption.tokens:
            continue
        with torch.no_grad():
            runs = [subject.forced(caption, vision=vision) for vision in (True, False)]
            both = [seen.head.logits(seen.text, vocabulary.tensor(seen.head.device)) for seen in runs]
        measured[caption.item.id] = torch.cat([maxima(logits.cpu(), shown) for logits in both], dim=1).numpy()
    if not measured:
        raise RevisitError("No image shows an object whose word is a single token, so GT and Hal cannot be compared.")
    nothing = [np.zeros((0, 4))]
    sets = {
        "All tokens": list(measured.values()),
        "All tokens in hallucinated captions": [v for image, v in measured.items() if image in chosen.hallucinated],
        "Hallucinated steps": [values[steps.get(image, [])] for image, values in measured.items()],
    }
    return {
        "captions": len(captions),
        "hallucinated_captions": len(chosen.hallucinated),
        "captions_without_ground_truth_word": len(captions) - len(measured),
        "selection": chosen.counts,
        "vocabulary": vocabulary.summary(),
        "rows": compare({name: np.concatenate(nothing + parts) for name, parts in sets.items()}),
    }


def draw(result: Stored, name: str) -> list[Block]:
    """Draw the averages and the tests."""
    averages, tests = [], []
    for row in result["rows"]:
        for condition in ("with", "without"):
            gt, hal = row[f"gt_{condition}"], row[f"hal_{condition}"]
            bold = (0, 0) if gt is None or hal is None else (int(gt > hal), int(hal > gt))
            pair = (Cell(number(gt), bold[0]), Cell(number(hal), bold[1]))
            averages.append((row["setting"], f"{condition} image", f"{row['n']:,}", *pair))
        found = [text for q in TESTED for text in (number(row[q]["median"], 3), p_value(row[q]["p_holm"]))]
        tests.append((row["setting"], f"{row['n']:,}", *found))
    text = "Averages of the largest probability (%) of a word for a present (GT) and for an absent (Hal) object, among the object words."
    tested = (
        "Wilcoxon signed-rank tests (two-sided, Pratt) of d = GT − Hal with the image, without it, and of their difference Δ; "
        "medians in points of percent, Holm's correction over the three sets of tokens."
    )
    heads = ("Tokens", "Condition", "N", "GT Max Avg", "Hal Max Avg")
    groups = (("", 1), ("d with image", 2), ("d without image", 2), ("Δ", 2))
    return [
        Text(captions_text(result) + text),
        Table(heads, averages, "GT Max Avg and Hal Max Avg (%); the larger is bold.", left=2),
        Table(("Tokens", "N", *("median", "p (Holm)") * 3), tests, tested, groups=groups),
    ]
