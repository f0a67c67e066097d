"""RITUAL's transformations against Pillow, which its released code uses through torchvision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from revisit.methods import ritual


@pytest.fixture
def picture() -> Image.Image:
    draws = np.random.default_rng(0)
    small = Image.fromarray(draws.integers(0, 256, (6, 9, 3), dtype=np.uint8))
    return small.resize((45, 30), Image.Resampling.BICUBIC)


def tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)[None].float() / 255


def close(got: Tensor, want: Image.Image, levels: float = 2) -> None:
    """Equal up to the rounding of 8-bit colors."""
    assert float((got - tensor(want)).abs().max()) <= levels / 255


def test_flips(picture: Image.Image) -> None:
    close(ritual.flip(tensor(picture)), ImageOps.mirror(picture), 0)
    close(ritual.upside_down(tensor(picture)), ImageOps.flip(picture), 0)


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 1.7, 2.0])
@pytest.mark.parametrize(
    ("change", "enhancer"),
    [
        (ritual.brighten, ImageEnhance.Brightness),
        (ritual.change_contrast, ImageEnhance.Contrast),
        (ritual.saturate, ImageEnhance.Color),
    ],
)
def test_brightness_contrast_and_saturation_are_factors(
    picture: Image.Image, change: Callable[[Tensor, float], Tensor], enhancer: type, factor: float
) -> None:
    close(change(tensor(picture), factor), enhancer(picture).enhance(factor))


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.0, 0.1, 0.5])
def test_hue(picture: Image.Image, shift: float) -> None:
    hsv = np.asarray(picture.convert("HSV")).copy()
    hsv[..., 0] += np.int32(shift * 255).astype(np.uint8)  # around the circle
    want = tensor(Image.fromarray(hsv, "HSV").convert("RGB"))
    difference = (ritual.shift_hue(tensor(picture), shift) - want).abs()
    assert float(difference.mean()) < 3 / 255  # Pillow has 256 hues
    assert float(difference.max()) < 16 / 255
    gray = torch.full((1, 3, 2, 2), 0.4)
    torch.testing.assert_close(ritual.shift_hue(gray, shift), gray)


@pytest.mark.parametrize("angle", [-140.0, 0.0, 30.0, 95.0, 180.0])
def test_rotation_is_counterclockwise_and_leaves_black_corners(picture: Image.Image, angle: float) -> None:
    want = tensor(picture.rotate(angle, Image.Resampling.NEAREST))
    got = ritual.rotate(tensor(picture), angle)
    assert float(((got - want).abs().amax(1) < 1e-6).float().mean()) > 0.9  # nearest pixels may differ on ties


def test_blur(picture: Image.Image) -> None:
    inside = (..., slice(7, -7), slice(7, -7))
    got, want = ritual.blur(tensor(picture), 1.7), tensor(picture.filter(ImageFilter.GaussianBlur(1.7)))
    assert float((got - want)[inside].abs().max()) < 12 / 255  # Pillow approximates by boxes


def test_a_crop_is_enlarged_to_the_whole(picture: Image.Image) -> None:
    got = ritual.crop(tensor(picture), top=0.2, left=1 / 3, height=0.5, width=2 / 3)
    part = tensor(picture.crop((15, 6, 45, 21)))
    torch.testing.assert_close(got, torch.nn.functional.interpolate(part, (30, 45), mode="bilinear"))


@pytest.mark.parametrize("size", [(30, 45), (10, 400), (400, 10)])
def test_drawn_crops_keep_area_and_shape(size: tuple[int, int]) -> None:
    for seed in range(40):
        drawn = ritual.draw_transform("crop", torch.Generator().manual_seed(seed), size)
        about = drawn.keywords  # type: ignore[attr-defined]
        height, width = about["height"] * size[0], about["width"] * size[1]
        assert 0 <= about["top"] <= 1 - about["height"] + 1e-9
        assert 0 <= about["left"] <= 1 - about["width"] + 1e-9
        assert 3 / 4 - 1e-6 <= width / height <= 4 / 3 + 1e-6


@pytest.mark.parametrize("name", ritual.TRANSFORMS)
def test_every_transformation_keeps_the_size(name: str) -> None:
    for seed in range(20):
        drawn = ritual.draw_transform(name, torch.Generator().manual_seed(seed), (8, 8))
        assert drawn(torch.rand(1, 3, 8, 8)).shape == (1, 3, 8, 8)


def test_one_of_six_is_drawn_with_equal_chances(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name: lambda *_, name=name: name for name in ritual.TRANSFORMS}
    monkeypatch.setattr(ritual, "TRANSFORMS", names)
    drawn = Counter(ritual.draw_transform("random", torch.Generator().manual_seed(n), (8, 8)) for n in range(600))
    assert set(drawn) == set(names)
    assert max(abs(count - 100) for count in drawn.values()) < 4 * math.sqrt(100)
