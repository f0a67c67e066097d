"""Where each vision token lies on the image it came from.

The vision tokens of an image form one or more grids (see `patch_maps`). `layout` gives those grids in original pixels,
for which it needs the image sizes and the image processor; `grids` gives their shape from what a call of `generate`
shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from revisit.models import families
from revisit.models.parts import vision_token_ids
from revisit.models.patch_maps import (
    ONE_VIEW,
    TILED_BY_IMAGE_SIZES,
    Box,
    Context,
    ImageGrid,
    Piece,
    Size,
    count_tokens,
    merged,
    native,
    place,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Inputs, Model, Processor

__all__ = ["ImageGrid", "Layout", "Region", "Size", "grids", "layout", "layout_of"]


@dataclass(frozen=True)
class Region:
    """Where one vision token looks: `box` is x0, y0, x1, y1 in pixels of the original image `image`."""

    image: int
    box: Box
    view: str
    row: int
    column: int


@dataclass(frozen=True)
class Layout:
    """The grids of all images of one prompt; where there are none, `reason` says why."""

    sizes: tuple[Size, ...]
    tokens: int
    grids: tuple[ImageGrid, ...] = ()
    reason: str = ""

    def region(self, index: int) -> Region | None:
        """The region of a vision token; None for line breaks, class tokens and patches of pure padding."""
        for grid in self.grids:
            place = grid.place(index)
            if place is None:
                continue
            width, height = self.sizes[grid.image]
            x0, y0, x1, y1 = grid.box(*place)
            box = (max(x0, 0.0), max(y0, 0.0), min(x1, float(width)), min(y1, float(height)))
            if box[0] >= box[2] or box[1] >= box[3]:
                return None
            return Region(grid.image, box, grid.view, *place)
        return None


def layout(
    config: Any, image_processor: Any, sizes: Sequence[Size], tokens: int, inputs: dict[str, Any] | None = None
) -> Layout:
    """Where the `tokens` vision tokens of one prompt lie on its images, given in the order of the prompt.

    `sizes` are (width, height) of the original images; `inputs` is what the processor returned for this prompt.
    """
    sizes = tuple((int(w), int(h)) for w, h in sizes)
    family = families.of(config.model_type)
    context = Context(config, image_processor, inputs or {}, len(sizes), family.tokens_per_side)
    patch_map = family.patch_map or (merged if context.has("image_grid_thw") else None)
    if patch_map is None:
        return Layout(sizes, tokens, reason=family.no_patch_map)
    alternatives = [list(patch_map(context, number, size)) for number, size in enumerate(sizes)]
    totals = []
    for choice in range(max(map(len, alternatives), default=0)):
        pieces = [option[min(choice, len(option) - 1)] for option in alternatives]
        placed, total = place(pieces)
        if total == tokens:
            return Layout(sizes, tokens, tuple(placed))
        totals.append(total)
    said = " or ".join(map(str, dict.fromkeys(totals))) or "no"
    return Layout(
        sizes,
        tokens,
        reason=f"{len(sizes)} image(s) of these sizes make {said} vision tokens in a {config.model_type} model, but "
        f"the prompt has {tokens}; were they processed with other settings than the image processor's?",
    )


def layout_of(model: Model, processor: Processor, images: Sequence[Image], inputs: Inputs) -> Layout:
    """Where the vision tokens of one prompt lie on its images."""
    tokens = int(
        torch.isin(inputs["input_ids"][:1], torch.tensor(vision_token_ids(model.config)).to(inputs["input_ids"])).sum()
    )
    sizes = [image.size for image in images]
    return layout(model.config, processor.image_processor, sizes, tokens, dict(inputs))


def grids(config: Any, runs: Sequence[Sequence[int]], inputs: dict[str, Any]) -> list[list[ImageGrid]]:
    """Grids of every item of a batch, as far as a call of `generate` shows them (no sizes of original images).

    `runs` are the lengths of each item's unbroken runs of vision tokens.
    """
    family = families.of(config.model_type)
    context = Context(config, None, inputs, 0, family.tokens_per_side)
    if any(context.has(name) for name in ("pixel_values_videos", "video_grid_thw")):
        return [[] for _ in runs]  # frames have grids, which are not told here
    shapes: Callable[[int, list[int]], list[Piece]]
    here = [context]  # as it is for the item at hand
    if context.has("image_grid_thw"):
        shapes = _by_image(lambda number: next(iter(merged(context, number, (0, 0)))))
    elif (patch_map := family.patch_map) in TILED_BY_IMAGE_SIZES and context.has("image_sizes"):
        assert patch_map is not None

        def tiled(number: int) -> list[Piece]:
            height, width = context.rows("image_sizes")[number]
            return next(iter(patch_map(here[-1], number, (width, height))))

        shapes = _by_image(tiled)
    elif context.has("image_sizes"):
        shapes = _by_image(lambda number: next(iter(native(context, number, (0, 0)))))
    else:
        shapes = _squares(context, family)
    found, first_image = [], 0
    images = inputs["batch_num_images"].tolist() if context.has("batch_num_images") else [0] * len(runs)
    for item, count in zip(runs, images, strict=True):
        here.append(dataclasses.replace(context, images=count))
        pieces = shapes(first_image, list(item))
        placed = place([pieces])[0]
        found.append([dataclasses.replace(grid, image=grid.image - first_image) for grid in placed])
        first_image += len({grid.image for grid in placed})
    return found


def _by_image(pieces_of: Callable[[int], list[Piece]]) -> Callable[[int, list[int]], list[Piece]]:
    """Take images in order until an item's tokens are used up; nothing where they do not come out even."""

    def shapes(number: int, runs: list[int]) -> list[Piece]:
        wanted, pieces = sum(runs), list[Piece]()
        while count_tokens(pieces) < wanted:
            try:
                pieces += pieces_of(number)
            except IndexError:
                return []
            number += 1
        return pieces if count_tokens(pieces) == wanted else []

    return shapes


def _squares(context: Context, family: families.Family) -> Callable[[int, list[int]], list[Piece]]:
    """Views of a fixed number of tokens; where the family declares none, each run that is a square number."""
    side = context.side() if family.patch_map else 0
    whole = family.patch_map in ONE_VIEW

    def shapes(first: int, runs: list[int]) -> list[Piece]:
        if side and sum(runs) % (side * side) == 0:
            views = range(sum(runs) // (side * side))
            return [ImageGrid(0, side, side, image=first + (view if whole else 0)) for view in views]
        return [ImageGrid(0, s, s, image=first) if (s := math.isqrt(run)) * s == run else run for run in runs]

    return shapes
