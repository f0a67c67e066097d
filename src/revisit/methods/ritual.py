"""RITUAL (Woo et al.): let a transformed picture of the same scene have a say.

1. Transform the picture at random: flip, turn, crop, blur, or change its colours.
2. Run the model on both; what it says about both is about the scene.
3. score = l + alpha·l_transformed on the plausible tokens, p >= beta · max p.

The processed pixels are transformed, so colours change in normalised space, and a picture that its processor cut into
tiles is transformed tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from revisit.methods.contrastive import Contrastive, cut

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from revisit.decoding.method import Refine
    from revisit.decoding.run import Run


def combine(logits: Tensor, transformed: Tensor, alpha: float, beta: float) -> Tensor:
    """l + alpha·l_transformed where l allows it, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut(logits + alpha * transformed, logits, beta)


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
        import torch

        from revisit.contrast.transforms import TRANSFORMS

        names = list(TRANSFORMS)
        chosen = int(torch.randint(len(names), (), generator=draw))
        name = names[chosen] if self.transform == "random" else self.transform
        return TRANSFORMS[name](picture, draw)
