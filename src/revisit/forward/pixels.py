"""Changes to the processed pixels of a prompt, image by image, independent of the batch.

Random numbers come from a generator that is seeded by the image's pixels: neither its position in the batch nor the state of
the global generator matters, and the same image and seed give the same result on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.forward.prompt import Prompt
from revisit.forward.states import run_lengths
from revisit.models.families import PACKED, PIXELS
from revisit.models.parts import describe
from revisit.models.types import Arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VIDEO_PIXELS = "pixel_values_videos"
Change = Callable[[Tensor, torch.Generator], Tensor]
DrawTransform = Callable[[torch.Generator, tuple[int, int]], Callable[[Tensor], Tensor]]


def content_seed(pixels: Tensor, seed: int) -> int:
    """Return a seed that depends on an image's pixels and on `seed` only."""
    digest = hashlib.blake2b(digest_size=8, key=(seed % (1 << 64)).to_bytes(8, "little"))
    digest.update(_content(pixels))
    return int.from_bytes(digest.digest(), "little") >> 1


def _content(pixels: Tensor) -> bytes:
    return pixels.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()


def changed_pixels(prompt: Prompt, change: Change, seed: int) -> Arguments:
    """Return the inputs of the prompt with the pixels of every image, or of every tile, changed.

    `change` takes float32 numbers on the CPU. Equal tiles get equal changes, also within one image.
    """
    inputs = prompt_inputs(prompt)
    for name, pixels in pixel_inputs(prompt).items():
        images, axis = split_images(prompt, name, pixels)
        sizes = _sizes(prompt, pixels) if pixels.ndim == 4 and axis == 0 else [None] * len(images)
        pieces = [_change(image, change, seed, size) for image, size in zip(images, sizes, strict=True)]
        inputs[name] = torch.cat(pieces, dim=axis).to(pixels.device, pixels.dtype)
    return inputs


def transformed_images(prompt: Prompt, draw: DrawTransform, seed: int) -> Arguments:
    """Return the inputs of the prompt with every image transformed, all tiles of an image in the same way.

    `draw` takes a generator and the image's (height, width), and returns a function of (n, channels, height, width).
    Tiles are assembled first if their layout is known; otherwise each is transformed on its own.
    """
    inputs = prompt_inputs(prompt)
    for name, pixels in pixel_inputs(prompt).items():
        grids = prompt.inputs.get(PACKED.get(name, ""))
        if split_images(prompt, name, pixels)[1] != 0:
            raise _unknown_layout(prompt)
        tiled = pixels.ndim == 4
        counts = (
            tiles_of_images(len(pixels), prompt.vision[:: prompt.rows_per_item])
            if tiled
            else entries_per_image(pixels, grids)
        )
        sizes = _sizes(prompt, pixels)
        pieces, first = [], 0
        for number, image in enumerate(pixels.split(counts)):
            numbers = image.detach().to("cpu", torch.float32)
            if grids is not None and pixels.ndim == 2:
                views, pack = packed_views(prompt, numbers, grids[number])
            elif numbers.ndim == 3 or grids is not None:
                raise _unknown_layout(prompt)
            else:
                views, pack = tile_views(prompt, numbers, sizes[first])
            generator = torch.Generator().manual_seed(content_seed(views[0], seed))
            transform = draw(generator, (views[0].shape[-2], views[0].shape[-1]))
            pieces.append(pack([transform(view) for view in views]))
            first += counts[number]
        inputs[name] = torch.cat(pieces).to(pixels.device, pixels.dtype)
    return inputs


