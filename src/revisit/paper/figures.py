"""Static figures: curves and bars. Series differ in marker and dash as well as in color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from revisit.report.document import Figure
from revisit.report.figures import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, in an order whose neighbors differ in lightness too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", "-", "--", "-.")


@dataclass(frozen=True)
class Series:
    """Values under one label; `low` and `high` are their intervals, `marks` further values drawn on bars."""

    label: str
    y: Sequence[float]
    x: Sequence[float] = ()  # of curves
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marks: Sequence[float] = ()
    style: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """One pair of axes. `baseline` is the value of plain decoding."""

    series: Sequence[Series]
    title: str = ""
    xlabel: str = ""
    ylabel: str = ""
    log: bool = False
    baseline: float | None = None


BASELINE: dict[str, Any] = {"color": "#333333", "linestyle": (0, (4, 3)), "linewidth": 1, "label": "greedy"}


def curves(name: str, caption: str, panels: Sequence[Plot]) -> Figure:
    """Lines with markers over a numeric axis, side by side; intervals are bands."""

    def paint(axes: list[list[Axes]]) -> None:
        for place, panel in zip(axes[0], panels, strict=True):
            for number, series in enumerate(panel.series):
                style: dict[str, Any] = {
                    "color": COLORS[number % 7],
                    "marker": MARKERS[number % 7],
                    "linestyle": LINES[number % 7],
                }
                style.update(series.style)
                if series.low:
                    color = style["color"]
                    place.fill_between(series.x, series.low, series.high, color=color, alpha=0.15, linewidth=0)
                place.plot(series.x, series.y, label=series.label, **style)
            if panel.baseline is not None:
                place.axhline(panel.baseline, **BASELINE)
            place.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
            if panel.log:
                place.set_xscale("log")
            place.legend(loc="best")

    return draw(
        name, caption, _alt(panels), paint, width=max(5.2, 4.0 * len(panels)), height=3.2, shape=(1, len(panels))
    )


def bars(name: str, caption: str, labels: Sequence[str], panels: Sequence[Plot]) -> Figure:
    """Horizontal bars: a row per label, grouped by series, a panel per metric; intervals are error bars."""
    most = max(len(panel.series) for panel in panels)

    def paint(axes: list[list[Axes]]) -> None:
        for column, (place, panel) in enumerate(zip(axes[0], panels, strict=True)):
            for number, series in enumerate(panel.series):
                at = [row + 0.8 * ((number + 0.5) / most - 0.5) for row in range(len(labels))]
                hatch, color = ("", "///", "...", "xxx")[number % 4], COLORS[number % 7]
                place.barh(at, series.y, 0.74 / most, color="white", edgecolor=color, hatch=hatch, label=series.label)
                for y, value, low, high in zip(at, series.y, series.low, series.high, strict=False):
                    if low <= value <= high:  # not where the interval is undefined
                        place.errorbar(
                            value, y, xerr=[[value - low], [high - value]], color="#333333", lw=0.9, capsize=2
                        )
                if series.marks:
                    place.plot(series.marks, at, MARKERS[number % 7], color=color, label=f"{series.label}, measured")
            if panel.baseline is not None:
                place.axvline(panel.baseline, **BASELINE)
            place.set(title=panel.title, xlabel=panel.xlabel)
            place.set_yticks(range(len(labels)), labels if column == 0 else [""] * len(labels))
            place.invert_yaxis()
            place.grid(axis="y", visible=False)
        if most > 1 or panels[-1].baseline is not None:
            axes[0][-1].legend(loc="best")

    size = {"width": 2.8 + 2.4 * len(panels), "height": 1.1 + 0.3 * len(labels) * max(1, most / 2)}
    return draw(name, caption, _alt(panels, labels), paint, shape=(1, len(panels)), **size)


def _alt(panels: Sequence[Plot], labels: Sequence[str] = ()) -> str:
    """The values in words: every bar, and about five points of a curve."""
    parts = []
    for panel in panels:
        for series in panel.series:
            names = list(labels) or [f"{x:g}" for x in series.x]
            step = 1 if labels else max(1, len(names) // 5)
            values = ", ".join(f"{n} {y:.1f}" for n, y in list(zip(names, series.y, strict=True))[::step])
            parts.append(" ".join(filter(None, (panel.title, series.label))) + f": {values}")
    return "; ".join(parts)
