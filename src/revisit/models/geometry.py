"""Locate each vision token on its image.

The vision tokens of an image form one or more grids (see `patch_maps`); `layout` returns them in pixels of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from revisit.models import families
from revisit.models.images import SCALE
from revisit.models.parts import vision_mask, vision_token_ids
from revisit.models.patch_maps import Box, Context, ImageGrid, Size, merged, number_grids

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Inputs, Model, Processor

__all__ = ["ImageGrid", "Layout", "Region", "Size", "layout", "layout_of"]


@dataclass(frozen=True)
class Region:
    """The region of a vision token: `box` is x0, y0, x1, y1 in pixels of the original image `image`."""

    image: int
    box: Box
    view: str
    row: int
    column: int


@dataclass(frozen=True)
class Layout:
    """The grids of vision tokens on all images of one prompt, or the `reason` why there are none."""

    sizes: tuple[Size, ...]
    tokens: int
    grids: tuple[ImageGrid, ...] = ()
    reason: str = ""

    def scaled(self, scales: Sequence[int]) -> Layout:
        """Return the layout on images that are larger by these factors."""
        sizes = tuple((width * n, height * n) for (width, height), n in zip(self.sizes, scales, strict=True))
        return replace(self, sizes=sizes, grids=tuple(grid.scaled(scales[grid.image]) for grid in self.grids))

    def region(self, index: int) -> Region | None:
        """Return the region of a vision token; None for line breaks, class tokens and patches of pure padding."""
        for grid in self.grids:
            cell = grid.cell(index)
            if cell is None:
                continue
            row, column = cell
            (x0, x1), (y0, y1), (width, height) = grid.xs[column], grid.ys[row], self.sizes[grid.image]
            box = (max(x0, 0.0), max(y0, 0.0), min(x1, float(width)), min(y1, float(height)))
            if box[0] >= box[2] or box[1] >= box[3]:
                return None
            return Region(grid.image, box, grid.view, row, column)
        return None


def layout(
    config: Any, image_processor: Any, sizes: Sequence[Size], tokens: int, inputs: dict[str, Any] | None = None
) -> Layout:
    """Locate the vision tokens of one prompt on its images.

    `sizes` are (width, height) of the original images in prompt order, `tokens` the number of vision tokens, and `inputs`
    the processor's output.
    """
    sizes = tuple((int(w), int(h)) for w, h in sizes)
    family = families.of(config.model_type)
    context = Context(config, image_processor, inputs or {}, len(sizes))
    patch_map = family.patch_map or (merged if "image_grid_thw" in context.inputs else None)
    if patch_map is None:
        return Layout(sizes, tokens, reason=family.no_patch_map)
    alternatives = [list(patch_map(context, number, size)) for number, size in enumerate(sizes)]
    totals = []
    for choice in range(max(map(len, alternatives), default=0)):
        grids, total = number_grids(layouts[min(choice, len(layouts) - 1)] for layouts in alternatives)
        if total == tokens:
            return Layout(sizes, tokens, tuple(grids))
        totals.append(total)
    counts = " or ".join(map(str, dict.fromkeys(totals))) or "no"
    return Layout(
        sizes,
        tokens,
        reason=f"{len(sizes)} image(s) of these sizes should give {counts} vision tokens in a {config.model_type} model, but "
        f"the prompt has {tokens}; were they processed with other settings?",
    )


def layout_of(
    model: Model, processor: Processor, images: Sequence[Sequence[Image]], inputs: Inputs, row: int = 0
) -> Layout:
    """Locate the vision tokens of one prompt in a prepared batch; `images` has the images of every prompt."""
    tokens = int(vision_mask(inputs["input_ids"][row], vision_token_ids(model.config)).sum())
    total, first = sum(map(len, images)), sum(map(len, images[:row]))
    row_inputs = {
        name: value[first : first + len(images[row])]
        if isinstance(value, torch.Tensor) and len(value) == total
        else value
        for name, value in inputs.items()
    }
    sizes = [image.size for image in images[row]]
    found = layout(model.config, getattr(processor, "image_processor", None), sizes, tokens, row_inputs)
    scales = [image.info.get(SCALE, 1) for image in images[row]]
    return found if all(scale == 1 for scale in scales) else found.scaled(scales)
