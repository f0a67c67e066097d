"""Our numbers beside published ones: the difference, and whether our interval holds the published value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from revisit.paper import published
from revisit.report.document import Cell, Table, rows_of


@dataclass(frozen=True)
class Ours:
    """A measured value on the printed scale, with its 95 % interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


def verdict(theirs: float, ours: Ours | None, digits: int | None = None) -> str:
    """`inside`, `outside`, `no interval` or `not run`; a published value is known to half of its last printed digit.

    `digits`: how many decimals are printed, if not as many as the number has. An interval without width, which
    resampling gives where every item counts alike, is none.
    """
    if ours is None:
        return "not run"
    if ours.low is None or ours.high is None or math.isnan(ours.low) or ours.low == ours.high:
        return "no interval"
    half = 0.5 * 10.0 ** -(decimals(theirs) if digits is None else digits)
    return "inside" if ours.low - half <= theirs <= ours.high + half else "outside"


def decimals(value: float) -> int:
    """How many decimals a published number has, one at least."""
    text = repr(float(value))
    return max(1, len(text.partition(".")[2])) if "e" not in text else 1


def comparison_table(
    theirs: Mapping[str, Mapping[str, float]],
    ours: Mapping[str, Mapping[str, Ours]],
    caption: str,
    folded: bool = False,
    first: str = "Method",
) -> Table:
    """Rows by method or setting; for every metric the published value, ours with its interval, difference and verdict."""
    metrics = list(next(iter(theirs.values())))
    # a column has as many decimals as its longest number: 29.4 among 31.05 is 29.40
    digits = {metric: max(decimals(values[metric]) for values in theirs.values()) for metric in metrics}
    lines: list[list[Cell | str]] = []
    counts: dict[str, int] = {}
    for name, values in theirs.items():
        line: list[Cell | str] = [published.NAMES.get(name, name)]
        for metric in metrics:
            value, own = values[metric], ours.get(name, {}).get(metric)
            found = verdict(value, own, digits[metric])
            counts[found] = counts.get(found, 0) + 1
            line.append(f"{value:.2f}")
            if own is None:
                line += ["–", "not run"]
                continue
            bounds = "" if found == "no interval" else f"[{own.low:.2f}, {own.high:.2f}]"
            line += [Cell(f"{own.value:.2f}", small=bounds), Cell(f"{own.value - value:+.2f}", small=found)]
        lines.append(line)
    told = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    heads = (first, *("published", "ours", "difference") * len(metrics))
    groups = tuple((metric, 3) for metric in metrics)
    return Table(heads, rows_of(lines), f"{caption} {told}.", groups=groups, folded=folded)
