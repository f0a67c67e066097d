"""RITUAL (Woo et al.): let a transformed picture of the same scene have a say.

1. Transform the picture at random: flip, rotate, crop, blur, or change its colors.
2. Run the model on both; what it says about both is about the scene.
3. score = l + alpha·l_transformed on the plausible tokens, p >= beta · max p.

The released code transforms the picture before its processor. Here the processed pixels are transformed, in the colors of
the picture (the processor's normalization is undone and done again); all tiles of a picture get the same transformation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from revisit.errors import RevisitError
from revisit.methods.contrastive import Contrastive, cut
from revisit.registry import Seed, Share, Strength

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run
    from revisit.models.types import Processor

    Normalization = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation of each channel


def combine(logits: Tensor, transformed: Tensor, alpha: float, beta: float) -> Tensor:
    """l + alpha·l_transformed where l allows it, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut(logits + alpha * transformed, logits, beta)


def normalization(processor: Processor) -> Normalization:
    """Mean and standard deviation that the processor normalizes each channel with."""
    images = processor.image_processor
    mean, std = getattr(images, "image_mean", None), getattr(images, "image_std", None)
    if not mean or not std:
        raise RevisitError(
            f"RITUAL changes the colors of a picture, and {type(images).__name__} declares no normalization (image_mean, image_std): use "
            "another method."
        )
    return (mean, std) if getattr(images, "do_normalize", True) else ([0.0] * len(mean), [1.0] * len(std))


class RITUAL(Contrastive):
    """Settings of RITUAL.

    Args:
        alpha: Weight of the transformed picture.
        beta: How unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
        transform: What to do to the picture; "random" draws one of the others for each picture.
        seed: Seed of the random choices; a picture is transformed alike in every batch.
    """

    alpha: Strength = 3.0
    beta: Share = 0.1
    transform: Literal["random", "flip", "upside-down", "rotate", "colors", "blur", "crop"] = "random"
    seed: Seed = 0

    name = "ritual"
    summary = "add what the model says about a randomly transformed picture"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Woo et al., RITUAL, arXiv:2405.17821"

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.pixels import transformed_pictures

        mask = run.find_vision_tokens()
        draw = partial(self.draw, normalization=normalization(run.processor))
        branch = self.branch(run, transformed_pictures(run, mask, draw, self.seed))
        return self.contrasted(run, branch, mask.any(-1), lambda l, other, _: combine(l, other, self.alpha, self.beta))

    def draw(
        self, generator: torch.Generator, size: tuple[int, int], normalization: Normalization
    ) -> Callable[[Tensor], Tensor]:
        """A transformation of normalized pictures (n, channels, height, width), for a picture of this (height, width)."""
        from revisit.contrast.transforms import draw

        transform = draw(self.transform, generator, size)

        def change(picture: Tensor) -> Tensor:
            mean, std = (picture.new_tensor(values).view(1, -1, 1, 1) for values in normalization)
            if mean.shape[1] != picture.shape[1]:  # not a picture in color
                mean, std = mean.mean(), std.mean()
            return (transform(picture * std + mean) - mean) / std

        return change
