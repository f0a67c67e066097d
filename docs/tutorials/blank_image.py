"""A decoding method in one file: contrast with the logits for an empty image."""

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.forward.pixels import changed_pixels


class BlankImage(Contrastive):
    alpha: float = 0.5  # strength of the contrast
    beta: float = 0.1  # tokens less likely than beta · the likeliest are excluded

    name = "blank-image"
    summary = "contrast with the same prompt and an empty image"

    def begin(self, prompt, passes):
        empty = passes.contrast(changed_pixels(prompt, lambda pixels, draw: pixels * 0, seed=0), self.mode)

        def combine(logits, blank, step):
            return contrast(logits, blank, self.alpha, self.beta)

        return self.contrasted(prompt, empty, combine)
