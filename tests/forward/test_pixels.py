"""Changing pixels: an image is changed alike in every batch, and padding stays."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import ImageOps
from torch import Tensor
from transformers import GenerationConfig

import families
from revisit.forward.pixels import (
    changed_pixels,
    content_seed,
    entries_per_image,
    item_digests,
    tiles_of_images,
    transformed_images,
)
from revisit.forward.prompt import Prompt
from revisit.methods import ritual
from revisit.models.parts import vision_mask

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's


def prompt_of(inputs: dict[str, Any], ids: Tensor, model: Any = None, mask: Tensor | None = None) -> Prompt:
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    return Prompt(
        model,
        ids,
        inputs,
        {},
        GenerationConfig(max_new_tokens=5, num_beams=1, num_return_sequences=1),
        "A test",
        given_mask=mask,
    )


def transformed(name: Any, prompt: Prompt) -> Tensor:
    """Return the pixels after one of RITUAL's transformations."""
    draw = partial(ritual.RITUAL(transform=name).draw, normalization=(MEAN, STD))
    pixels: Tensor = transformed_images(prompt, draw, 0)["pixel_values"]
    return pixels


def noise(image: Tensor, draw: torch.Generator) -> Tensor:
    return image + torch.randn(image.shape, generator=draw)


def test_seeds_come_from_the_content() -> None:
    image = torch.randn(1, 3, 4, 4)
    assert content_seed(image, 1) == content_seed(image.clone(), 1) != content_seed(image, 2)
    assert content_seed(image + 1e-3, 1) != content_seed(image, 1)
    assert all(0 <= content_seed(image, seed) < 2**63 for seed in (-5, 2**63 - 1, 2**63 + 3))  # one more for each tile


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)], ids=["one tensor each", "tiles"])
def test_an_image_is_changed_alike_in_every_batch(shape: tuple[int, ...]) -> None:
    images = torch.randn(3, *shape)
    ids = torch.ones(3, 2, dtype=torch.long)
    together = changed_pixels(prompt_of({"pixel_values": images}, ids), noise, 0)["pixel_values"]
    alone = changed_pixels(prompt_of({"pixel_values": images[1:2]}, ids[:1]), noise, 0)["pixel_values"]
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(together - images, (together - images).roll(1, 0))  # others get other noise


def test_padding_stays_padding() -> None:
    tiles = torch.randn(1, 3, 3, 4, 4)
    tiles[0, 2] = 0
    changed = changed_pixels(prompt_of({"pixel_values": tiles}, torch.ones(1, 2)), noise, 0)["pixel_values"]
    assert not changed[0, 2].any()
    padded = torch.randn(2, 3, 6, 6)
    sizes = torch.tensor([[6, 6], [4, 2]])
    prompt = prompt_of({"pixel_values": padded, "image_sizes": sizes}, torch.ones(2, 2))
    changed = changed_pixels(prompt, noise, 0)["pixel_values"]
    assert torch.equal(changed[1, :, 4:], padded[1, :, 4:])
    assert torch.equal(changed[1, :, :, 2:], padded[1, :, :, 2:])
    assert not torch.equal(changed[1, :, :4, :2], padded[1, :, :4, :2])


def test_packed_patches_belong_together() -> None:
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    assert entries_per_image(torch.zeros(24, 8), grid) == [16, 8]
    assert entries_per_image(torch.zeros(3, 3, 4, 4), None) == [1, 1, 1]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llava_next", "llava_onevision"])
def test_the_layout_is_the_processors(family: str) -> None:
    """Processing a flipped image equals flipping the processed image, also if it is cut into tiles."""
    model, _ = families.build(family)
    image = families.image(4, (112, 56))
    for name, turned in (("flip", ImageOps.mirror(image)), ("upside-down", ImageOps.flip(image))):
        inputs = dict(families.inputs(family, ["a"], [[image]]))
        want = families.inputs(family, ["a"], [[turned]])["pixel_values"]
        mask = vision_mask(inputs["input_ids"], (model.config.image_token_id,))
        got = transformed(name, prompt_of(inputs, inputs["input_ids"], model, mask))
        torch.testing.assert_close(got, want, atol=2e-2, rtol=0)  # resampling is not quite symmetric


def test_digests_depend_on_the_image() -> None:
    a, b = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 4)
    ids = torch.ones(2, 4, dtype=torch.long)
    both = item_digests(prompt_of({"pixel_values": torch.cat([a, b])}, ids))
    assert both[0] != both[1]
    assert item_digests(prompt_of({"pixel_values": torch.cat([b, a])}, ids)) == both[::-1]
    assert item_digests(prompt_of({"pixel_values": b}, ids[:1])) == [both[1]]


def test_tiles_are_assigned_to_images_by_their_tokens() -> None:
    one = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0]]).bool()  # runs of 6 and 2 tokens
    assert tiles_of_images(4, one) == [3, 1]
    assert tiles_of_images(2, one) == [1, 1]  # two images of different size, one tensor each
    assert tiles_of_images(3, torch.zeros(1, 4).bool()) == [1, 1, 1]


@pytest.mark.parametrize("name", ["rotate", "colors", "crop", "blur"])
def test_all_tiles_of_an_image_are_transformed_alike(name: str) -> None:
    tile = torch.rand(1, 3, 8, 8)
    mask = torch.ones(1, 6).bool()
    made = transformed(name, prompt_of({"pixel_values": tile.expand(3, -1, -1, -1).clone()}, mask.long()))
    assert not torch.equal(made[0], tile[0])
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def test_padding_is_not_transformed() -> None:
    tiles = torch.rand(1, 3, 3, 8, 8)
    tiles[0, 2] = 0
    mask, model = torch.ones(1, 4).bool(), SimpleNamespace(config=SimpleNamespace())
    made = transformed("colors", prompt_of({"pixel_values": tiles}, mask.long(), model))
    assert not made[0, 2].any()
    longer = torch.cat([tiles, torch.zeros(1, 2, 3, 8, 8)], dim=1)  # more padding, in a larger batch
    assert torch.equal(transformed("colors", prompt_of({"pixel_values": longer}, mask.long(), model))[:, :3], made)
