"""Locate each vision token on its image.

The vision tokens of an image form one or more grids (see `patch_maps`); `layout` returns them in pixels of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from revisit.io.images import SCALE
from revisit.models import families
from revisit.models.parts import vision_mask, vision_token_ids
from revisit.models.patch_maps import VIDEO_MAPS, Box, Context, ImageGrid, Piece, Size, merged, number_grids
from revisit.video.clip import Video, shown_images

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model, Processor
    from revisit.video.clip import Visual

__all__ = ["Clip", "ImageGrid", "Layout", "Region", "Size", "layout", "layout_of"]


class Clip(NamedTuple):
    """A video in a prompt: the size of its frames, and the time of each; None for a still image."""

    size: Size
    times: tuple[float | None, ...]


@dataclass(frozen=True)
class Region:
    """The region of a vision token: `box` is x0, y0, x1, y1 in pixels of the original image `image`.

    In a video, `image` is the first of the frames that the token covers, and `times` has the time of each.
    """

    image: int
    box: Box
    view: str
    row: int
    column: int
    times: tuple[float, ...] = ()

    @property
    def time(self) -> float | None:
        """The time of its first frame; None for still images."""
        return self.times[0] if self.times else None


@dataclass(frozen=True)
class Layout:
    """The grids of vision tokens on all images of one prompt, or the `reason` why there are none.

    Each frame of a video counts as an image. `times` has the time of each frame, and None for still images.
    """

    sizes: tuple[Size, ...]
    tokens: int
    grids: tuple[ImageGrid, ...] = ()
    reason: str = ""
    times: tuple[float | None, ...] = ()

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
            seconds = self.times[grid.image : grid.image + grid.frames]
            times = tuple(time for time in seconds if time is not None)
            return Region(grid.image, box, grid.view, row, column, times)
        return None


def layout(
    config: Any, image_processor: Any, visuals: Sequence[Size | Clip], tokens: int, inputs: dict[str, Any] | None = None
) -> Layout:
    """Locate the vision tokens of one prompt on its images and videos.

    `visuals` are, in prompt order, (width, height) of the original images, or a `Clip`; `tokens` is the number of vision tokens, and
    `inputs` the processor's output.
    """
    clips = [visual if isinstance(visual, Clip) else Clip(visual, (None,)) for visual in visuals]
    sizes = tuple((int(clip.size[0]), int(clip.size[1])) for clip in clips for _ in clip.times)
    unknown = Layout(sizes, tokens, times=tuple(time for clip in clips for time in clip.times))
    family = families.of(config.model_type)
    still = [clip.times == (None,) for clip in clips]
    context = Context(config, image_processor, inputs or {}, sum(still))
    packed = {"image_grid_thw", "video_grid_thw"} & context.inputs.keys()
    patch_map = family.patch_map or (merged if packed else None)
    video_map = VIDEO_MAPS.get(patch_map) if patch_map else None
    if patch_map is None or (video_map is None and not all(still)):
        return replace(unknown, reason=family.no_patch_map)
    alternatives: list[tuple[int, list[list[Piece]]]] = []
    number, images = 0, 0
    for index, clip in enumerate(clips):
        if video_map is not None and not still[index]:
            layouts = video_map(context, index - images, clip.size, len(clip.times))
        else:
            layouts = patch_map(context, images, sizes[number])
        alternatives.append((number, list(layouts)))
        number, images = number + len(clip.times), images + still[index]
    totals = []
    for choice in range(max((len(layouts) for _, layouts in alternatives), default=0)):
        grids, total = number_grids((n, layouts[min(choice, len(layouts) - 1)]) for n, layouts in alternatives)
        if total == tokens:
            return replace(unknown, grids=tuple(grids))
        totals.append(total)
    counts = " or ".join(map(str, dict.fromkeys(totals))) or "no"
    return replace(
        unknown,
        reason=f"{len(sizes)} image(s) of these sizes should give {counts} vision tokens in a {config.model_type} model, but "
        f"the prompt has {tokens}; were they processed with other settings?",
    )


def layout_of(
    model: Model, processor: Processor, batch: Sequence[Sequence[Visual]], inputs: Inputs, row: int = 0
) -> Layout:
    """Locate the vision tokens of one prompt in a prepared batch, which has the images and videos of every prompt."""
    tokens = int(vision_mask(inputs["input_ids"][row], vision_token_ids(model.config)).sum())

    def own(name: str, value: Any) -> Any:
        """Return the entries of an input that belong to this prompt, if it has one entry for each image or video."""
        counts = [sum(isinstance(visual, Video) == ("video" in name) for visual in visuals) for visuals in batch]
        first = sum(counts[:row])
        one_each = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == sum(counts)
        return value[first : first + counts[row]] if one_each else value

    visuals = [Clip(visual.size, visual.times) if isinstance(visual, Video) else visual.size for visual in batch[row]]
    row_inputs = {name: own(name, value) for name, value in inputs.items()}
    found = layout(model.config, getattr(processor, "image_processor", None), visuals, tokens, row_inputs)
    scales = [image.info.get(SCALE, 1) for image in shown_images(batch[row])]
    return found if all(scale == 1 for scale in scales) else found.scaled(scales)
