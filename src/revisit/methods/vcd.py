"""VCD (Leng et al.): contrast with the same prompt over a noisy image.

Noise is diffused into the processed pixels, sqrt(a)·x + sqrt(1 − a)·n with a decreasing over 1,000 steps, and score = (1 +
alpha)·l − alpha·l_noisy on the plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import Step
from revisit.forward.passes import Passes
from revisit.forward.pixels import changed_pixels
from revisit.forward.prompt import Prompt
from revisit.registry import Seed, Share, Strength

STEPS = 1000


def noise_coefficients(step: int) -> tuple[float, float]:
    """Return the weights of the image and of the noise after `step` (0 to 999) steps of diffusion."""
    beta = torch.sigmoid(torch.linspace(-6, 6, STEPS, dtype=torch.float64)) * (0.005 - 1e-5) + 1e-5
    kept = float((1 - beta).cumprod(0)[step])
    return kept**0.5, (1 - kept) ** 0.5


def add_noise(pixels: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """Add the noise of a diffusion step to pixels of any shape."""
    signal, noise = noise_coefficients(step)
    return signal * pixels + noise * torch.randn(pixels.shape, generator=generator)


class VCD(Contrastive):
    """VCD; the defaults are those of its command line.

    Args:
        alpha: Strength of the contrast.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        noise_step: How far the image is diffused, from 0 to 999 (beyond recognition).
        seed: Seed of the noise; an image gets the same noise in every batch.
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    noise_step: Annotated[int, Field(ge=0, le=STEPS - 1)] = 500
    seed: Seed = 0

    name = "vcd"
    summary = "contrast with the same prompt over a noisy image"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Leng et al., VCD, arXiv:2311.16922"
    released = {"beta": 0.2, "seed": 55}  # of the POPE script for LLaVA

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        noisy = changed_pixels(prompt, lambda image, generator: add_noise(image, self.noise_step, generator), self.seed)
        other = passes.contrast(noisy, self.mode)
        return self.contrasted(prompt, other, lambda l, noisy, _: contrast(l, noisy, self.alpha, self.beta))
