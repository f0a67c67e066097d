"""A decoding method in one file: contrast with the logits for an empty image."""

from typing import Any

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.hooks.pixels import changed_pixels


class BlankImage(Contrastive):
    alpha: float = 0.5  # strength of the contrast
    beta: float = 0.1  # tokens less likely than beta · the likeliest are excluded

    name = "blank-image"
    summary = "contrast with the same prompt and an empty image"

    def begin(self, run: Any) -> Any:
        has_image = run.find_vision_tokens().any(-1)  # (rows,)
        empty = changed_pixels(run, lambda pixels, draw: pixels * 0, seed=0)
        combine = lambda logits, blank, step: contrast(logits, blank, self.alpha, self.beta)  # noqa: E731
        return self.contrasted(run, self.branch(run, empty), has_image, combine)
