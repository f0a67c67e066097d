"""Pictures for papers: a decode, or a lens, as PNG, SVG or PDF."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from revisit.errors import RevisitError, need
from revisit.explain.record import Decode, MethodOutput, TokenStep, label, seeks_far
from revisit.explain.tokens import printable
from revisit.pages.document import check_apart, check_writable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from revisit.explain.lens import Lens
    from revisit.models.geometry import Layout

# They differ in lightness too, for gray prints and color-blind readers.
BASE, VISION, FINAL = "#4b6a8f", "#b08a12", "#b3410e"
HEAT = ("#d6006c00", "#d6006c80")  # color over the picture, from none to translucent
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def steps_to_draw(answer: MethodOutput, wanted: Sequence[int] | None, most: int = 4) -> list[int]:
    """The steps of a picture (from 0): those asked for, or those at which the method moved most."""
    if wanted:
        bad = [step for step in wanted if not 0 <= step < len(answer.steps)]
        if bad:
            raise RevisitError(f"There is no step {bad[0] + 1}: the answer has {len(answer.steps)} tokens.")
        return list(wanted)
    able = [n for n, step in enumerate(answer.steps) if step.candidates and len(step.candidates) > 1]
    best = sorted(able, key=lambda n: (answer.steps[n].instead_of is None, -answer.steps[n].shift))[:most]
    return sorted(best)


def decode_figure(decode: Decode, answer: int = 0, steps: Sequence[int] | None = None) -> Figure:
    """One row per step: the image with its heat map and the selected patch, and the candidates as bars."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = decode.answers[answer]
    chosen = steps_to_draw(shown, steps)
    if not chosen:
        raise RevisitError("No step of this answer had more than one plausible token, so there is nothing to draw.")
    with matplotlib.rc_context(STYLE):
        texts = [_wrapped(f"{label(a.method)}: {a.text}") for a in decode.answers]
        head = 0.17 * sum(text.count("\n") + 1 for text in texts) + 0.1
        figure = Figure(figsize=(7.0, 2.15 * len(chosen) + head), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=[head, 2.15 * len(chosen)])
        top, bottom = parts
        top.text(0.01, 0.97, "\n".join(texts), va="top", ha="left", fontsize=8.5, linespacing=1.3)
        axes = bottom.subplots(len(chosen), 2, width_ratios=[1, 1.35], squeeze=False)
        for number, (left, right) in zip(chosen, axes, strict=True):
            step = shown.steps[number]
            _image(left, decode, step, far=seeks_far(shown.method))
            instead = f"  (not {_word(step.instead_of)})" if step.instead_of else ""
            left.set_title(f"step {number + 1}: {_word(step.text)}{instead}", fontsize=9, loc="left")
            _bars(right, step)
        axes[0][1].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def lens_figure(lens: Lens, reading: int = -1, layer: int = -1) -> Figure:
    """One heat map per word of a set, on the image."""
    import matplotlib
    from matplotlib.figure import Figure

    read = lens.readings[reading]
    if read.maps is None:
        raise RevisitError("Heat maps need words, for example --words dog,cat,cup.")
    if not lens.layout.grids:
        raise RevisitError(f"Heat maps cannot be drawn: {lens.layout.reason}")
    columns = min(4, len(read.words) + 1)
    rows = math.ceil((len(read.words) + 1) / columns)
    aspect = lens.images[0].height / lens.images[0].width
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.9 * columns + 0.7, rows * (1.9 * aspect + 0.35)), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for place in axes:
            place.axis("off")
        axes[0].imshow(lens.images[0])
        axes[0].set_title(f"layer {lens.layers[layer]}", fontsize=9)
        drawn = None
        for number, word in enumerate(read.words):
            place = axes[number + 1]
            place.imshow(lens.images[0])
            drawn = _heat(place, lens.layout, read.maps[layer, :, number].numpy(), low=0.0, high=1.0) or drawn
            place.set_title(word, fontsize=9)
        if drawn is not None:
            figure.colorbar(drawn, ax=list(axes), shrink=0.6, label="share among these words")
    return figure


def check_path(path: Path, inputs: Iterable[str | Path] = ()) -> Path:
    """The path, if a figure can be written there without replacing an input; raises RevisitError if not."""
    need("matplotlib")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise RevisitError(f"Cannot write a picture as {path}: use .png, .svg or .pdf.")
    check_apart(path, inputs)
    return check_writable(path)


def save(figure: Figure, path: str | Path, dpi: int = 200) -> Path:
    """Write a figure as the format that its name asks for."""
    path = check_path(Path(path))
    figure.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def _image(axes: Axes, decode: Decode, step: TokenStep, *, far: bool) -> None:
    from matplotlib.patches import Rectangle

    region = decode.layout.region(step.vision_token) if step.vision_token is not None else None
    number = region.image if region is not None else 0
    axes.imshow(decode.images[number])
    axes.axis("off")
    if step.heat is not None and region is not None:
        _heat(axes, decode.layout, step.heat if far else -step.heat, region.image, region.view)
    if region is not None:
        x0, y0, x1, y1 = region.box
        for width, color in ((3.2, "black"), (1.6, "white")):
            axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor=color, linewidth=width))


def _heat(
    axes: Axes,
    layout: Layout,
    values: np.ndarray,
    image: int = 0,
    view: str | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """Color an image by values, one per vision token; the larger, the more color."""
    from matplotlib.colors import LinearSegmentedColormap

    finite = values[np.isfinite(values)]
    low = float(finite.min()) if low is None else low
    high = float(finite.max()) if high is None else high
    width, height = layout.sizes[image]
    views = {grid.view for grid in layout.grids if grid.image == image}
    view = view or ("tile" if "tile" in views else next(iter(views), "image"))
    drawn, colors = None, LinearSegmentedColormap.from_list("heat", HEAT)
    for grid in layout.grids:
        if grid.image != image or grid.view != view:
            continue
        index = grid.first + np.arange(grid.tokens).reshape(grid.rows, grid.columns + grid.gap)[:, : grid.columns]
        xs = [grid.xs[0][0], *(b for _, b in grid.xs)]
        ys = [grid.ys[0][0], *(b for _, b in grid.ys)]
        drawn = axes.pcolormesh(xs, ys, values[index], cmap=colors, vmin=low, vmax=high, linewidth=0, rasterized=True)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return drawn


def _bars(axes: Axes, step: TokenStep, most: int = 6) -> None:
    own = [c for c in step.candidates if c.token == step.token]
    alone = max(step.candidates, key=lambda c: c.base)
    shown = list(dict.fromkeys([*step.candidates[:most], *own, alone]))
    middle = "vision token" if step.vision_token is not None else "contrast"
    for k, candidate in enumerate(shown):
        pairs = [("model", candidate.base, BASE), (middle, candidate.vision, VISION), ("after", candidate.final, FINAL)]
        for j, (name, value, color) in enumerate(pairs):
            if value is not None:
                axes.barh(k + (j - 1) * 0.26, value, height=0.24, color=color, label=name if k == 0 else None)
    axes.set_yticks(range(len(shown)), [_word(c.text) for c in shown])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.tick_params(length=0)
    axes.set_xlabel("probability", fontsize=8)


def _word(text: str) -> str:
    """A token as matplotlib should print it: dollar signs are not mathematics."""
    return printable(text).replace("$", r"\$")


def _wrapped(text: str, width: int = 108) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return "\n".join(textwrap.wrap(shown.replace("$", r"\$"), width)) or text
