"""Random transformations of a picture (n, channels, height, width), drawn from a given generator."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def _uniform(low: float, high: float, draw: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=draw))


def turn(picture: Tensor, draw: torch.Generator) -> Tensor:
    """Rotated by any angle; what comes in from outside is the mean colour."""
    angle = _uniform(-math.pi, math.pi, draw)
    cos, sin, ratio = math.cos(angle), math.sin(angle), picture.shape[-2] / picture.shape[-1]
    matrix = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]]).expand(len(picture), 2, 3)
    grid = F.affine_grid(matrix, list(picture.shape), align_corners=False)
    return F.grid_sample(picture, grid, align_corners=False)


def recolour(picture: Tensor, draw: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation changed, each by up to its whole range."""
    brightness, contrast, saturation = (_uniform(0, 2, draw) for _ in range(3))
    grey = picture.mean(1, keepdim=True)
    picture = grey + saturation * (picture - grey)
    mean = picture.mean((1, 2, 3), keepdim=True)
    return mean + contrast * (picture - mean) + (brightness - 1)


def blur(picture: Tensor, draw: torch.Generator) -> Tensor:
    """Smoothed by a Gaussian of 1.5 to 2 pixels, over 13 pixels."""
    sigma, channels = _uniform(1.5, 2.0, draw), picture.shape[1]
    radius = min(6, min(picture.shape[-2:]) - 1)
    bell = torch.exp(-((torch.arange(-radius, radius + 1) / sigma) ** 2) / 2)
    kernel = (bell / bell.sum()).expand(channels, 1, -1)
    padded = F.pad(picture, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, kernel.unsqueeze(-2), groups=channels), kernel.unsqueeze(-1), groups=channels)


def crop(picture: Tensor, draw: torch.Generator) -> Tensor:
    """A part of the picture, 8 % of it or more and of about its shape, enlarged to the whole."""
    height, width = picture.shape[-2:]
    area, ratio = _uniform(0.08, 1, draw), math.exp(_uniform(math.log(3 / 4), math.log(4 / 3), draw))
    h = max(1, min(height, round(height * math.sqrt(area / ratio))))
    w = max(1, min(width, round(width * math.sqrt(area * ratio))))
    top, left = int(_uniform(0, height - h + 1, draw)), int(_uniform(0, width - w + 1, draw))
    return F.interpolate(picture[..., top : top + h, left : left + w], (height, width), mode="bilinear")


TRANSFORMS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "flip": lambda picture, draw: picture.flip(-1),
    "upside-down": lambda picture, draw: picture.flip(-2),
    "turn": turn,
    "colours": recolour,
    "blur": blur,
    "crop": crop,
}
