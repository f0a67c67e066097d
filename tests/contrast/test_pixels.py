"""Changing pixels: the same picture is changed alike in every batch, and padding is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import families
from revisit.contrast import transforms
from revisit.contrast.pixels import _owners, changed_pixels, content_seed, item_digests, units
from revisit.methods import ritual


def run_of(inputs: dict[str, Any], ids: Tensor, model: Any = None) -> Any:
    settings = SimpleNamespace(to_dict=lambda: {"max_new_tokens": 5})
    return SimpleNamespace(
        inputs=inputs,
        input_ids=ids,
        copies=1,
        model_kwargs={},
        generation_config=settings,
        model=model,
        method=object(),
    )


def noise(picture: Tensor, draw: torch.Generator) -> Tensor:
    return picture + torch.randn(picture.shape, generator=draw)


def test_seeds_come_from_the_content() -> None:
    picture = torch.randn(1, 3, 4, 4)
    assert content_seed(picture, 1) == content_seed(picture.clone(), 1) != content_seed(picture, 2)
    assert content_seed(picture + 1e-3, 1) != content_seed(picture, 1)
    assert 0 <= content_seed(picture, -5) < 2**63


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 4, 4)], ids=["one tensor each", "tiles"])
def test_a_picture_is_changed_alike_in_every_batch(shape: tuple[int, ...]) -> None:
    pictures = torch.randn(3, *shape)
    ids = torch.ones(3, 2, dtype=torch.long)
    together = changed_pixels(run_of({"pixel_values": pictures}, ids), noise, 0)["pixel_values"]
    alone = changed_pixels(run_of({"pixel_values": pictures[1:2]}, ids[:1]), noise, 0)["pixel_values"]
    assert torch.equal(together[1:2], alone)
    assert not torch.equal(together - pictures, (together - pictures).roll(1, 0))  # others get other noise


def test_padding_stays_padding() -> None:
    tiles = torch.randn(1, 3, 3, 4, 4)
    tiles[0, 2] = 0
    changed = changed_pixels(run_of({"pixel_values": tiles}, torch.ones(1, 2)), noise, 0)["pixel_values"]
    assert not changed[0, 2].any()
    padded = torch.randn(2, 3, 6, 6)
    sizes = torch.tensor([[6, 6], [4, 2]])
    changed = changed_pixels(run_of({"pixel_values": padded, "image_sizes": sizes}, torch.ones(2, 2)), noise, 0)[
        "pixel_values"
    ]
    assert torch.equal(changed[1, :, 4:], padded[1, :, 4:])
    assert torch.equal(changed[1, :, :, 2:], padded[1, :, :, 2:])
    assert not torch.equal(changed[1, :, :4, :2], padded[1, :, :4, :2])


def test_packed_patches_belong_together() -> None:
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    assert units(torch.zeros(24, 8), grid) == [16, 8]
    assert units(torch.zeros(3, 3, 4, 4), None) == [1, 1, 1]


def test_unpacking_is_the_processors_layout() -> None:
    """A flipped picture, processed, is the processed picture, flipped by us."""
    from PIL import ImageOps

    model, _ = families.build("qwen2_5_vl")
    picture = families.picture(4, (56, 28))
    for name, turned in (("flip", ImageOps.mirror(picture)), ("upside-down", ImageOps.flip(picture))):
        inputs = dict(families.inputs("qwen2_5_vl", ["a"], [[picture]]))
        want = families.inputs("qwen2_5_vl", ["a"], [[turned]])["pixel_values"]
        method = ritual.RITUAL(transform=name)  # type: ignore[arg-type]
        got = changed_pixels(run_of(inputs, inputs["input_ids"], model), method.change, 0, pictures=True)[
            "pixel_values"
        ]
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", transforms.TRANSFORMS)
def test_transforms_keep_shape_and_depend_on_the_draw_only(name: str) -> None:
    picture = torch.randn(2, 3, 14, 20)
    made = [transforms.TRANSFORMS[name](picture, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert made[0].shape == picture.shape
    assert bool(made[0].isfinite().all())
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], picture)
    if name in ("turn", "colours", "crop", "blur"):
        assert not torch.equal(made[0], made[2])


def test_pictures_find_their_items() -> None:
    two, one = torch.zeros(8, 4), torch.zeros(4, 4)
    assert _owners((two, one, one), [2, 2]) == [0, 1, 1]  # 2 tokens per 8 patches
    assert _owners((one, one), [1, 1]) == [0, 1]
    assert _owners((two, one), [1, 1]) is None


def test_digests_follow_the_picture() -> None:
    a, b = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 4)
    ids, mask = torch.ones(2, 4, dtype=torch.long), torch.tensor([[True, True, False, False]] * 2)
    both = item_digests(run_of({"pixel_values": torch.cat([a, b])}, ids), mask)
    assert both[0] != both[1]
    assert item_digests(run_of({"pixel_values": torch.cat([b, a])}, ids), mask) == both[::-1]
    assert item_digests(run_of({"pixel_values": b}, ids[:1]), mask[:1]) == [both[1]]
