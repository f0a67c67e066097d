"""The style of figures, and the forest plot of a report's main metrics."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
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
                panel.plot([low, high], [y, y], color="#0072B2", linewidth=2, solid_capstyle="butt")
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
