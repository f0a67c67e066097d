"""The settings of one ReVisiT step, under the same names in every implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Divergence = Literal["jsd", "official", "kl", "cosine"]
Select = Literal["min", "max", "random", "soft"]
Fusion = Literal["poe", "interpolation"]
AdaptiveWeight = Literal["agreement", "uncertainty", "both"]
Precision = Literal["float32", "model"]

ADAPTIVE_WEIGHTS: tuple[AdaptiveWeight, ...] = ("agreement", "uncertainty", "both")

# What every implementation agrees on (see reference.py).
RESOLUTION = 1e-6  # divergences nearer to each other than this, by their scale, are equal
SOFT_TEMPERATURE = 0.1  # of select="soft"


@dataclass(frozen=True)
class Rule:
    """How one step is taken; the defaults are the paper's. `ReVisiT.rule` makes it from settings that were checked.

    alpha: a token is plausible if its probability is at least alpha times the largest.
    divergence: how far a vision token's distribution Q is from the output distribution P.
    select: the vision token of the "min" or "max" divergence, a "random" one, or "soft": a mixture of all vision
        tokens with shares softmax(−divergence / 0.1).
    neighbors: with "min" and "max", how many vision tokens are selected; Q is the mean of their distributions.
    fusion: "poe" is log P + w · log Q; "interpolation" is log((1 − w) · P + w · Q).
    weight: w as a number, or computed at each step: "agreement" is 1 − JSD(P, Q) / ln 2, "uncertainty" is
        √(1 − max P), "both" is their product.
    full_vocabulary: every token with a probability above zero is plausible.
    normalize: whether the result is a distribution.
    precision: "float32", or "model" to round vision distributions to the model's dtype as the released code does.
    """

    alpha: float = 1e-5
    divergence: Divergence = "jsd"
    select: Select = "min"
    fusion: Fusion = "poe"
    weight: float | AdaptiveWeight = 1.0
    neighbors: int = 1
    full_vocabulary: bool = False
    normalize: bool = True
    precision: Precision = "float32"

    @property
    def model_dtype(self) -> bool:
        """Whether vision logits and distributions are rounded to the model's dtype."""
        return self.precision == "model"
