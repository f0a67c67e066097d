"""RITUAL (Woo et al.): add the logits for a randomly transformed image: score = l + alpha·l_transformed where p >= beta · max p.

The released code transforms the image before the processor. Here the processed pixels are transformed, in the colors of the
image (the processor's normalization is undone and redone); all tiles of an image get the same transformation. Ranges and
formulas are those of torchvision's classes with the arguments of the released scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from revisit.decoding.contrastive import Contrastive, cut
from revisit.decoding.method import Step
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.pixels import transformed_images
from revisit.forward.prompt import Prompt
from revisit.models.types import Processor
from revisit.registry import Seed, Share, Strength

Normalization = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


def combine(logits: Tensor, transformed: Tensor, alpha: float, beta: float) -> Tensor:
    """Return l + alpha·l_transformed on the plausible set of l, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut(logits + alpha * transformed, logits, beta)


def normalization(processor: Processor) -> Normalization:
    """Return the mean and standard deviation of each channel in the processor's normalization."""
    images = processor.image_processor
    mean, std = getattr(images, "image_mean", None), getattr(images, "image_std", None)
    if not mean or not std:
        raise RevisitError(
            f"RITUAL changes the colors of the image, and {type(images).__name__} declares no normalization (image_mean, image_std): use "
            "another method."
        )
    return (mean, std) if getattr(images, "do_normalize", True) else ([0.0] * len(mean), [1.0] * len(std))


class RITUAL(Contrastive):
    """RITUAL; the defaults are those of its scripts.

    Args:
        alpha: Weight of the transformed image.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        transform: The transformation; "random" draws one of the others for each image.
        seed: Seed of the random choices; an image is transformed alike in every batch.
    """

    alpha: Strength = 3.0
    beta: Share = 0.1
    transform: Literal["random", "flip", "upside-down", "rotate", "colors", "blur", "crop"] = "random"
    seed: Seed = 0

    name = "ritual"
    summary = "add the logits for a randomly transformed image"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Woo et al., RITUAL, arXiv:2405.17821"

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        draw = partial(self.draw, normalization=normalization(prompt.processor))
        other = passes.contrast(transformed_images(prompt, draw, self.seed), self.mode)
        return self.contrasted(prompt, other, lambda l, changed, _: combine(l, changed, self.alpha, self.beta))

    def draw(
        self, generator: torch.Generator, size: tuple[int, int], normalization: Normalization
    ) -> Callable[[Tensor], Tensor]:
        """Draw a transformation of normalized images (n, channels, height, width), for an image of this (height, width)."""
        transform = draw_transform(self.transform, generator, size)

        def change(image: Tensor) -> Tensor:
            mean, std = (image.new_tensor(values).view(1, -1, 1, 1) for values in normalization)
            return (transform(image * std + mean) - mean) / std

        return change


# -- transformations: functions of images (n, channels, height, width) with values from 0 (black) to 1 ----------------

Transform = Callable[[Tensor], Tensor]
LUMA = (0.299, 0.587, 0.114)  # share of red, green and blue in a pixel's gray


def flip(image: Tensor) -> Tensor:
    """Exchange left and right."""
    return image.flip(-1)


def upside_down(image: Tensor) -> Tensor:
    """Exchange top and bottom."""
    return image.flip(-2)


def rotate(image: Tensor, angle: float) -> Tensor:
    """Turn counterclockwise by an angle in degrees: nearest pixel, black outside."""
    turn = math.radians(angle)
    cos, sin, ratio = math.cos(turn), math.sin(turn), image.shape[-2] / image.shape[-1]
    matrix = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]]).expand(len(image), 2, 3)
    grid = F.affine_grid(matrix, list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="nearest", align_corners=False)


def blend(image: Tensor, other: Tensor | float, factor: float) -> Tensor:
    """Return factor · image + (1 − factor) · other, clamped to 0..1; factors above 1 exaggerate."""
    return (factor * image + (1 - factor) * other).clamp(0, 1)


def gray(image: Tensor) -> Tensor:
    """Return the brightness of every pixel.  -> (n, 1, height, width)"""
    return (image * image.new_tensor(LUMA).view(1, -1, 1, 1)).sum(1, keepdim=True)