def changed_frames(prompt: Prompt, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Return the inputs of the prompt with the frames of every video changed; RevisitError if there is no video.

    `change` takes and returns (frames, channels, height, width).
    """
    inputs = prompt_inputs(prompt)
    pixels, grids = inputs.get(VIDEO_PIXELS), inputs.get(PACKED[VIDEO_PIXELS])
    if isinstance(pixels, Tensor) and pixels.ndim == 5:  # (videos, frames, channels, height, width)
        inputs[VIDEO_PIXELS] = torch.stack([change(video) for video in pixels])
    elif isinstance(pixels, Tensor) and grids is not None:
        videos = pixels.split(entries_per_image(pixels, grids))
        laid = [packed_views(prompt, video, grid) for video, grid in zip(videos, grids, strict=True)]
        inputs[VIDEO_PIXELS] = torch.cat([pack([change(views[0])]) for views, pack in laid])
    elif pixels is None and len(frames := _frames_of_rows(prompt)) > 0:
        inputs["pixel_values"] = torch.cat([change(own) if len(own) > 1 else own for own in frames])
    else:
        raise RevisitError(f"{prompt.method} needs a video, and the prompt has none: use another method.")
    return inputs


def _frames_of_rows(prompt: Prompt) -> list[Tensor]:
    """Return the frames of each row for families whose frames are images between texts; empty if no row has several."""
    pixels = prompt.inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.ndim != 4:
        return []
    counts = [len(run_lengths(row.nonzero().squeeze(-1))) for row in prompt.vision[:: prompt.rows_per_item]]
    return list(pixels.split(counts)) if sum(counts) == len(pixels) and max(counts) > 1 else []


def pixel_inputs(prompt: Prompt) -> dict[str, Tensor]:
    """Return the pixels of the prompt by the name of their input."""
    pixels = {name: value for name in PIXELS if isinstance(value := prompt.inputs.get(name), Tensor)}
    if not pixels:
        raise RevisitError(
            f"{prompt.method} changes the pixels of the image, but the prompt of {describe(prompt.model)} has none: pass "
            "what the processor returned (pixel_values), not embeddings or encoder outputs."
        )
    return pixels


def tiles_of_images(entries: int, mask: Tensor) -> list[int]:
    """Return the number of tiles of each image, from the unbroken runs of vision tokens (items, T) and their equal lengths."""
    runs = [length for row in mask for length in run_lengths(row.nonzero().squeeze(-1))]
    per_tile = sum(runs) // max(1, entries)
    if not runs or per_tile * entries != sum(runs) or any(run % per_tile for run in runs):
        return [1] * entries
    return [run // per_tile for run in runs]


def prompt_inputs(prompt: Prompt) -> Arguments:
    """Return the arguments of the call that describe a prompt with an image: no generation settings, cache or positions."""
    _ = prompt.vision  # raises if there is no image
    prompt.check_empty_cache()
    settings = prompt.config.to_dict()
    skip = {"past_key_values", "position_ids", "inputs", "generation_config", "input_ids"}
    inputs = {name: value for name, value in prompt.inputs.items() if name not in settings and name not in skip}
    if prompt.ids.shape[1]:
        inputs["input_ids"] = prompt.ids[:: prompt.rows_per_item]
    return inputs


def split_images(prompt: Prompt, name: str, pixels: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """Return the images, or their tiles, of a pixel input, and the axis along which they are concatenated."""
    slices = prompt.inputs.get("target_sizes")  # MiniCPM-V: patches of each slice, concatenated to one strip
    if slices is not None and pixels.ndim == 4 and len(pixels) == 1:
        return pixels.split((slices.prod(-1) * pixels.shape[-2]).tolist(), dim=-1), -1
    return pixels.split(entries_per_image(pixels, prompt.inputs.get(PACKED.get(name, "")))), 0


def entries_per_image(pixels: Tensor, grid: Tensor | None) -> list[int]:
    """Return the number of entries along the first axis of each image: its patches if there is a grid, else one."""
    if grid is not None and pixels.ndim == 2:
        return [int(count) for count in grid.prod(-1).tolist()]
    return [1] * pixels.shape[0]


def _unknown_layout(prompt: Prompt) -> RevisitError:
    return RevisitError(
        f"{prompt.method} transforms the image, and the pixel layout of "
        f"{describe(prompt.model)} is unknown: use another method."
    )


# The views of an image, each (n, channels, height, width), and the function that turns changed views into pixels again.
Views = tuple[list[Tensor], Callable[[list[Tensor]], Tensor]]


def packed_views(prompt: Prompt, pixels: Tensor, grid: Tensor) -> Views:
    """Return the view of an image whose patches Qwen-VL's processors have packed: (t · h · w, channels · time · patch · patch)."""
    vision = getattr(prompt.model.config, "vision_config", None)
    names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
    patch, time, merge = (getattr(vision, name, None) for name in names)
    if not isinstance(patch, int) or not isinstance(time, int) or not isinstance(merge, int):
        raise _unknown_layout(prompt)
    t, h, w = (int(n) for n in grid.tolist())
    # (t, h/merge, w/merge, merge, merge, channels, time, patch, patch)
    packed = pixels.view(t, h // merge, w // merge, merge, merge, -1, time, patch, patch)
    # (t, time, channels, h/merge, merge, patch, w/merge, merge, patch)
    laid = packed.permute(0, 6, 5, 1, 3, 7, 2, 4, 8)

    def pack(views: list[Tensor]) -> Tensor:
        return views[0].view(laid.shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(pixels.shape)

    return [laid.reshape(t * time, -1, h * patch, w * patch)], pack


def tile_views(prompt: Prompt, pixels: Tensor, size: list[int] | None) -> Views:
    """Return the views of tiles or frames (..., channels, height, width), without padded tiles and margins.

    If the model declares the layout of its tiles (LLaVA-NeXT, LLaVA-OneVision), they are assembled to the image, and the
    thumbnail before them is a second view.
    """
    every = pixels.flatten(0, -4)  # (tiles, channels, height, width)
    used = [number for number, tile in enumerate(every) if pixels.ndim < 5 or bool(tile.any())]
    height, width = size if pixels.ndim == 4 and size is not None else pixels.shape[-2:]
    tiles = every[used][..., :height, :width]
    shape = _tile_grid(prompt.model.config, size) if pixels.ndim == 5 and size is not None else None
    assembled = shape is not None and shape[0] * shape[1] + 1 == len(used) > 2

    def pack(views: list[Tensor]) -> Tensor:
        changed = views[0]
        if shape is not None and assembled:
            apart = views[0][0].unflatten(2, (shape[1], -1)).unflatten(1, (shape[0], -1))
            changed = torch.cat([views[1], apart.permute(1, 3, 0, 2, 4).flatten(0, 1)])
        result = every.clone()
        for number, tile in zip(used, changed, strict=True):
            result[number, :, :height, :width] = tile
        return result.view(pixels.shape)

    if shape is None or not assembled:
        return [tiles], pack
    whole = tiles[1:].unflatten(0, shape).permute(2, 0, 3, 1, 4)  # (channels, rows, height, columns, width)
    return [whole.flatten(3, 4).flatten(1, 2)[None], tiles[:1]], pack


def _tile_grid(config: PretrainedConfig, size: list[int]) -> tuple[int, int] | None:
    """Return (rows, columns) of the tiles of an image of this (height, width), if the configuration declares them."""
    pinpoints = getattr(config, "image_grid_pinpoints", None)
    side = getattr(getattr(config, "vision_config", None), "image_size", None)
    if not pinpoints or not isinstance(side, int):
        return None
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    rows, columns = get_anyres_image_grid_shape(size, [list(pin) for pin in pinpoints], side)
    return int(rows), int(columns)


def _sizes(prompt: Prompt, pixels: Tensor) -> list[list[int] | None]:
    """Return (height, width) of each image in the pixels, which may be padded; None where it is not declared."""
    sizes = prompt.inputs.get("image_sizes")
    if sizes is None or len(sizes) != len(pixels):
        return [None] * len(pixels)
    return [torch.as_tensor(size).tolist() for size in sizes]


def _change(image: Tensor, change: Change, seed: int, size: list[int] | None = None) -> Tensor:
    """Change one image, each tile of a padded stack (1, tiles, ...) on its own; padding stays unchanged."""
    image = image.detach().to("cpu", torch.float32)
    if size is not None:
        whole = image.clone()
        whole[..., : size[0], : size[1]] = _change(image[..., : size[0], : size[1]], change, seed)
        return whole
    if image.ndim == 5:
        tiles = [
            tile if not tile.any() else _change(tile, change, seed + number) for number, tile in enumerate(image[0])
        ]
        return torch.stack(tiles)[None]
    return change(image, torch.Generator().manual_seed(content_seed(image, seed)))


def item_digests(prompt: Prompt) -> list[str]:
    """Return a digest of each item's images: equal for equal pixels, whatever the batch.

    Unless every item has one image, the digest also depends on the rest of the batch.
    """
    items, digests = len(prompt.ids) // prompt.rows_per_item, []
    for name in PIXELS:
        pixels = prompt.inputs.get(name)
        for image in split_images(prompt, name, pixels)[0] if isinstance(pixels, Tensor) else ():
            tiles = [tile for tile in image[0] if tile.any()] if image.ndim == 5 else [image]  # without padding
            digests.append(hashlib.blake2b(b"".join(map(_content, tiles)), digest_size=16).hexdigest())
    return digests if len(digests) == items else [f"{item} of {digests}" for item in range(items)]
