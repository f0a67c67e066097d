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
from revisit.models.parts import describe

if TYPE_CHECKING:
    from revisit.decoding.run import Run

# pixel input -> the input that says how many of its rows belong to each image, for families that pack patches
PACKED = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos", "image_patches")

Change = Callable[[Tensor, torch.Generator], Tensor]


def content_seed(pixels: Tensor, seed: int) -> int:
    """A seed that depends on the numbers of a picture and on `seed`, and on nothing else."""
    digest = hashlib.blake2b(digest_size=8, key=int(seed).to_bytes(8, "little", signed=True))
    digest.update(pixels.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def changed_pixels(run: Run, change: Change, seed: int, *, pictures: bool = False) -> dict[str, Any]:
    """The inputs of the prompt with every picture changed; `change` is given float32 numbers on the CPU.

    With `pictures`, it is given (n, channels, height, width), also where a processor packs patches.
    """
    refuse_filled_cache(run)
    found = {name: run.inputs[name] for name in PIXELS if isinstance(run.inputs.get(name), Tensor)}
    if not found:
        raise RevisitError(
            f"{type(run.method).__name__} changes the pixels of the image, but the prompt of {describe(run.model)} came without them: "
            "pass what the processor returned (pixel_values), not embeddings or encoder outputs."
        )
    inputs = prompt_inputs(run)
    for name, pixels in found.items():
        grid = run.inputs.get(PACKED.get(name, ""))
        found_pictures = pixels.split(units(pixels, grid))
        known = _sizes(pixels, run.inputs.get("image_sizes"))
        sizes: list[Any] = list(known) if known else [None] * len(found_pictures)
        pieces = []
        for number, (picture, size) in enumerate(zip(found_pictures, sizes, strict=True)):
            own = _on_pictures(run, change, grid[number] if grid is not None else None) if pictures else change
            pieces.append(_change(picture, own, seed, size))
        inputs[name] = torch.cat(pieces).to(pixels.device, pixels.dtype)
    return inputs


def refuse_filled_cache(run: Run) -> None:
    """A cache that holds a part of the prompt holds it for the clean run only."""
    cache = run.model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise RevisitError(
            f"{type(run.method).__name__} contrasts two runs of the whole prompt, but the KV cache passed as past_key_values already "
            "holds a part of it: start from an empty cache."
        )


def prompt_inputs(run: Run) -> dict[str, Any]:
    """What the caller passed that describes the prompt: no generation settings, no cache, no positions."""
    refuse_filled_cache(run)
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


def _on_pictures(run: Run, change: Change, grid: Tensor | None) -> Change:
    """The change for what an input holds of one picture: packed patches are laid out as frames and packed again."""

    def frames(picture: Tensor, draw: torch.Generator) -> Tensor:
        if picture.ndim in (3, 4):
            return change(picture.view(-1, *picture.shape[-3:]), draw).view(picture.shape)
        vision = getattr(run.model.config, "vision_config", None)
        names = ("patch_size", "temporal_patch_size", "spatial_merge_size")
        patch, time, merge = (getattr(vision, name, None) for name in names)
        if grid is None or not isinstance(patch, int) or not isinstance(time, int) or not isinstance(merge, int):
            raise RevisitError(
                f"{type(run.method).__name__} transforms the picture, and how {describe(run.model)} lays out its pixels is not known: use "
                "another method."
            )
        t, h, w = (int(n) for n in grid.tolist())
        packed = (t, h // merge, w // merge, merge, merge, -1, time, patch, patch)
        # -> (frames, channels, height, width): t·time, channels, h/merge·merge·patch, w/merge·merge·patch
        laid = picture.view(packed).permute(0, 6, 5, 1, 3, 7, 2, 4, 8)
        changed = change(laid.reshape(t * time, -1, h * patch, w * patch), draw)
        return changed.view(laid.shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(picture.shape)

    return frames


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


def item_digests(run: Run, mask: Tensor) -> list[str]:
    """One name per item for the content of its images: equal pixels, equal name, whatever the batch.

    Where it cannot be told which pixels belong to which item, the name also holds the rest of the batch.
    """
    counts = mask[:: run.copies].sum(-1).tolist()  # vision tokens of each item
    digests = [hashlib.blake2b(digest_size=16) for _ in counts]
    for name in PIXELS:
        pixels = run.inputs.get(name)
        if not isinstance(pixels, Tensor):
            continue
        pictures = pixels.split(units(pixels, run.inputs.get(PACKED.get(name, ""))))
        owners = _owners(pictures, counts)
        for number, picture in enumerate(pictures):
            tiles = [tile for tile in picture[0] if tile.any()] if picture.ndim == 5 else [picture]  # without padding
            content = b"".join(tile.detach().to("cpu", torch.float32).contiguous().numpy().tobytes() for tile in tiles)
            for item, digest in enumerate(digests):
                if owners is None or owners[number] == item:
                    digest.update(content if owners is not None else content + str(item).encode())
    return [digest.hexdigest() for digest in digests]


def _owners(pieces: tuple[Tensor, ...], counts: list[int]) -> list[int] | None:
    """Which item each picture belongs to, from the number of vision tokens of the items; None if it cannot be told.

    Pictures have vision tokens in proportion to their patches, so items own pictures in proportion to their tokens.
    """
    sizes = [len(piece) for piece in pieces]
    if not pieces or not sum(counts) or pieces[0].ndim == 5:
        return list(range(len(pieces))) if len(pieces) == len(counts) else None
    owners: list[int] = []
    per_patch = sum(counts) / sum(sizes)
    for item, count in enumerate(counts):
        have = 0.0
        while have < count - 1e-6:
            if len(owners) == len(sizes):
                return None
            have += sizes[len(owners)] * per_patch
            owners.append(item)
        if have > count + 1e-6:
            return None
    return owners if len(owners) == len(sizes) else None
