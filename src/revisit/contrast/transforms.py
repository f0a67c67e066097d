"""Random transformations of pictures, drawn from a given generator.

Pictures are (n, channels, height, width) with values from 0 (black) to 1, and stay so. Every transformation is a pure
function of a picture and its parameters; `draw` chooses the parameters, so that all tiles of a picture can be given the
same ones. Ranges and formulas are those of torchvision's classes with the arguments of RITUAL's scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

Transform = Callable[[Tensor], Tensor]
LUMA = (0.299, 0.587, 0.114)  # share of red, green and blue in a pixel's gray


def flip(picture: Tensor) -> Tensor:
    """Left and right exchanged."""
    return picture.flip(-1)


def upside_down(picture: Tensor) -> Tensor:
    """Top and bottom exchanged."""
    return picture.flip(-2)


def rotate(picture: Tensor, angle: float) -> Tensor:
    """Turned counterclockwise by an angle in degrees, nearest pixel, black where nothing comes in."""
    turn = math.radians(angle)
    cos, sin, ratio = math.cos(turn), math.sin(turn), picture.shape[-2] / picture.shape[-1]
    matrix = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]]).expand(len(picture), 2, 3)
    grid = F.affine_grid(matrix, list(picture.shape), align_corners=False)
    return F.grid_sample(picture, grid, mode="nearest", align_corners=False)


def blend(picture: Tensor, other: Tensor | float, factor: float) -> Tensor:
    """factor · picture + (1 − factor) · other, cut to 0..1; factors above 1 exaggerate."""
    return (factor * picture + (1 - factor) * other).clamp(0, 1)


def gray(picture: Tensor) -> Tensor:
    """The brightness of every pixel.  -> (n, 1, height, width)"""
    if picture.shape[1] != len(LUMA):
        return picture.mean(1, keepdim=True)
    return (picture * picture.new_tensor(LUMA).view(1, -1, 1, 1)).sum(1, keepdim=True)


def brighten(picture: Tensor, factor: float) -> Tensor:
    """Every value times a factor."""
    return blend(picture, 0.0, factor)


def change_contrast(picture: Tensor, factor: float) -> Tensor:
    """Nearer to, or farther from, the picture's mean gray."""
    return blend(picture, gray(picture).mean((1, 2, 3), keepdim=True), factor)


def saturate(picture: Tensor, factor: float) -> Tensor:
    """Nearer to, or farther from, each pixel's own gray."""
    return blend(picture, gray(picture), factor)


def shift_hue(picture: Tensor, shift: float) -> Tensor:
    """Hues moved along the color circle, of which `shift` is a fraction; a picture without three channels stays as it is."""
    if picture.shape[1] != len(LUMA):
        return picture
    top, bottom = picture.amax(1), picture.amin(1)  # (n, height, width)
    spread = (top - bottom).clamp_min(1e-12)
    red, green, blue = picture.unbind(1)
    sector = torch.where(
        top == red,
        (green - blue) / spread,
        torch.where(top == green, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    hue = sector / 6 + shift  # in turns of the circle
    channels = [((hue + offset) % 1 * 6 - 3).abs().sub(1).clamp(0, 1) for offset in (0.0, 2 / 3, 1 / 3)]
    return bottom.unsqueeze(1) + (top - bottom).unsqueeze(1) * torch.stack(channels, 1)


def blur(picture: Tensor, sigma: float) -> Tensor:
    """Smoothed by a Gaussian over 13 pixels."""
    channels, radius = picture.shape[1], min(6, min(picture.shape[-2:]) - 1)
    bell = torch.exp(-((torch.arange(-radius, radius + 1) / sigma) ** 2) / 2)
    kernel = (bell / bell.sum()).expand(channels, 1, -1)
    padded = F.pad(picture, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, kernel.unsqueeze(-2), groups=channels), kernel.unsqueeze(-1), groups=channels)


def crop(picture: Tensor, top: float, left: float, height: float, width: float) -> Tensor:
    """A part of the picture, in fractions of its sides, enlarged to the whole."""
    rows, columns = picture.shape[-2:]
    h, w = max(1, round(rows * height)), max(1, round(columns * width))
    y, x = min(round(rows * top), rows - h), min(round(columns * left), columns - w)
    return F.interpolate(picture[..., y : y + h, x : x + w], (rows, columns), mode="bilinear")


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _colors(generator: torch.Generator, _size: tuple[int, int]) -> Transform:
    """Brightness, contrast and saturation times 0 to 2, and any hue, in a random order."""
    steps: list[Transform] = [
        partial(brighten, factor=_uniform(0, 2, generator)),
        partial(change_contrast, factor=_uniform(0, 2, generator)),
        partial(saturate, factor=_uniform(0, 2, generator)),
        partial(shift_hue, shift=_uniform(-0.5, 0.5, generator)),
    ]
    order: list[int] = torch.randperm(len(steps), generator=generator).tolist()

    def change(picture: Tensor) -> Tensor:
        for step in order:
            picture = steps[step](picture)
        return picture

    return change


def _crop(generator: torch.Generator, size: tuple[int, int]) -> Transform:
    """8 % of the picture or more, its sides 3:4 to 4:3; after ten shapes that do not fit, the largest one in the middle."""
    rows, columns = size
    for _ in range(10):
        area = rows * columns * _uniform(0.08, 1, generator)
        ratio = math.exp(_uniform(math.log(3 / 4), math.log(4 / 3), generator))
        h, w = math.sqrt(area / ratio) / rows, math.sqrt(area * ratio) / columns
        if h <= 1 and w <= 1:
            top, left = _uniform(0, 1 - h, generator), _uniform(0, 1 - w, generator)
            return partial(crop, top=top, left=left, height=h, width=w)
    ratio = min(max(columns / rows, 3 / 4), 4 / 3)
    h, w = min(1.0, columns / ratio / rows), min(1.0, rows * ratio / columns)
    return partial(crop, top=(1 - h) / 2, left=(1 - w) / 2, height=h, width=w)


# name -> what draws its parameters, given the picture's (height, width)
TRANSFORMS: dict[str, Callable[[torch.Generator, tuple[int, int]], Transform]] = {
    "flip": lambda _generator, _size: flip,
    "upside-down": lambda _generator, _size: upside_down,
    "rotate": lambda generator, _size: partial(rotate, angle=_uniform(-180, 180, generator)),
    "colors": _colors,
    "blur": lambda generator, _size: partial(blur, sigma=_uniform(1.5, 2.0, generator)),
    "crop": _crop,
}


def draw(name: str, generator: torch.Generator, size: tuple[int, int]) -> Transform:
    """The named transformation with drawn parameters; "random" draws the name too."""
    if name == "random":
        names = list(TRANSFORMS)
        name = names[int(torch.randint(len(names), (), generator=generator))]
    return TRANSFORMS[name](generator, size)
