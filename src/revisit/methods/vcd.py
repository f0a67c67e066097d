"""VCD (Leng et al.): contrast with the same prompt over an image drowned in noise.

1. Diffuse noise into the processed pixels: sqrt(a)·x + sqrt(1 − a)·n, with a falling along 1000 steps.
2. Run the model on both; what the noisy run also says comes from language habits.
3. score = (1 + alpha)·l − alpha·l_noisy on the plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from revisit.methods.contrastive import Contrastive, contrast
from revisit.registry import Seed, Share, Strength

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run

STEPS = 1000


def noise_coefficients(step: int) -> tuple[float, float]:
    """How much of the picture and how much noise there is after `step` (0 to 999) steps of diffusion."""
    import torch

    beta = torch.sigmoid(torch.linspace(-6, 6, STEPS, dtype=torch.float64)) * (0.005 - 1e-5) + 1e-5
    kept = float((1 - beta).cumprod(0)[step])
    return kept**0.5, (1 - kept) ** 0.5


def add_noise(pixels: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """The pixels with noise of the given step; the same shape."""
    import torch

    signal, noise = noise_coefficients(step)
    return signal * pixels + noise * torch.randn(pixels.shape, generator=generator)


class VCD(Contrastive):
    """Settings of VCD; the defaults are those of its command line.

    Args:
        alpha: Strength of the contrast.
        beta: How unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
        noise_step: How far the image is diffused, 0 (hardly) to 999 (beyond recognition).
        seed: Seed of the noise; a picture gets the same noise in every batch.
    """

    alpha: Strength = 1.0
    beta: Share = 0.1
    noise_step: Annotated[int, Field(ge=0, le=STEPS - 1)] = 500
    seed: Seed = 0

    name = "vcd"
    summary = "contrast with the same prompt over a noisy image"
    cost = "2 rows per sequence, 2 prefills, 2 image encodings"
    source = "Leng et al., VCD, arXiv:2311.16922"

    @classmethod
    def official(cls, **overrides: Any) -> Self:
        """What the released POPE script for LLaVA runs: alpha 1, beta 0.2, noise step 500, seed 55."""
        return cls(**{"beta": 0.2, "seed": 55, **overrides})

    def begin(self, run: Run) -> Refine:
        from revisit.contrast.pixels import changed_pixels

        has_image = run.find_vision_tokens().any(-1)  # (rows,)
        noisy = changed_pixels(run, lambda picture, draw: add_noise(picture, self.noise_step, draw), self.seed)
        branch = self.branch(run, noisy)
        return self.contrasted(run, branch, has_image, lambda l, other, _: contrast(l, other, self.alpha, self.beta))
