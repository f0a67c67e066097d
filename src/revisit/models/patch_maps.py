"""Patch maps: how each family divides an image into grids of vision tokens.

Families resize, crop, pad, tile, add a thumbnail, merge neighboring patches, or end rows with line breaks. In all of them, the
vision tokens of an image form one or more grids, row by row, whose columns and rows are intervals of the original image.
data/families.yaml assigns a map to each family.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Size: TypeAlias = tuple[int, int]  # width, height
Box: TypeAlias = tuple[float, float, float, float]  # x0, y0, x1, y1
Spans: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ImageGrid:
    """A grid of vision tokens, row by row."""

    xs: Spans  # interval of each column in pixels of the original image, beyond its edges where it was padded
    ys: Spans  # the same for each row
    view: str = "image"  # "image", "thumbnail" or "tile"
    gap: int = 0  # tokens without a position at the end of each row
    image: int = 0  # number of the image in the prompt, where each frame of a video counts as one
    frames: int = 1  # consecutive frames that it covers
    first: int = 0  # number of its first token among the prompt's vision tokens

    @property
    def rows(self) -> int:
        return len(self.ys)

    @property
    def columns(self) -> int:
        return len(self.xs)

    @property
    def tokens(self) -> int:
        return self.rows * (self.columns + self.gap)

    def scaled(self, scale: int) -> ImageGrid:
        """Return the grid on an image that is larger by this factor."""
        xs, ys = ([(start * scale, end * scale) for start, end in spans] for spans in (self.xs, self.ys))
        return dataclasses.replace(self, xs=xs, ys=ys)

    def cell(self, index: int) -> tuple[int, int] | None:
        """Return (row, column) of the vision token `index`; None if it is not in this grid."""
        offset = index - self.first
        if not 0 <= offset < self.tokens:
            return None
        row, column = divmod(offset, self.columns + self.gap)
        return (row, column) if column < self.columns else None


@dataclass(frozen=True)
class Context:
    """The model's configuration, its image processor and the processor's output, from which a patch map is computed."""

    config: Any
    processor: Any  # the image processor
    inputs: dict[str, Any]
    images: int  # number of images in the prompt

    def rows(self, name: str) -> list[list[Any]]:
        return self.inputs[name].tolist()  # type: ignore[no-any-return]

    @property
    def vision(self) -> Any:
        return getattr(self.config, "vision_config", None)

    @property
    def patch(self) -> int:
        return _first(getattr(self.vision, "patch_size", 1))

    @property
    def image_size(self) -> int:
        return _first(getattr(self.vision, "image_size", 0))

    def setting(self, name: str, default: Any = None) -> Any:
        value = getattr(self.processor, name, None)
        return default if value is None else value

    def tile(self) -> int:
        """Return the side of the vision tower's square input, in pixels."""
        crop, size = _sides(self.setting("crop_size")), _sides(self.setting("size"))
        return crop.get("height") or size.get("height") or size.get("shortest_edge") or self.image_size

    def side(self) -> int:
        """Return the number of vision tokens along one side of that square, after merging."""
        if tokens := getattr(self.config, "mm_tokens_per_image", None):
            return math.isqrt(tokens)
        factor = int(getattr(self.config, "downsample_factor", 1)) * int(getattr(self.config, "scale_factor", 1))
        return int(self.image_size // self.patch // factor * float(getattr(self.config, "downsample_ratio", 1)))


Piece: TypeAlias = ImageGrid | int  # a grid, or a number of tokens without a position
Layouts: TypeAlias = Iterable[list[Piece]]  # possible layouts of one image; the number of its tokens selects one
PatchMap: TypeAlias = Callable[[Context, int, Size], Layouts]  # (context, number of the image, its size) -> layouts


def _first(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _sides(size: object) -> dict[str, int]:
    """Convert a size setting of any class to a dict."""
    found = {}
    for name in ("height", "width", "shortest_edge", "longest_edge"):
        value = size.get(name) if isinstance(size, dict) else getattr(size, name, None)
        if value:
            found[name] = int(value)
    return found


def number_grids(images: Iterable[tuple[int, list[Piece]]]) -> tuple[list[ImageGrid], int]:
    """Number the images and the first token of each grid; return all grids and the number of tokens.

    Each list of pieces comes with the number of its image, or of the first frame of its video.
    """
    grids, tokens = [], 0
    for number, pieces in images:
        for piece in pieces:
            if isinstance(piece, int):
                tokens += piece
            else:
                grids.append(dataclasses.replace(piece, image=number + piece.image, first=tokens))
                tokens += piece.tokens
    return grids, tokens


# -- from pixels of the model's input back to the original image -------------------------------------------------------


def _spans(count: int, step: float, scale: float = 1.0, offset: float = 0.0) -> Spans:
    """Return the intervals, in the original image, of `count` cells of `step` pixels; input = original · scale + offset."""
    edges = [(k * step - offset) / scale for k in range(count + 1)]
    return list(itertools.pairwise(edges))


def _cover(box: Box, columns: int, rows: int, view: str = "image") -> ImageGrid:
    """Make a grid over a rectangle of the original image."""
    x0, y0, x1, y1 = box
    xs, ys = _spans(columns, (x1 - x0) / columns, offset=-x0), _spans(rows, (y1 - y0) / rows, offset=-y0)
    return ImageGrid(xs, ys, view)


def _whole(size: Size, columns: int, rows: int, view: str = "image") -> ImageGrid:
    """Make a grid over the whole original image."""
    return _cover((0, 0, *size), columns, rows, view)


def _resized(size: Size, setting: dict[str, int]) -> Size:
    """Return the size after a resize to a height and width or to a shortest edge."""
    width, height = size
    if "height" in setting and "width" in setting:
        return setting["width"], setting["height"]
    if "shortest_edge" not in setting:
        return size
    short = setting["shortest_edge"]
    long = int(short * max(size) / min(size))
    return (short, long) if width <= height else (long, short)


# -- the maps --------------------------------------------------------------------------------------------------------


def llava(context: Context, image: int, size: Size) -> Layouts:
    """LLaVA: the image padded to a square (optional), resized and cropped to its center; as in `native` for a Pixtral tower."""
    if getattr(context.vision, "model_type", "") == "pixtral" and "image_sizes" in context.inputs:
        yield from native(context, image, size)
        return
    padded = (
        (max(size), max(size)) if context.setting("do_pad") and hasattr(context.processor, "pad_to_square") else size
    )
    resized = _resized(padded, _sides(context.setting("size"))) if context.setting("do_resize", True) else padded
    crop = _sides(context.setting("crop_size"))
    cropped = (crop["width"], crop["height"]) if context.setting("do_center_crop") and crop else resized
    xs, ys = (
        _spans(keep // context.patch, context.patch, new / side, (side - length) // 2 * new / side - (new - keep) // 2)
        for length, side, new, keep in zip(size, padded, resized, cropped, strict=True)
    )
    grid = ImageGrid(xs, ys)
    yield [grid]
    yield [1, grid]  # with the class token in front


def _anyres(context: Context, size: Size, most_tiles: int | None = None) -> list[Piece]:
    """Map a thumbnail of the whole image, then the best-fitting canvas of tiles without its padding, with a line break per row."""
    from transformers.image_processing_utils import select_best_resolution

    width, height = size
    tile, patches = context.tile(), context.image_size // context.patch  # in pixels, in patches
    pinpoints = [list(point) for point in context.setting("image_grid_pinpoints", context.config.image_grid_pinpoints)]
    canvas_height, canvas_width = select_best_resolution((height, width), pinpoints)
    if canvas_width / width < canvas_height / height:
        fit = canvas_width, min(math.ceil(height * canvas_width / width), canvas_height)
    else:
        fit = min(math.ceil(width * canvas_height / height), canvas_width), canvas_height
    step = context.patch * tile / context.image_size
    xs, ys = (
        [
            span
            for t in range(canvas // tile)
            for span in _spans(patches, step, new / length, (canvas - new) // 2 - t * tile)
        ]
        for length, new, canvas in ((width, fit[0], canvas_width), (height, fit[1], canvas_height))
    )
    if width / height > len(xs) / len(ys):
        cut = (len(ys) - int(round(height * (len(xs) / width), 7))) // 2
        ys = ys[cut : len(ys) - cut]
    else:
        cut = (len(xs) - int(round(width * (len(ys) / height), 7))) // 2
        xs = xs[cut : len(xs) - cut]
    if most_tiles is not None:
        ratio = math.sqrt(len(ys) * len(xs) / (most_tiles * patches**2))
        if ratio > 1.1:  # too many: the model interpolates to a smaller grid
            xs, ys = _divided(xs, int(len(xs) // ratio)), _divided(ys, int(len(ys) // ratio))
    covered = patches * step / tile  # the tower drops a remainder of less than a patch
    thumbnail = _cover((0, 0, width * covered, height * covered), patches, patches, "thumbnail")
    return [thumbnail, ImageGrid(xs, ys, "tile", gap=1)]


def _divided(spans: Spans, count: int) -> list[tuple[float, float]]:
    """Divide the interval that these spans cover into `count` cells instead."""

    def at(position: float) -> float:
        cell = min(int(position), len(spans) - 1)
        a, b = spans[cell]
        return a + (b - a) * (position - cell)

    edges = [at(k * len(spans) / count) for k in range(count + 1)]
    return list(itertools.pairwise(edges))


def llava_next(context: Context, image: int, size: Size) -> Layouts:
    """LLaVA-NeXT: a thumbnail, then tiles."""
    yield _anyres(context, size)


def llava_onevision(context: Context, image: int, size: Size) -> Layouts:
    """LLaVA-OneVision: as LLaVA-NeXT, with a limit on the tokens; several images are padded to squares."""
    if context.images > 1:
        yield [*next(iter(padded_square(context, image, size))), 1]
    most_tiles = str(getattr(context.config, "vision_aspect_ratio", "anyres_max_9")).rpartition("_")[2]
    yield _anyres(context, size, int(most_tiles) if most_tiles.isdigit() else None)


def merged(context: Context, image: int, size: Size) -> Layouts:
    """Qwen-VL: the whole image resized to a grid of patches; squares of patches are merged into tokens."""
    frames, rows, columns = context.rows("image_grid_thw")[image]
    merge = int(getattr(context.vision, "spatial_merge_size", 0) or context.setting("merge_size", 2))
    yield [_whole(size, columns // merge, rows // merge)] * frames


def native(context: Context, image: int, size: Size) -> Layouts:
    """Pixtral: the whole image resized to whole patches (`image_sizes`), keeping its aspect."""
    height, width = context.rows("image_sizes")[image]
    cell = context.patch * int(getattr(context.config, "spatial_merge_size", 1) or 1)
    yield [_whole(size, width // cell, height // cell)]


def square(context: Context, image: int, size: Size) -> Layouts:
    """PaliGemma, Gemma 3: the whole image resized to a square; crops of long images (pan and scan) are not mapped."""
    yield [_whole(size, context.side(), context.side())]


def tiles(context: Context, image: int, size: Size) -> Layouts:
    """InternVL: the canvas of tiles nearest in aspect, then the whole image; or the whole image alone."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    tile = context.tile()
    least, most = int(context.setting("min_patches", 1)), int(context.setting("max_patches", 12))
    columns, rows = get_optimal_tiled_canvas((size[1], size[0]), (tile, tile), least, most)
    yield from _tiled(size, columns, rows, context.side())


def _tiled(size: Size, columns: int, rows: int, side: int) -> Layouts:
    """Map columns × rows tiles of side × side tokens, row by row, then the whole image; or the whole image alone."""
    if columns * rows > 1:
        width, height = size[0] / columns, size[1] / rows
        boxes = [
            (column * width, row * height, (column + 1) * width, (row + 1) * height)
            for row in range(rows)
            for column in range(columns)
        ]
        yield [*(_cover(box, side, side, "tile") for box in boxes), _whole(size, side, side, "thumbnail")]
    yield [_whole(size, side, side)]


def pooled(context: Context, image: int, size: Size) -> Layouts:
    """Gemma 4: the whole image resized to a grid of patches, whose positions are an input; squares of patches are pooled."""
    columns, rows = (max(place) + 1 for place in zip(*context.rows("image_position_ids")[image], strict=True))
    pool = int(getattr(context.vision, "pooling_kernel_size", 1))
    yield [_whole(size, columns // pool, rows // pool)]


def splits(context: Context, image: int, size: Size) -> Layouts:
    """Idefics3: the image stretched to rows and columns of tiles, then the whole image."""
    _, rows, columns = context.processor.get_number_of_image_patches(size[1], size[0])
    yield from _tiled(size, columns, rows, context.side())


def padded_square(context: Context, image: int, size: Size) -> Layouts:
    """DeepSeek-VL: the image padded to a square, which is resized."""
    side, tile = max(size), context.tile()
    patches, step = context.image_size // context.patch, context.patch * tile / context.image_size
    xs, ys = (_spans(patches, step, tile / side, (side - length) // 2 * tile / side) for length in size)
    yield [ImageGrid(xs, ys)]


# -- videos: (context, number of the video, size of its frames, number of frames) -> layouts --------------------------


def _per_frame(size: Size, side: int, frames: int) -> list[Piece]:
    """Return a square grid over each frame."""
    return [dataclasses.replace(_whole(size, side, side), image=frame) for frame in range(frames)]


def merged_frames(context: Context, video: int, size: Size, frames: int) -> Layouts:
    """Qwen-VL: consecutive frames share one grid; squares of patches are merged into tokens."""
    groups, rows, columns = context.rows("video_grid_thw")[video]
    merge, step = int(getattr(context.vision, "spatial_merge_size", 2)), math.ceil(frames / groups)
    grid = _whole(size, columns // merge, rows // merge)
    yield [dataclasses.replace(grid, image=first, frames=min(step, frames - first)) for first in range(0, frames, step)]


def pooled_frames(context: Context, video: int, size: Size, frames: int) -> Layouts:
    """LLaVA-OneVision: each frame resized to a square whose tokens are pooled two by two; a line break ends the video."""
    yield [*_per_frame(size, math.ceil(context.side() / 2), frames), 1]


def square_frames(context: Context, video: int, size: Size, frames: int) -> Layouts:
    """InternVL: each frame resized to one square tile."""
    yield _per_frame(size, context.side(), frames)


VideoMap: TypeAlias = Callable[[Context, int, Size, int], Layouts]
VIDEO_MAPS: dict[PatchMap, VideoMap] = {merged: merged_frames, llava_onevision: pooled_frames, tiles: square_frames}

_MAPS = (llava, llava_next, llava_onevision, merged, native, padded_square, pooled, splits, square, tiles)
PATCH_MAPS: dict[str, PatchMap] = {patch_map.__name__: patch_map for patch_map in _MAPS}
