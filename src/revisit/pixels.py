"""Changing the processed pixels of a prompt, image by image, so that a picture is treated alike in every batch.

Randomness is drawn from a generator that is seeded by the picture's own numbers: neither its place in the batch nor the
state of the global generator matters, and the same picture and seed give the same result on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.models.anatomy import describe

if TYPE_CHECKING:
    from revisit.decoding import Run

# pixel input -> the input that says how many of its rows belong to each image, for families that pack patches
PACKED = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches")

Change = Callable[[Tensor, torch.Generator], Tensor]


def content_seed(pixels: Tensor, seed: int) -> int:
    """A seed that depends on the numbers of a picture and on `seed`, and on nothing else."""
    digest = hashlib.blake2b(digest_size=8, key=int(seed).to_bytes(8, "little", signed=True))
    digest.update(pixels.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def changed_pixels(run: Run, change: Change, seed: int) -> dict[str, Any]:
    """The inputs of the prompt with every picture changed; `change` is given float32 numbers on the CPU."""
    found = {name: run.inputs[name] for name in PIXELS if isinstance(run.inputs.get(name), Tensor)}
    if not found:
        raise RevisitError(
            f"{type(run.method).__name__} changes the pixels of the image, but the prompt of {describe(run.model)} came without them: "
            "pass what the processor returned (pixel_values), not embeddings or encoder outputs."
        )
    inputs = prompt_inputs(run)
    for name, pixels in found.items():
        pictures = pixels.split(units(pixels, run.inputs.get(PACKED.get(name, ""))))
        sizes = _sizes(pixels, run.inputs.get("image_sizes"))
        pieces = [
            _change(picture, change, seed, size)
            for picture, size in zip(pictures, sizes or [None] * len(pictures), strict=True)
        ]
        inputs[name] = torch.cat(pieces).to(pixels.device, pixels.dtype)
    return inputs


def prompt_inputs(run: Run) -> dict[str, Any]:
    """What the caller passed that describes the prompt: no generation settings, no cache, no positions."""
    settings = run.generation_config.to_dict()
    skip = {"past_key_values", "position_ids", "inputs", "generation_config", "input_ids"}
    inputs = {name: value for name, value in run.inputs.items() if name not in settings and name not in skip}
    if run.input_ids.shape[1]:
        inputs["input_ids"] = run.input_ids[:: run.copies]
    return inputs


def units(pixels: Tensor, grid: Tensor | None) -> list[int]:
    """How many entries of the first axis make up each picture: its patches where a grid says so, else one."""
    if grid is not None and pixels.ndim == 2:
        return [int(count) for count in grid.prod(-1).tolist()]
    return [1] * pixels.shape[0]


def _sizes(pixels: Tensor, image_sizes: Any) -> list[list[int]] | None:
    """(height, width) of pictures that are padded to a common size (Pixtral); None where each fills its tensor."""
    if image_sizes is None or pixels.ndim != 4 or len(image_sizes) != len(pixels):
        return None
    return torch.as_tensor(image_sizes).tolist()  # type: ignore[no-any-return]


def _change(picture: Tensor, change: Change, seed: int, size: list[int] | None = None) -> Tensor:
    """One picture, changed; tiles of a padded stack (1, tiles, ...) one by one, and padding not at all."""
    picture = picture.detach().to("cpu", torch.float32)
    if size is not None:
        whole = picture.clone()
        whole[..., : size[0], : size[1]] = _change(picture[..., : size[0], : size[1]], change, seed)
        return whole
    if picture.ndim == 5:
        tiles = [
            tile if not tile.any() else _change(tile, change, seed + number) for number, tile in enumerate(picture[0])
        ]
        return torch.stack(tiles)[None]
    return change(picture, torch.Generator().manual_seed(content_seed(picture, seed)))
