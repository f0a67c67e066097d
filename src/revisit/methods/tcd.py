"""TCD (Zhang et al.): contrast with the same prompt over a video whose order in time is ambiguous.

Score = (1 + alpha)·l − alpha·l_other on the plausible tokens, p >= beta · max p. No code was published, so this follows the paper, which
drops frames. Here the other pass has as many frames: each dropped one is replaced by the kept one before it, so that the prompt and its
times stay the same. The paper keeps scores of at least beta times the largest logit, which depends on the scale of the logits; that is
`official()`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import Step
from revisit.forward.passes import Passes
from revisit.forward.pixels import changed_frames, content_seed
from revisit.forward.prompt import Prompt
from revisit.registry import Share, Strength

Negative = Literal["subset", "reverse", "shuffle", "mean"]


def negative_frames(frames: Tensor, negative: Negative) -> Tensor:
    """Return the frames of the other pass.  (frames, ...) -> (frames, ...)"""
    count = len(frames)
    if negative == "mean":
        return frames.float().mean(0, keepdim=True).to(frames.dtype).expand_as(frames)
    if negative == "shuffle":
        generator = torch.Generator().manual_seed(content_seed(frames, 0))
        return frames[torch.randperm(count, generator=generator).to(frames.device)]
    order = torch.arange(count, device=frames.device)
    return frames[order.flip(0) if negative == "reverse" else order // 2 * 2]


def published_cut(scores: Tensor, logits: Tensor, beta: float) -> Tensor:
    """Exclude scores below beta · max of the logits; a row that would lose all of them is left.  (rows, V) -> (rows, V)"""
    low = scores < beta * logits.amax(-1, keepdim=True)
    return scores.masked_fill(low & ~low.all(-1, keepdim=True), -math.inf)


class TCD(Contrastive):
    """TCD; the defaults are those of the paper, with the usual plausibility constraint.

    Args:
        alpha: Strength of the contrast.
        beta: Threshold of the constraint; 0 keeps every token.
        negative: The frames of the other pass: "subset" shows every other frame twice, "reverse" runs backward (as MotionCD of
            MHBench), "shuffle" is a random order, and "mean" shows the mean frame throughout.
        constraint: "plausible" keeps tokens with p >= beta · max p, "published" scores of at least beta times the largest logit.
    """

    alpha: Strength = 0.5
    beta: Share = 0.5
    negative: Negative = "subset"
    constraint: Literal["plausible", "published"] = "plausible"

    name = "tcd"
    summary = "contrast with the same prompt over fewer or reordered frames of a video"
    cost = "2 rows per sequence, 2 prefills, 2 video encodings"
    source = "Zhang et al., EventHallusion, arXiv:2409.16597"
    released = {"constraint": "published"}

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        other = passes.contrast(
            changed_frames(prompt, lambda frames: negative_frames(frames, self.negative)), self.mode
        )

        def combine(logits: Tensor, other: Tensor, _: int) -> Tensor:
            if self.constraint == "plausible":
                return contrast(logits, other, self.alpha, self.beta)
            return published_cut((1 + self.alpha) * logits - self.alpha * other, logits, self.beta)

        return self.contrasted(prompt, other, combine)
