"""The figures of reports: line plots, and the forest plot of main metrics. Series differ in marker and dash as well as in color."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from revisit.eval.compare import Comparison
from revisit.eval.report.comparisons import heading, headline_metric, short_names
from revisit.eval.report.document import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.hashsalt": "revisit",  # the same figure is the same file
    # Okabe and Ito's palette, in an order whose neighbors differ in lightness too
    "axes.prop_cycle": "cycler(color=['#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000']) + "
    "cycler(marker=['o', 's', '^', 'D', 'v', 'P', 'X']) + cycler(linestyle=['-', '--', '-.', ':', '-', '--', '-.'])",
}


def draw(paint: Callable[[list[Axes]], None], size: tuple[float, float], shape: tuple[int, int]) -> str:
    """Return an SVG image of `size` inches with a grid of axes, which `paint` fills."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    svg = io.StringIO()
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=size, layout="constrained")
        paint(canvas.subplots(*shape, squeeze=False).ravel().tolist())
        canvas.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def forest(tables: Mapping[str, Comparison], alt: str) -> list[Figure]:
    """Plot the paired differences to the baseline in each table's main metric, with intervals; empty if there are none."""
    panels = []
    for title, table in tables.items():
        metric, names = headline_metric(table), short_names(table.values)
        rows = [
            (names[method], [x * metric.show for x in (test.difference, test.low, test.high)], value.p_holm < 0.05)
            for method, values in table.values.items()
            if not method.control
            and (value := values[metric.name])
            and (test := value.paired)
            and not math.isnan(test.low)
        ]
        if rows and metric.better:
            panels.append((title, table.baseline, metric, rows))

    def paint(axes: list[Axes]) -> None:
        for panel, (title, baseline, metric, rows) in zip(axes, panels, strict=True):
            for y, (_, (value, low, high), significant) in enumerate(rows):
                panel.hlines(y, low, high, color="#0072B2", linewidth=2)
                filling = "#0072B2" if significant else "white"
                panel.plot([value], [y], "o", color="#0072B2", markerfacecolor=filling, markersize=7)
            panel.axvline(0, color="#333333", linewidth=1)
            left, right = panel.get_xlim()
            better = (left, 0) if metric.better == "lower" else (0, right)
            panel.axvspan(*better, color="#009E73", alpha=0.1, linewidth=0)
            panel.set_xlim(left, right)
            panel.set_ylim(len(rows) - 0.5, -0.5)
            panel.set_yticks(range(len(rows)), [name for name, _, _ in rows])
            panel.set_title(title, loc="left")
            panel.set_xlabel(f"{heading(metric)}, difference from {baseline}")
            panel.grid(axis="y", visible=False)

    caption = (
        "Paired differences in the main metric of each benchmark, with corrected intervals. Filled: corrected p < 0.05. "
        "The shaded side is better."
    )
    size = 4.8, sum(0.75 + 0.3 * len(rows) for *_, rows in panels)
    return [Figure("differences", draw(paint, size, (len(panels), 1)), caption, alt)] if panels else []


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
            for series in panel.series:
                (line,) = ax.plot(series.x, series.y, label=series.label)
                if series.low:
                    ax.fill_between(series.x, series.low, series.high, color=line.get_color(), alpha=0.15, linewidth=0)
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
