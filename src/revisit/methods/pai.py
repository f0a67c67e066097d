"""PAI (Liu et al.): raise attention to the image, and contrast with the same text without it.

In all but the first layers, alpha · |score| is added to the last position's attention scores for vision tokens. With c and u
the log-probabilities with and without the image, score = γ·(c − u) + u on the plausible tokens, p >= beta · max p. Either part
can be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import model_validator
from torch import Tensor
from typing_extensions import Self

from revisit.decoding.contrastive import Contrastive, cut
from revisit.decoding.method import Step, StepResult
from revisit.decoding.prompt_edits import prompt_without_image
from revisit.errors import RevisitError
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Share, Strength, WholeNumber


def guide(logits: Tensor, text: Tensor, gamma: float, beta: float) -> Tensor:
    """Return γ·(c − u) + u on the plausible set of c, -inf elsewhere; c for γ = 1.  (..., V), (..., V) -> (..., V)"""
    c, u = logits.log_softmax(-1), text.log_softmax(-1)
    return c if gamma == 1 else cut(gamma * (c - u) + u, c, beta)


def amplify(scores: Tensor, image: Tensor, alpha: float) -> Tensor:
    """Add alpha · |score| to attention scores at the image's columns.  (rows, heads, q, n), (rows, n) -> (rows, heads, q, n)"""
    return (scores + alpha * scores.abs()).where(image[:, None, None] & scores.isfinite(), scores)


class PAI(Contrastive):
    """PAI; the defaults are those of its documentation.

    Args:
        alpha: Strength of the change of attention; 0 leaves it unchanged.
        gamma: Strength of the guidance; None runs without guidance and its second pass.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        first_layer: The first decoder layer (from 0) whose attention is changed.

    Only the newest position's attention is changed, that of the prefill only without guidance, as published.
    """

    alpha: Strength = 0.2
    gamma: Strength | None = 1.1
    beta: Share = 0.1
    first_layer: WholeNumber = 2

    name = "pai"
    summary = "raise attention to the image, and guide away from the text alone"
    cost = "2 rows per sequence, a second prefill without the image (1 without guidance)"
    source = "Liu et al., PAI, arXiv:2407.21771"

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.gamma is None and self.alpha == 0:
            raise RevisitError("PAI: alpha 0 and gamma none do nothing; set one of them.")
        return self

    @property
    def changes_forward(self) -> bool:  # type: ignore[override]
        return self.alpha > 0

    @property
    def needs_cache(self) -> bool:  # type: ignore[override]
        return self.alpha > 0

    @classmethod
    def guidance(cls, **overrides: Any) -> PAI:
        """Return the guidance alone, which works with every attention kernel."""
        return cls(**{"alpha": 0.0, **overrides})

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        if self.alpha:
            self._attend(prompt, passes)
        if self.gamma is None:
            return lambda input_ids, logits: StepResult(logits, acted=prompt.has_image)
        gamma, other = self.gamma, passes.contrast(prompt_without_image(prompt), self.mode)
        return self.contrasted(prompt, other, lambda l, text, _: guide(l, text, gamma, self.beta))

    def _attend(self, prompt: Prompt, passes: Passes) -> None:
        """Change the attention for the rest of the call."""
        vision, first = prompt.vision, min(self.first_layer, prompt.parts.depth - 1)
        forwards = 0

        def attention_hook(call: Call) -> Callable[[Tensor], None] | None:
            nonlocal forwards
            forwards += call.layer == first
            if forwards == 1 and self.gamma is not None:
                return None
            return call.attend(amplify(call.scores(), call.columns(vision), self.alpha))

        passes.on_attention(attention_hook, range(first, prompt.parts.depth))
