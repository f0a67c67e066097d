"""A decode, or a lens, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable
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

MIN_SHIFT = 0.1  # share of the probability that a method must move for a step to be listed


def table(answer: MethodOutput, layout: Layout | None = None) -> Table:
    """The steps at which the method mattered: it changed the best token, or moved at least a tenth of the probability."""
    kept = [
        (number, step)
        for number, step in enumerate(answer.steps, 1)
        if step.instead_of is not None or step.shift >= MIN_SHIFT
    ]
    own = own_settings(answer.method)
    title = f"{answer.name}: {len(answer.changed)} of {len(answer.steps)} steps changed" + (f" ({own})" if own else "")
    shown = Table(title=title, title_justify="left", header_style="bold", box=SIMPLE_HEAD, padding=0)
    if not kept:
        shown.show_header, shown.caption = False, "The method changed no step noticeably."
    columns: dict[str, Callable[[int, TokenStep], str | Text]] = {
        "step": lambda number, _: str(number),
        "token": lambda _, step: Text(printable(step.text), style="bold" if step.instead_of is not None else ""),
        "instead of": lambda _, step: Text("" if step.instead_of is None else printable(step.instead_of)),
        "model → after": lambda _, step: _change(step),
        "plausible\ntokens": lambda _, step: str(step.plausible_tokens),
        "layer": lambda _, step: "" if step.layer is None else str(step.layer),
        "patch\n(row, col)": lambda _, step: place(step.vision_token, layout),
        "divergence": lambda _, step: "" if step.divergence is None else f"{step.divergence:.3f}",
        "weight": lambda _, step: "" if step.weight is None else f"{step.weight:.2f}",
    }
    if len({step.layer for _, step in kept} - {None}) < 2:
        del columns["layer"]
    if not isinstance(answer.method.get("weight"), str):  # the same at every step
        del columns["weight"]
    for name in columns:
        left = name.startswith(("token", "instead of", "patch", "model"))
        # long entries wrap on narrow terminals, but not the step and its token
        shown.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=name in ("step", "token"))
    for number, step in kept:
        shown.add_row(*(entry(number, step) for entry in columns.values()))
    return shown


def _change(step: TokenStep) -> str:
    """The chosen token's probability before and after."""
    chosen = next((c for c in step.candidates if c.token == step.token), None)
    return "" if chosen is None else f"{_percent(chosen.base)} → {_percent(chosen.final)}"


def place(token: int | None, layout: Layout | None) -> str:
    """Row and column of a vision token's patch, counted from 1; its number where they are not known."""
    if token is None:
        return ""
    region = layout.region(token) if layout is not None else None
    if region is None or layout is None:
        return f"#{token}"
    image = f"image {region.image + 1} " if len(layout.sizes) > 1 else ""
    view = "" if region.view == "image" else f"{region.view} "
    return f"{image}{view}{region.row + 1},{region.column + 1}"


def words_table(lens: Lens, reading: int, layer: int) -> Table:
    """For each word of a set: how strongly the patches say it at a layer, and where most."""
    read = lens.readings[reading]
    assert read.maps is not None
    maps = read.maps[layer]  # (tokens, words)
    shown = Table(
        title=f"{read.name}, layer {lens.layers[layer]}",
        title_justify="left",
        header_style="bold",
        caption="The shares of a patch add up to 100 % among these words only.",
        caption_justify="left",
    )
    shown.add_column("word")
    for name in ("highest", "in patch (row, column)", "mean", "patches where it ranks first"):
        shown.add_column(name, justify="right")
    winners = maps.argmax(-1)
    for number in sorted(range(len(read.words)), key=lambda n: -float(maps[:, n].max())):
        best = int(maps[:, number].argmax())
        shown.add_row(
            read.words[number],
            f"{float(maps[best, number]):.1%}",
            place(best, lens.layout),
            f"{float(maps[:, number].mean()):.1%}",
            str(int((winners == number).sum())),
        )
    return shown


def patches_table(lens: Lens, reading: int, layer: int, most: int = 20) -> Table:
    """What the patches with the most probable words say at a layer."""
    read = lens.readings[reading]
    order = read.chance[layer, :, 0].argsort(descending=True)[:most].tolist()
    title = f"{read.name}, layer {lens.layers[layer]}: the {len(order)} of {lens.tokens} patches with the most probable word"
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("patch (row, column)", justify="right")
    shown.add_column("says")
    for token in order:
        words = Text("  ").join(
            Text(f"{printable(read.entries[int(n)])} {float(p):.1%}")
            for n, p in zip(read.top[layer, token], read.chance[layer, token], strict=True)
        )
        shown.add_row(place(token, lens.layout), words)
    return shown


def _percent(p: float) -> str:
    return f"{p:.1%}" if p < 0.01 else f"{p:.0%}"
