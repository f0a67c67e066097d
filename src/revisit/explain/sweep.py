"""Compare stored checks with labels: how well supports separate right words from wrong ones, at every threshold."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sweep:
    """The supports of labelled words, or the least support of labelled texts."""

    supports: Floats
    present: Flags
    unit: str  # "word" or "text"
    threshold: float  # of the checks

    @property
    def best(self) -> float:
        """The threshold with the largest F1 on these labels."""
        return best_threshold(self.supports, self.present)

    @property
    def auroc(self) -> float:
        """The probability that a right one has more support than a wrong one; NaN without both."""
        return auroc(self.supports, self.present)

    def to_dict(self) -> dict[str, Any]:
        """Return the quality at deciles of the supports, at the threshold of the checks, and at the best one; None is undefined."""
        cuts = {*np.quantile(self.supports, np.arange(1, 10) / 10).tolist(), self.threshold, self.best}
        rows = [quality(self.supports, self.present, cut)._asdict() for cut in sorted(cuts)]
        return {
            "unit": self.unit,
            "labelled": len(self.present),
            "wrong": int((~self.present).sum()),
            "auroc": _finite(self.auroc),
            "best_threshold": self.best,
            "thresholds": [{name: _finite(value) for name, value in row.items()} for row in rows],
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sweep(
    rows: Sequence[Record], lines: Iterable[Mapping[str, Any]], column: str, threshold: float | None = None
) -> Sweep:
    """Compare stored checks with a column of the file that was checked.

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
    return Sweep(supports, present, unit, check.threshold)


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
    values = np.unique(scores)
    cuts = [*((values[1:] + values[:-1]) / 2), values[-1] + 1e-9]
    return float(max(cuts, key=lambda cut: quality(scores, present, cut).f1))
