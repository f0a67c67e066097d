"""Static figures for a page or a paper: colors that color-blind readers can tell apart, and never color alone."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from revisit.paper.published import NAMES
from revisit.report.document import Figure

# Okabe and Ito's palette, in an order whose neighbors differ in lightness too
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", "-", "--", "-.")
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
    paint: Callable[[Any], None],
    *,
    width: float = 5.2,
    height: float = 3.1,
    panels: int | tuple[int, int] = 1,
) -> Figure:
    """A figure whose axes (one, several side by side, or a grid of them) are filled by `paint`."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        canvas = Canvas(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots(*((1, panels) if isinstance(panels, int) else panels))
        paint(axes)
        svg, png = io.StringIO(), io.BytesIO()
        canvas.savefig(svg, format="svg", metadata={"Date": None})
        canvas.savefig(png, format="png", dpi=200)
    return Figure(name, svg.getvalue(), png.getvalue(), caption, alt)


def line(axes: Any, number: int, x: Sequence[float], y: Sequence[float], label: str, **more: Any) -> None:
    """A line with a color, a marker and a dash of its own."""
    style = {"color": COLORS[number % 7], "marker": MARKERS[number % 7], "linestyle": LINES[number % 7]}
    axes.plot(x, y, label=label, **{**style, **more})


