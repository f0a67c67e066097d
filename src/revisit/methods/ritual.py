"""RITUAL (Woo et al.): let a transformed picture of the same scene have a say.

1. Transform the picture at random: flip, turn, crop, blur, or change its colours.
2. Run the model on both; what it says about both is about the scene.
3. score = l + alpha·l_transformed on the plausible tokens, p >= beta · max p.

The processed pixels are transformed, so colours change in normalised space, and a picture that its processor cut into
tiles is transformed tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional as F

from revisit.methods.contrastive import Contrastive, cut

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.loop import Run
    from revisit.decoding.method import Refine


def combine(logits: Tensor, transformed: Tensor, alpha: float, beta: float) -> Tensor:
    """l + alpha·l_transformed where l allows it, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut(logits + alpha * transformed, logits, beta)


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


@dataclass(frozen=True)
class RITUAL(Contrastive):
    """Settings of RITUAL.

    alpha: weight of the transformed picture.
    beta: how unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
    transform: what to do to the picture; "random" draws one of the others for each picture.
    seed: of the drawing; a picture is transformed alike in every batch.
    """

    alpha: float = 3.0
    beta: float = 0.1
    transform: Literal["random", "flip", "upside-down", "turn", "colours", "blur", "crop"] = "random"
    seed: int = 0

    name = "ritual"
    summary = "add what the model says about a randomly transformed picture"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Woo et al., RITUAL, arXiv:2405.17821"

    def __post_init__(self) -> None:
        self.check_mode()
        self.check_choice("transform")
        self.check_range("alpha", 0, float("inf"))
        self.check_range("beta", 0, 1)
        self.check_seed()

    @classmethod
    def official(cls, **overrides: Any) -> RITUAL:
        """The released settings: alpha 3, beta 0.1, a random transformation."""
        return cls(**overrides)

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.branch import add_branch
        from revisit.contrast.pixels import changed_pixels

        has_image = run.find_vision_tokens().any(-1)
        branch = add_branch(run, changed_pixels(run, self.change, self.seed, pictures=True), stacked=self.stacks(run))
        return self.contrasted(run, branch, has_image, lambda l, other, _: combine(l, other, self.alpha, self.beta))

    def change(self, picture: Tensor, draw: torch.Generator) -> Tensor:
        """One picture, transformed.  (n, channels, height, width) -> the same shape"""
        names = list(TRANSFORMS)
        chosen = int(torch.randint(len(names), (), generator=draw))
        name = names[chosen] if self.transform == "random" else self.transform
        return TRANSFORMS[name](picture, draw)
