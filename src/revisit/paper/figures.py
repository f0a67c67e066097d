"""Line plots. Series differ in marker and dash as well as in color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from revisit.eval.report.document import Figure
from revisit.eval.report.figures import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, in an order whose neighbors differ in lightness too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", "-", "--", "-.")


@dataclass(frozen=True)
class Series:
    """Values under one label; `low` and `high` are their intervals."""

    label: str
    y: Sequence[float]
    x: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Plot:
    """One pair of axes. `baseline` is the value of plain decoding."""

    series: Sequence[Series]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log: bool = False
    baseline: float | None = None


def curves(name: str, caption: str, panels: Sequence[Plot]) -> Figure:
    """Draw the plots side by side, as lines with markers; intervals are bands."""

    def paint(axes: list[Axes]) -> None:
        for ax, panel in zip(axes, panels, strict=True):
            for number, series in enumerate(panel.series):
                color, marker, line = (styles[number % 7] for styles in (COLORS, MARKERS, LINES))
                if series.low:
                    ax.fill_between(series.x, series.low, series.high, color=color, alpha=0.15, linewidth=0)
                ax.plot(series.x, series.y, label=series.label, color=color, marker=marker, linestyle=line)
            if panel.baseline is not None:
                ax.axhline(panel.baseline, color="#333333", linestyle=(0, (4, 3)), linewidth=1, label="greedy")
            ax.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
            if panel.log:
                ax.set_xscale("log")
            ax.legend(loc="best")

    descriptions = []  # alternative text: about five points of each curve
    for panel in panels:
        for series in panel.series:
            points = list(zip(series.x, series.y, strict=True))
            values = ", ".join(f"{x:g} {y:.1f}" for x, y in points[:: max(1, len(points) // 5)])
            descriptions.append(" ".join(filter(None, (panel.title, series.label))) + f": {values}")
    size = max(5.2, 4.0 * len(panels)), 3.2
    return Figure(name, draw(paint, size, (1, len(panels))), caption, "; ".join(descriptions))


def recall_curve(label: str, rows: Sequence[Mapping[str, float]]) -> Series:
    """Return the curve of recall@k in percent, with its interval."""
    recall, low, high = ([100 * row[key] for row in rows] for key in ("recall", "low", "high"))
    return Series(label, recall, [row["k"] for row in rows], low, high)