def brighten(image: Tensor, factor: float) -> Tensor:
    """Multiply every value by a factor."""
    return blend(image, 0.0, factor)


def change_contrast(image: Tensor, factor: float) -> Tensor:
    """Blend with the image's mean gray."""
    return blend(image, gray(image).mean((1, 2, 3), keepdim=True), factor)


def saturate(image: Tensor, factor: float) -> Tensor:
    """Blend with each pixel's own gray."""
    return blend(image, gray(image), factor)


def shift_hue(image: Tensor, shift: float) -> Tensor:
    """Move hues along the color circle by a fraction of it."""
    top, bottom = image.amax(1), image.amin(1)  # (n, height, width)
    spread = (top - bottom).clamp_min(1e-12)
    red, green, blue = image.unbind(1)
    sector = torch.where(
        top == red,
        (green - blue) / spread,
        torch.where(top == green, 2 + (blue - red) / spread, 4 + (red - green) / spread),
    )
    hue = sector / 6 + shift  # in turns of the circle
    channels = [((hue + offset) % 1 * 6 - 3).abs().sub(1).clamp(0, 1) for offset in (0.0, 2 / 3, 1 / 3)]
    return bottom.unsqueeze(1) + (top - bottom).unsqueeze(1) * torch.stack(channels, 1)


def blur(image: Tensor, sigma: float) -> Tensor:
    """Smooth with a Gaussian over 13 pixels."""
    channels, radius = image.shape[1], min(6, min(image.shape[-2:]) - 1)
    bell = torch.exp(-((torch.arange(-radius, radius + 1) / sigma) ** 2) / 2)
    kernel = (bell / bell.sum()).expand(channels, 1, -1)
    padded = F.pad(image, (radius,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, kernel.unsqueeze(-2), groups=channels), kernel.unsqueeze(-1), groups=channels)


def crop(image: Tensor, top: float, left: float, height: float, width: float) -> Tensor:
    """Enlarge a part of the image, given in fractions of its sides, to the whole."""
    rows, columns = image.shape[-2:]
    h, w = max(1, round(rows * height)), max(1, round(columns * width))
    y, x = min(round(rows * top), rows - h), min(round(columns * left), columns - w)
    return F.interpolate(image[..., y : y + h, x : x + w], (rows, columns), mode="bilinear")


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _colors(generator: torch.Generator, _size: tuple[int, int]) -> Transform:
    """Draw brightness, contrast and saturation from 0 to 2 and any hue, applied in a random order."""
    steps: list[Transform] = [
        partial(brighten, factor=_uniform(0, 2, generator)),
        partial(change_contrast, factor=_uniform(0, 2, generator)),
        partial(saturate, factor=_uniform(0, 2, generator)),
        partial(shift_hue, shift=_uniform(-0.5, 0.5, generator)),
    ]
    order: list[int] = torch.randperm(len(steps), generator=generator).tolist()

    def change(image: Tensor) -> Tensor:
        for step in order:
            image = steps[step](image)
        return image

    return change


def _crop(generator: torch.Generator, size: tuple[int, int]) -> Transform:
    """Draw a crop of at least 8 % of the image with sides 3:4 to 4:3; the largest central one after ten that do not fit."""
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


# name -> function that draws its parameters for an image of (height, width)
TRANSFORMS: dict[str, Callable[[torch.Generator, tuple[int, int]], Transform]] = {
    "flip": lambda _generator, _size: flip,
    "upside-down": lambda _generator, _size: upside_down,
    "rotate": lambda generator, _size: partial(rotate, angle=_uniform(-180, 180, generator)),
    "colors": _colors,
    "blur": lambda generator, _size: partial(blur, sigma=_uniform(1.5, 2.0, generator)),
    "crop": _crop,
}


def draw_transform(name: str, generator: torch.Generator, size: tuple[int, int]) -> Transform:
    """Draw the parameters of the named transformation; "random" draws the name too."""
    if name == "random":
        names = list(TRANSFORMS)
        name = names[int(torch.randint(len(names), (), generator=generator))]
    return TRANSFORMS[name](generator, size)
