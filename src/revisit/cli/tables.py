"""Tables of a decoding run and of a lens, as commands print them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from revisit.eval.report.document import Cell, Table
from revisit.explain.record import MethodOutput, instead_of, own_settings
from revisit.explain.tokens import printable

if TYPE_CHECKING:
    from revisit.decoding.trace import StepRecord
    from revisit.explain.lens import Lens, Reading
    from revisit.models.geometry import Layout

MIN_SHIFT = 0.1  # share of the probability that a method must move for a step to be listed


def steps_table(answer: MethodOutput, layout: Layout | None = None) -> Table:
    """List the steps at which the method changed the best token or moved at least a tenth of the probability."""
    kept = [(number, step) for number, step in enumerate(answer.steps, 1) if step.changed or step.shift >= MIN_SHIFT]
    own = own_settings(answer.method)
    title = f"{answer.name}: {len(answer.changed)} of {len(answer.steps)} steps changed" + (f" ({own})" if own else "")
    if not kept:
        title += ". The method changed no step noticeably."
    columns: dict[str, Callable[[int, StepRecord], Cell | str]] = {
        "step": lambda number, _: str(number),
        "token": lambda _, step: Cell(printable(step.text or ""), rank=int(step.changed)),
        "instead of": lambda _, step: printable(instead_of(step) or "") if step.changed else "",
        "patch (row, col)": lambda _, step: place(step.vision_token, layout),
        "model → after": lambda _, step: _change(step),
        "plausible tokens": lambda _, step: str(step.plausible_tokens),
        "layer": lambda _, step: "" if step.layer is None else str(step.layer),
        "divergence": lambda _, step: "" if step.divergence is None else f"{step.divergence:.3f}",
        "weight": lambda _, step: "" if step.weight is None else f"{step.weight:.2f}",
    }
    if len({step.layer for _, step in kept} - {None}) < 2:
        del columns["layer"]
    if not isinstance(answer.method.get("weight"), str):  # the same at every step
        del columns["weight"]
    rows = [[entry(number, step) for entry in columns.values()] for number, step in kept]
    return Table(tuple(columns), rows, title, left=4)


def _change(step: StepRecord) -> str:
    """Return the chosen token's probability before and after."""
    if step.token not in step.ids:
        return ""
    place = step.ids.index(step.token)
    return f"{_percent(step.base[place])} → {_percent(step.final[place])}"


def place(token: int | None, layout: Layout | None) -> str:
    """Return row and column of a vision token's patch, from 1, or its number if they are not known."""
    if token is None:
        return ""
    region = layout.region(token) if layout is not None else None
    if region is None or layout is None:
        return f"#{token}"
    image = f"image {region.image + 1} " if len(layout.sizes) > 1 else ""
    view = "" if region.view == "image" else f"{region.view} "
    return f"{image}{view}{region.row + 1},{region.column + 1}"


def words_table(lens: Lens, read: Reading, layer: int) -> Table:
    """List each word of a set with its shares at a layer, and the patch with the highest."""
    assert read.maps is not None
    maps = read.maps[layer]  # (tokens, words)
    winners, rows = maps.argmax(-1), []
    for number in sorted(range(len(read.entries)), key=lambda n: -float(maps[:, n].max())):
        best = int(maps[:, number].argmax())
        share, mean = (f"{float(value):.1%}" for value in (maps[best, number], maps[:, number].mean()))
        first = str(int((winners == number).sum()))
        rows.append((read.entries[number], share, place(best, lens.layout), mean, first))
    heads = ("word", "highest", "in patch (row, column)", "mean", "patches where it ranks first")
    about = "The shares of a patch add up to 100 % among these words only."
    return Table(heads, rows, f"{read.name}, layer {lens.layers[layer]}. {about}")


def patches_table(lens: Lens, read: Reading, layer: int) -> Table:
    """List the predictions of the 20 patches with the most probable words at a layer."""
    order = read.probabilities[layer, :, 0].argsort(descending=True)[:20].tolist()
    shown = f"the {len(order)} of {lens.layout.tokens} patches with the most probable word"
    title = f"{read.name}, layer {lens.layers[layer]}: {shown}"
    rows = []
    for token in order:
        likeliest = zip(read.top[layer, token], read.probabilities[layer, token], strict=True)
        words = "  ".join(f"{printable(read.entries[int(n)])} {float(p):.1%}" for n, p in likeliest)
        rows.append((place(token, lens.layout), words))
    return Table(("patch (row, column)", "predicts"), rows, title, left=2)


def _percent(p: float) -> str:
    return f"{p:.1%}" if p < 0.01 else f"{p:.0%}"