def band(axes: Any, number: int, x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> None:
    """The interval around a line."""
    axes.fill_between(x, low, high, color=COLORS[number % 7], alpha=0.15, linewidth=0)


def step_recall(name: str, result: dict[str, Any]) -> Figure:
    """Recall@k at hallucinated steps."""
    rows = result["curve"]
    ks = [row["k"] for row in rows]

    def paint(axes: Any) -> None:
        band(axes, 0, ks, [100 * row["low"] for row in rows], [100 * row["high"] for row in rows])
        line(axes, 0, ks, [100 * row["recall"] for row in rows], "a shown object's word in the top k")
        axes.set(xscale="log", xlabel="k (likeliest token left out)", ylabel="recall@k (%)", ylim=(0, 102))
        axes.legend(loc="lower right")

    units = rows[0]["units"]
    caption = f"At-least-one recall@k at {units:,} hallucinated steps, with 95 % Wilson intervals."
    alt = "; ".join(f"recall at {row['k']}: {100 * row['recall']:.1f} %" for row in rows[::4])
    return draw(name, caption, alt, paint)


def projection_recall(name: str, result: dict[str, Any]) -> Figure:
    """Recall@k of single vision tokens at the final layer, and recall@1 by layer."""
    final = next(row for row in result["layers"] if row["layer"] == result["final_layer"] and row["norm"])
    kinds = (("objects", "object words"), ("full", "whole vocabulary"))

    def paint(axes: Any) -> None:
        left, right = axes
        for number, (key, label) in enumerate(kinds):
            rows = final[key]
            ks = [row["k"] for row in rows]
            band(left, number, ks, [100 * row["low"] for row in rows], [100 * row["high"] for row in rows])
            line(left, number, ks, [100 * row["recall"] for row in rows], label)
        chance = result["chance"]
        ks, values = [row["k"] for row in chance], [100 * row["recall"] for row in chance]
        left.plot(ks, values, color="#777777", linestyle=":", label="object words, random order")
        left.set(xscale="log", xlabel="k", ylabel="recall@k (%)", ylim=(0, 102), title="final layer")
        left.legend(loc="best")
        for number, (key, label) in enumerate(kinds):  # colors as on the left; hollow: without the norm
            for normed in (True, False):
                rows = [row for row in result["layers"] if row["norm"] is normed]
                layers, values = [row["layer"] for row in rows], [100 * row[key][0]["recall"] for row in rows]
                hollow = {} if normed else {"markerfacecolor": "none", "markersize": 8, "linestyle": ":"}
                line(right, number, layers, values, f"{label}, {'final norm' if normed else 'no norm'}", **hollow)
        right.set(xlabel="hidden state (0: projector output)", ylabel="recall@1 (%)", title="by layer")
        right.set_ylim(bottom=0)
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend(loc="best")

    one = {key: 100 * final[key][0]["recall"] for key, _ in kinds}
    caption = (
        f"Single vision tokens ({result['tokens']:,}) read through the LM head: recall@k of a word for an object of the "
        "picture at the final layer (left), and recall@1 at every hidden state (right)."
    )
    alt = f"recall@1 at the final layer: {one['objects']:.1f} % over object words, {one['full']:.1f} % over the whole vocabulary"
    return draw(name, caption, alt, paint, width=8.2, height=3.2, panels=2)


def grounding_bars(name: str, result: dict[str, Any]) -> Figure:
    """GT and Hal averages with the image and without it."""
    rows = [row for row in result["rows"] if row["n"]]

    def paint(axes: Any) -> None:
        places = range(len(rows))
        bars = [("gt_with", "GT, with image", 0, ""), ("hal_with", "Hal, with image", 1, "")]
        bars += [("gt_without", "GT, without", 0, "////"), ("hal_without", "Hal, without", 1, "////")]
        for number, (key, label, color, hatch) in enumerate(bars):
            axes.bar(
                [p + 0.2 * (number - 1.5) for p in places],
                [row[key] for row in rows],
                0.19,
                label=label,
                color=COLORS[color] if not hatch else "white",
                edgecolor=COLORS[color],
                hatch=hatch,
                linewidth=1,
            )
        axes.set_xticks(list(places), [row["setting"].replace(" in ", "\nin ") for row in rows])
        axes.set(ylabel="average maximum (%)")
        axes.grid(axis="x", visible=False)
        axes.legend(ncols=2, loc="upper left")
        axes.margins(y=0.3)

    caption = "GT Max Avg and Hal Max Avg over the object words, with the image and without it (teacher forcing)."
    alt = "; ".join(
        f"{r['setting']}: GT {r['gt_with']:.1f} and Hal {r['hal_with']:.1f} with the image, "
        f"{r['gt_without']:.1f} and {r['hal_without']:.1f} without" for r in rows
    )  # fmt: skip
    return draw(name, caption, alt, paint, width=6.2)


def sweep(
    name: str,
    title: str,
    metrics: Sequence[tuple[str, str]],
    lines: dict[str, list[tuple[float, dict[str, tuple[float, float, float]]]]],
    baseline: dict[str, float],
    xlabel: str,
) -> Figure:
    """A metric per panel over a numeric setting on a log axis, one line per value of another; a dashed plain decoding.

    `lines` gives (x, metric -> (value, low, high)) per line; `metrics` are (name, heading).
    """

    def paint(axes: Any) -> None:
        for panel, (metric, heading) in zip(axes if len(metrics) > 1 else [axes], metrics, strict=True):
            for number, (label, points) in enumerate(lines.items()):
                x = [place * 1.12**number for place, _ in points]  # side by side, so that intervals can be told apart
                values = [found[metric] for _, found in points]
                errors = [[v - low for v, low, _ in values], [high - v for v, _, high in values]]
                if all(e == e and e >= 0 for side in errors for e in side):
                    panel.errorbar(
                        x, [v for v, _, _ in values], errors, color=COLORS[number], fmt="none", capsize=2, lw=0.8
                    )
                line(panel, number, x, [v for v, _, _ in values], label)
            if metric in baseline:
                panel.axhline(baseline[metric], color="#333333", linestyle=(0, (4, 3)), linewidth=1, label="greedy")
            panel.set(xscale="log", xlabel=xlabel, title=heading)
        (axes[0] if len(metrics) > 1 else axes).legend(loc="best")

    caption = f"{title}; bars are 95 % intervals, the dashed line is plain decoding."
    first = metrics[0][0]
    alt = "; ".join(
        f"{label} at {xlabel} {x:g}: {first} {found[first][0]:.2f}"
        for label, points in lines.items()
        for x, found in points
    )
    return draw(name, caption, alt, paint, width=max(4.2, 3.2 * len(metrics)), height=2.9, panels=len(metrics))


def bars(
    name: str,
    title: str,
    metrics: Sequence[tuple[str, str]],
    rows: Sequence[tuple[str, dict[str, tuple[float, float, float]]]],
    baseline: dict[str, float],
) -> Figure:
    """Horizontal bars with intervals, a panel per metric; the dashed line is plain decoding."""

    def paint(axes: Any) -> None:
        panels = list(axes) if len(metrics) > 1 else [axes]
        labels = [label for label, _ in rows][::-1]
        for number, (panel, (metric, heading)) in enumerate(zip(panels, metrics, strict=True)):
            values = [found[metric] for _, found in rows][::-1]
            center = [v if v == v else 0 for v, _, _ in values]
            errors = [[max(0.0, v - low) if v == v and low == low else 0 for v, low, _ in values]]
            errors.append([max(0.0, high - v) if v == v and high == high else 0 for v, _, high in values])
            panel.barh(
                labels, center, xerr=errors, color=COLORS[5], edgecolor=COLORS[0], error_kw={"lw": 0.9, "capsize": 2}
            )
            if metric in baseline:
                panel.axvline(baseline[metric], color="#333333", linestyle=(0, (4, 3)), linewidth=1, label="greedy")
                if number == len(panels) - 1:
                    panel.legend(loc="best")
            panel.set(title=heading)
            panel.grid(axis="y", visible=False)
            if number:
                panel.set_yticklabels([])

    caption = f"{title}; bars are 95 % intervals, the dashed line is plain decoding."
    alt = "; ".join(f"{label}: {', '.join(f'{m} {found[m][0]:.2f}' for m, _ in metrics)}" for label, found in rows)
    height = 1.1 + 0.28 * len(rows)
    return draw(name, caption, alt, paint, width=max(4.6, 2.4 + 2.1 * len(metrics)), height=height, panels=len(metrics))


def latency(name: str, rows: Sequence[tuple[str, float, float]], caption: str) -> Figure:
    """Milliseconds per token by method, with standard deviations."""

    def paint(axes: Any) -> None:
        labels = [label for label, _, _ in rows][::-1]
        axes.barh(
            labels,
            [mean for _, mean, _ in rows][::-1],
            xerr=[sd for _, _, sd in rows][::-1],
            color=COLORS[5],
            edgecolor=COLORS[0],
            error_kw={"lw": 0.9, "capsize": 2},
        )
        axes.set(xlabel="ms per token")
        axes.grid(axis="y", visible=False)

    alt = "; ".join(f"{label}: {mean:.1f} ms per token" for label, mean, _ in rows)
    return draw(name, caption, alt, paint, height=1.1 + 0.3 * len(rows))


def f1_by_model(name: str, rows: Sequence[tuple[str, Mapping[str, float], Mapping[str, float]]]) -> Figure:
    """F1 of every model, plain and with ReVisiT: published values as bars, ours as marks on them."""

    def paint(axes: Any) -> None:
        places = range(len(rows))
        for number, (method, title) in enumerate((("greedy", "greedy"), ("revisit", "ReVisiT"))):
            x = [place + 0.36 * (number - 0.5) for place in places]
            heights = [theirs[method] for _, theirs, _ in rows]
            axes.bar(
                x,
                heights,
                0.34,
                color="white",
                edgecolor=COLORS[number],
                hatch=("", "///")[number],
                label=f"{title}, published",
            )
            own = [(at, ours[method]) for at, (_, _, ours) in zip(x, rows, strict=True) if method in ours]
            if own:
                axes.plot(
                    *zip(*own, strict=True),
                    color=COLORS[number],
                    marker=MARKERS[number],
                    linestyle="",
                    label=f"{title}, ours",
                )
        values = [v for _, theirs, ours in rows for v in (*theirs.values(), *ours.values())]
        axes.set_ylim(max(0, min(values) - 5), min(100, max(values) + 8))
        axes.set_xticks(list(places), [model for model, _, _ in rows], rotation=30, ha="right")
        axes.set(ylabel="CHAIR F1 (%)")
        axes.grid(axis="x", visible=False)
        axes.legend(ncols=2, loc="upper left")

    caption = (
        "Object-level F1 on CHAIR by model, plain decoding and ReVisiT; bars are the paper's values, marks are ours."
    )
    alt = "; ".join(
        f"{model}: published {theirs['greedy']:.1f} and {theirs['revisit']:.1f}"
        + (
            f", ours {ours['greedy']:.1f} and {ours['revisit']:.1f}"
            if {"greedy", "revisit"} <= ours.keys()
            else ", not run"
        )
        for model, theirs, ours in rows
    )
    return draw(name, caption, alt, paint, width=8.0, height=3.6)


def latency_f1(
    name: str,
    ours: Mapping[str, Sequence[tuple[str, float, float]]],
    theirs: Mapping[str, Sequence[tuple[str, float, float]]],
) -> Figure:
    """Time per token, as a multiple of greedy's, against F1: a panel for our measurements and one for the published.

    A method is a marker and a model a color: published points lie too near to each other for names beside them.
    """
    from matplotlib.lines import Line2D

    sides = [("ours", ours), ("published", theirs)]
    methods = list(dict.fromkeys(method for _, points in sides for rows in points.values() for method, _, _ in rows))
    models = list(dict.fromkeys(model for _, points in sides for model in points))

    def paint(axes: Any) -> None:
        for panel, (title, points) in zip(axes, sides, strict=True):
            for model, rows in points.items():
                base = next((ms for method, ms, _ in rows if method == "greedy"), math.nan)
                color, size = COLORS[models.index(model)], 7 - 2 * models.index(model)  # of equal points both are seen
                for method, ms, f1 in rows:
                    panel.plot(ms / base, f1, MARKERS[methods.index(method)], color=color, markersize=size)
            panel.set(title=title, xlabel="time per token, × greedy", ylabel="CHAIR F1 (%)")
        marks = [
            Line2D([], [], marker=MARKERS[n], color="#444444", linestyle="", label=NAMES.get(method, method))
            for n, method in enumerate(methods)
        ]
        marks += [
            Line2D([], [], color=COLORS[n], linewidth=4, linestyle="-", label=model) for n, model in enumerate(models)
        ]
        axes[-1].legend(handles=marks, loc="center left", bbox_to_anchor=(1.02, 0.5))

    caption = "Time per token as a multiple of plain decoding's against F1 on CHAIR."
    alt = "; ".join(
        f"{side}, {model}: " + ", ".join(f"{method} {ms:.1f} ms and F1 {f1:.1f}" for method, ms, f1 in rows)
        for side, points in sides
        for model, rows in points.items()
    )
    return draw(name, caption, alt, paint, width=9.6, height=3.4, panels=2)


def examples(
    name: str, title: str, rows: Sequence[tuple[Sequence[Path], str, Mapping[str, str]]], longest: int = 420
) -> Figure:
    """Pictures with their question and the answers of several methods side by side."""
    from textwrap import fill, shorten

    from revisit.models.images import open_image

    methods = list(rows[0][2])

    def paint(axes: Any) -> None:
        grid = axes.reshape(len(rows), len(methods) + 1)
        for row, (images, prompt, answers) in zip(grid, rows, strict=True):
            if images:
                row[0].imshow(open_image(images[0]))
            row[0].set_title(fill(prompt, 34), fontsize=7)
            for panel, method in zip(row[1:], methods, strict=True):
                text = fill(shorten(answers[method], longest, placeholder=" …") or "(nothing)", 38)
                panel.text(0, 1, text, va="top", ha="left", fontsize=7, wrap=True, transform=panel.transAxes)
                panel.set_title(NAMES.get(method, method), fontsize=8, loc="left")
            for panel in row:
                panel.axis("off")

    caption = f"{title}: the items whose answers differ most, in the benchmark's order."
    alt = "; ".join(
        f"{prompt}: " + "; ".join(f"{m}: {shorten(text, 160)}" for m, text in answers.items())
        for _, prompt, answers in rows
    )
    shape = (len(rows), len(methods) + 1)
    return draw(name, caption, alt, paint, width=2.6 * shape[1], height=2.5 * shape[0], panels=shape)
