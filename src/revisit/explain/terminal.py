"""A decode, or a lens, as tables for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from revisit.explain.record import own_settings
from revisit.explain.tokens import printable

if TYPE_CHECKING:
    from revisit.explain.lens import Lens
    from revisit.explain.record import MethodOutput, TokenStep
    from revisit.models.geometry import Layout


def table(
    answer: MethodOutput, layout: Layout | None = None, *, all_steps: bool = False, threshold: float = 0.1
) -> Table:
    """The steps at which the method mattered: it changed the best token, or moved at least `threshold` of probability."""
    kept = [
        (number, step)
        for number, step in enumerate(answer.steps, 1)
        if all_steps or step.instead_of is not None or step.shift >= threshold
    ]
    own = own_settings(answer.method)
    title = f"{answer.name}: {len(answer.changed)} of {len(answer.steps)} steps changed" + (f" ({own})" if own else "")
    made = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    left = ("token", "instead of", "patch", "model → after")
    several_layers = len({step.layer for _, step in kept} - {None}) > 1
    adaptive = isinstance(answer.method.get("weight"), str)  # from step to step
    names = [
        "step",
        "token",
        "instead of",
        "model → after",
        "plausible\ntokens",
        "layer",
        "patch\n(row, col)",
        "divergence",
        "weight",
    ]
    left_out = {"layer": not several_layers, "weight": not adaptive}
    for name in names:
        if not left_out.get(name):
            words = name.startswith(left)
            # long entries wrap on narrow terminals, but not the step and its token
            made.add_column(
                name, justify="left" if words else "right", overflow="fold", no_wrap=name in ("step", "token")
            )
    for number, step in kept:
        chosen = next((c for c in step.candidates if c.token == step.token), None)
        made.add_row(
            str(number),
            Text(printable(step.text), style="bold" if step.instead_of is not None else ""),
            Text(printable(step.instead_of) if step.instead_of is not None else ""),
            "" if chosen is None else f"{_percent(chosen.base)} → {_percent(chosen.final)}",
            str(step.set_size),
            *(["" if step.layer is None else str(step.layer)] if several_layers else []),
            place(step, layout),
            "" if step.divergence is None else f"{step.divergence:.3f}",
            *(["" if step.weight is None else f"{step.weight:.2f}"] if adaptive else []),
        )
    if not kept:
        made.show_header, made.caption = False, "The method changed no step noticeably."
    return made


def place(step: TokenStep, layout: Layout | None) -> str:
    """Row and column of the selected patch, counted from 1; the number of the vision token where that is not known."""
    if step.index is None:
        return ""
    region = layout.region(step.index) if layout is not None else None
    if region is None or layout is None:
        return f"#{step.index}"
    image = f"image {region.image + 1} " if len(layout.sizes) > 1 else ""
    view = "" if region.view == "image" else f"{region.view} "
    return f"{image}{view}{region.row + 1},{region.column + 1}"


def words_table(lens: Lens, reading: int, layer: int) -> Table:
    """For each word of a set: how strongly the patches say it at a layer, and where most."""
    read = lens.readings[reading]
    assert read.maps is not None
    maps = read.maps[layer]  # (tokens, words)
    made = Table(
        title=f"{read.name}, layer {lens.layers[layer]}",
        title_justify="left",
        header_style="bold",
        caption="The shares of a patch add up to 100 % among these words only.",
        caption_justify="left",
    )
    made.add_column("word")
    for name in ("highest", "in patch (row, column)", "mean", "patches with it as best word"):
        made.add_column(name, justify="right")
    winners = maps.argmax(-1)
    for number in sorted(range(len(read.words)), key=lambda n: -float(maps[:, n].max())):
        best = int(maps[:, number].argmax())
        made.add_row(
            read.words[number],
            f"{float(maps[best, number]):.1%}",
            _spot(lens, best),
            f"{float(maps[:, number].mean()):.1%}",
            str(int((winners == number).sum())),
        )
    return made


def patches_table(lens: Lens, reading: int, layer: int, most: int = 20) -> Table:
    """What the patches with the most probable words say at a layer."""
    read = lens.readings[reading]
    order = read.chance[layer, :, 0].argsort(descending=True)[:most].tolist()
    title = f"{read.name}, layer {lens.layers[layer]}: the {len(order)} of {lens.tokens} patches with the most probable word"
    made = Table(title=title, title_justify="left", header_style="bold")
    made.add_column("patch (row, column)", justify="right")
    made.add_column("says")
    for token in order:
        said = Text("  ").join(
            Text(f"{printable(read.entries[int(n)])} {float(p):.1%}")
            for n, p in zip(read.top[layer, token], read.chance[layer, token], strict=True)
        )
        made.add_row(_spot(lens, token), said)
    return made


def _spot(lens: Lens, token: int) -> str:
    region = lens.layout.region(token)
    return f"#{token}" if region is None else f"{region.row + 1},{region.column + 1}"


def _percent(p: float) -> str:
    return f"{p:.1%}" if p < 0.01 else f"{p:.0%}"
