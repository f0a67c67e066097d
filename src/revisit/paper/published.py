"""The paper's own numbers, shipped as data, and tables that compare measured values with them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from revisit.eval.report.document import Cell, Table

NAMES = {
    "greedy": "Greedy",
    "dola": "DoLa",
    "vcd": "VCD",
    "m3id": "M3ID",
    "code": "CODE",
    "sid": "SID",
    "revisit": "ReVisiT",
}


@functools.cache
def data() -> dict[str, Any]:
    """Return the numbers, in `tables`, and their `source`."""
    text = resources.files("revisit.paper").joinpath("data/published.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def table(name: str) -> Any:
    """Return one of the paper's tables: `chair`, `pope_full`, `ablation`, `projection`, …"""
    return data()["tables"][name]


@dataclass(frozen=True)
class Measured:
    """A measured value on the printed scale, with its 95 % interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


def verdict(theirs: float, measured: Measured | None, digits: int) -> str:
    """Return `inside`, `outside`, `no interval` or `not run`; a published value is exact to half of its last of `digits` decimals.

    An interval without width, which resampling gives when all items are alike, counts as none.
    """
    if measured is None:
        return "not run"
    low, high = measured.low, measured.high
    if low is None or high is None or math.isnan(low) or low == high:
        return "no interval"
    half = 0.5 * 10.0**-digits
    return "inside" if low - half <= theirs <= high + half else "outside"


def decimals(value: float) -> int:
    """Return the number of decimals of a published number, at least one."""
    text = repr(float(value))
    return max(1, len(text.partition(".")[2])) if "e" not in text else 1


def comparison_table(
    theirs: Mapping[str, Mapping[str, float]],
    ours: Mapping[str, Mapping[str, Measured]],
    caption: str,
    folded: bool = False,
    first: str = "Method",
) -> Table:
    """Compare by method or setting: for every metric the published value, the measured one with its interval, difference and verdict."""
    metrics = list(next(iter(theirs.values())))
    # a column has as many decimals as its longest number: 29.4 among 31.05 is 29.40
    digits = {metric: max(decimals(values[metric]) for values in theirs.values()) for metric in metrics}
    lines: list[list[Cell | str]] = []
    counts: dict[str, int] = {}
    for name, values in theirs.items():
        line: list[Cell | str] = [NAMES.get(name, name)]
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
    summary = ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))
    heads = (first, *("published", "ours", "difference") * len(metrics))
    groups = tuple((metric, 3) for metric in metrics)
    return Table(heads, lines, f"{caption} {summary}.", groups=groups, folded=folded)
