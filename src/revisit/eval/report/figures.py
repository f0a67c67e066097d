"""Static figures: how they are drawn, and the forest plot of a report's headline."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from revisit.eval.compare import Comparison
from revisit.eval.controls import is_blind
from revisit.eval.report.comparisons import heading, headline_metric, short_names
from revisit.eval.report.document import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "svg.fonttype": "path",
    "svg.hashsalt": "revisit",
    "figure.dpi": 100,
}


def draw(
    name: str,
    caption: str,
    alt: str,
    paint: Callable[[list[list[Axes]]], None],
    *,
    width: float,
    height: float,
    shape: tuple[int, int],
) -> Figure:
    """Draw a figure with a grid of axes, which `paint` fills."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(canvas)
        paint(canvas.subplots(*shape, squeeze=False).tolist())
        svg, png = io.StringIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None})
        canvas.savefig(png, format="png", dpi=200)
    return Figure(name, svg.getvalue(), png.getvalue(), caption, alt)


def forest(tables: Sequence[tuple[str, Comparison]], alt: str) -> Figure | None:
    """Plot the paired differences to the baseline in each headline metric, with intervals; None if there are none."""
    panels = []
    for title, table in tables:
        metric, names = headline_metric(table), short_names(table.values)
        rows = [
            (names[method], [x * metric.show for x in (test.difference, test.low, test.high)], value.p_holm < 0.05)
            for method, values in table.values.items()
            if not is_blind(method)
            and (value := values[metric.name])
            and (test := value.paired)
            and not math.isnan(test.low)
        ]
        if rows and metric.better:
            panels.append((title, table, metric, rows))
    if not panels:
        return None

    def paint(axes: list[list[Axes]]) -> None:
        for (place,), (title, table, metric, rows) in zip(axes, panels, strict=True):
            for at, (_, (value, low, high), sure) in enumerate(rows):
                place.plot([low, high], [at, at], color="#0072B2", linewidth=2, solid_capstyle="butt")
                place.plot(
                    [value], [at], "o", color="#0072B2", markerfacecolor="#0072B2" if sure else "white", markersize=7
                )
            place.axvline(0, color="#333333", linewidth=1)
            left, right = place.get_xlim()
            better = (left, 0) if metric.better == "lower" else (0, right)
            place.axvspan(*better, color="#009E73", alpha=0.1, linewidth=0)
            place.set_xlim(left, right)
            place.set_ylim(len(rows) - 0.5, -0.5)
            place.set_yticks(range(len(rows)), [name for name, _, _ in rows])
            place.set_title(title, loc="left")
            place.set_xlabel(f"{heading(metric)}, difference to {table.baseline}")
            place.grid(axis="y", visible=False)

    caption = (
        "Paired differences in the main metric of each benchmark, with intervals corrected like the p-values. Filled: p (Holm) < 0.05. "
        "The shaded side is better."
    )
    height = sum(0.75 + 0.3 * len(rows) for *_, rows in panels)
    return draw("differences", caption, alt, paint, width=4.8, height=height, shape=(len(panels), 1))
