"""M3ID (Favero et al.): contrast with the same text without its image, more strongly as the answer grows.

score = l + w·(l − l_text) with w = exp(λ·t) − 1, because the influence of the image fades. Only the plausible tokens, p >= beta
· max p, can be chosen. (The paper instead contrasts only where the model is uncertain.)
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from revisit.decoding.contrastive import Contrastive, cut
from revisit.decoding.method import Step
from revisit.decoding.prompt_edits import prompt_without_image
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Share, Strength, WholeNumber


def weight(t: int, decay: float, cap: float | None = None) -> float:
    """Return (1 − γ)/γ with γ = exp(−decay·t), at most `cap`; grows without bound otherwise."""
    grown = math.expm1(min(decay * t, 50.0))  # at e^50, which float32 can represent, nothing of the first term is left
    return grown if cap is None else min(grown, cap)


def contrast_text(
    logits: Tensor, text: Tensor, w: float, beta: float, gate: float | None = None, normalize: bool = False
) -> Tensor:
    """Return l + w·(l − l_text) on the plausible set of l, -inf elsewhere.  (..., V), (..., V) -> (..., V)

    With `gate`, rows whose best token has p >= gate keep their logits. `normalize` uses log-probabilities on both sides,
    which shifts a row by a constant.
    """
    if normalize:
        logits, text = logits.log_softmax(-1), text.log_softmax(-1)
    scores = logits + w * (logits - text) if w else logits
    if gate is not None:
        uncertain = logits.softmax(-1).amax(-1, keepdim=True) < gate
        scores = scores.where(uncertain, logits)
    return cut(scores, logits, beta)


class M3ID(Contrastive):
    """M3ID; the defaults are those of RITUAL's code, which most comparisons use.

    Args:
        decay: How fast the influence of the image fades (λ).
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        start: The step t of the first token; 0 leaves that token unchanged.
        cap: Largest weight of the contrast, or None.
        gate: Contrast only if the likeliest token has a smaller probability than this; None always contrasts.
        normalize: Combine log-probabilities instead of logits.
    """

    decay: Strength = 0.02
    beta: Share = 0.1
    start: WholeNumber = 0
    cap: Strength | None = None
    gate: Strength | None = None
    normalize: bool = False

    name = "m3id"
    summary = "contrast with the same text without its image, more strongly at every step"
    cost = "2 rows per sequence, a second prefill without the image"
    source = "Favero et al., M3ID, arXiv:2403.14003"

    @classmethod
    def avisc(cls, **overrides: Any) -> M3ID:
        """Return AvisC's variant: log-probabilities, t from 1."""
        return cls(**{"start": 1, "normalize": True, **overrides})

    @classmethod
    def paper(cls, **overrides: Any) -> M3ID:
        """Return the paper's rule, gated by confidence and without a cut; its constants are those of a faithful port."""
        return cls(**{"decay": 0.005, "beta": 0.0, "gate": 0.3, "cap": 5.0, **overrides})

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        other = passes.contrast(prompt_without_image(prompt), self.mode)

        def combine(logits: Tensor, text: Tensor, step: int) -> Tensor:
            w = weight(step + self.start, self.decay, self.cap)
            return contrast_text(logits, text, w, self.beta, self.gate, self.normalize)

        return self.contrasted(prompt, other, combine)
