"""A decoding method of one's own, in one file: contrast with what the model says about an empty picture."""

from typing import Any

from revisit.contrast.pixels import changed_pixels
from revisit.methods.contrastive import Contrastive, cut


class BlankPicture(Contrastive):
    alpha: float = 0.5  # strength of the contrast
    beta: float = 0.1  # tokens less likely than beta · the likeliest are not said

    name = "blank-picture"
    summary = "contrast with the same prompt over an empty picture"

    def begin(self, run: Any) -> Any:
        has_image = run.find_vision_tokens().any(-1)  # (rows,)
        empty = changed_pixels(run, lambda picture, draw: picture * 0, seed=0)
        branch = self.branch(run, empty)
        combine = lambda logits, blank, step: cut(logits + self.alpha * (logits - blank), logits, self.beta)  # noqa: E731
        return self.contrasted(run, branch, has_image, combine)
