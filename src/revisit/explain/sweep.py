"""Compare stored checks with labels: how well supports separate right words from wrong ones, at every threshold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from revisit.errors import RevisitError
from revisit.explain.checked import Check
from revisit.io.records import YES_NO, Record, read_list
from revisit.words import category

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Quality(NamedTuple):
    """What flagging words below a threshold finds."""

    threshold: float
    flagged: int
    precision: float  # of the flagged words, those that are wrong; NaN if none is flagged
    recall: float  # of the wrong words, those that are flagged; NaN if none is wrong
    f1: float


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sweep(
    rows: Sequence[Record], lines: Iterable[Mapping[str, Any]], column: str, threshold: float | None = None
) -> dict[str, Any]:
    """Compare stored checks with a column of the file that was checked; return counts, the AUROC, and the quality by threshold.

    The thresholds are the deciles of the supports, that of the checks, and the one with the best F1; None is undefined.

    Args:
        rows: The rows of the file.
        lines: The stored checks.
        column: Its values are the objects in the image, which judge each checked word; or yes or no, whether the text is right.
        threshold: Shown beside the others; by default the model's recommendation.
    """
    by_text: list[tuple[float, bool]] = []
    by_word: list[tuple[float, bool]] = []
    for line in lines:
        check, number = Check.from_dict(line, threshold), line["number"]
        if number > len(rows) or check.text not in rows[number - 1].values():
            raise RevisitError(
                f"Text {number} of these results is not in the file; check the file again with --images."
            )
        label = rows[number - 1].need(column)
        verdict = YES_NO.get(str(label).strip().lower())
        names = [name.strip().lower() for entry in read_list(label) for name in re.split("[,;]", str(entry))]
        objects = {category(name) or name for name in names}
        for word in check.checked:
            by_word.append((word.support, (category(word.text) or word.text.lower()) in objects))
        if check.checked and verdict is not None:
            by_text.append((check.least_support, verdict == "yes"))
    pairs, unit = (by_text, "text") if by_text else (by_word, "word")
    if not pairs:
        raise RevisitError("None of the texts has a checked word; there is nothing to compare with labels.")
    supports, present = map(np.array, zip(*pairs, strict=True))
    best = best_threshold(supports, present)
    cuts = {*np.quantile(supports, np.arange(1, 10) / 10).tolist(), check.threshold, best}
    rows_by_cut = [quality(supports, present, cut)._asdict() for cut in sorted(cuts)]
    return {
        "unit": unit,
        "labelled": len(present),
        "wrong": int((~present).sum()),
        "auroc": _finite(auroc(supports, present)),
        "best_threshold": best,
        "thresholds": [{name: _finite(value) for name, value in row.items()} for row in rows_by_cut],
    }


def auroc(scores: Floats, present: Flags) -> float:
    """Return the probability that a present word scores higher than an absent one; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n1 = int(present.sum())
    n0 = len(present) - n1
    return float((ranks[present].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)) if n1 and n0 else float("nan")


def quality(scores: Floats, present: Flags, threshold: float) -> Quality:
    """Return the quality of flagging the words below a threshold as absent."""
    flagged, absent = scores < threshold, ~present
    right = int((flagged & absent).sum())
    precision = right / int(flagged.sum()) if flagged.any() else float("nan")
    recall = right / int(absent.sum()) if absent.any() else float("nan")
    f1 = 2 * right / max(1, int(flagged.sum() + absent.sum()))
    return Quality(threshold, int(flagged.sum()), precision, recall, f1)


def best_threshold(scores: Floats, present: Flags) -> float:
    """Return the threshold with the largest F1, halfway between two scores."""
    order = np.argsort(scores, kind="stable")
    values, absent = scores[order], ~present[order]
    ends = np.flatnonzero(np.append(values[1:] > values[:-1], True))  # a threshold flags all words with one score
    f1 = 2 * absent.cumsum()[ends] / (ends + 1 + absent.sum())
    best = ends[f1.argmax()]
    return float((values[best] + values[best + 1]) / 2 if best + 1 < len(values) else values[best] + 1e-9)
