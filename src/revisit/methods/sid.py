"""SID (Huo et al.): contrast with a run that keeps only the vision tokens that the text attends to least.

The first layers of the second pass determine, by the newest position's attention averaged over heads, which vision tokens matter
least. From then on only those and all text are visible to it, so that its logits are hallucination induced by unimportant
parts: score = (1 + alpha)·l − alpha·l_induced on the plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import Step, check_layers
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.models import families
from revisit.registry import Share, Strength, WholeNumber


def least_attended(attention: Tensor, image: Tensor, counts: Tensor) -> Tensor:
    """Return the mask of each row's `counts` image columns with the least attention, the first of ties.  (rows, n) -> (rows, n)"""
    order = attention.masked_fill(~image, math.inf).argsort(dim=-1, stable=True)
    rank = order.argsort(-1)  # of each column in that order
    return image & (rank < counts.unsqueeze(-1))


def budget(keep: int | float | None, tokens: Tensor, model_type: str) -> Tensor:
    """Return how many vision tokens each row keeps: a number, a share, or the published share of the family.  (rows,) -> (rows,)

    Published: 100 of LLaVA-1.5's 576, and a tenth for families whose images have varying numbers of tokens.
    """
    if isinstance(keep, int):
        return tokens.clamp_max(keep)
    share = families.of(model_type).sid_share if keep is None else keep
    return (tokens * share).round().long().clamp_min(1)


class SID(Contrastive):
    """SID; the defaults are those of its scripts.

    Args:
        alpha: Strength of the contrast; the released scripts run 0.5, whatever their command line is.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        layer: The first decoder layer (from 0) in which the contrasted pass keeps fewer vision tokens; at least 1.
        keep: Vision tokens that the contrasted pass keeps: a number, a share of them, or None for the published budget of the
            family. They are chosen again for every token.
        constraint: Drop implausible tokens "always", or only when "sampling" as in the released code.
    """

    alpha: Strength = 0.5
    beta: Share = 0.1
    layer: Annotated[int, Field(ge=1)] = 2
    keep: WholeNumber | Share | None = None
    constraint: Literal["always", "sampling"] = "always"

    name = "sid"
    summary = "contrast with a run that keeps only the least attended vision tokens"
    cost = "2 rows per sequence, 2 prefills"
    needs_cache = True
    source = "Huo et al., SID, arXiv:2408.02032"
    # No plausibility cut under greedy decoding; the caption script keeps 50 tokens.
    released = {"constraint": "sampling"}

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        check_layers(self, (self.layer,), prompt.parts.depth)
        other = passes.contrast(None, self.mode)
        counts = budget(self.keep, prompt.vision.sum(-1), prompt.model.config.model_type)
        hidden: Tensor | None = None  # (rows, n) columns that are hidden in the running forward

        def attention_hook(call: Call) -> None:
            nonlocal hidden
            if call.layer == self.layer - 1:
                image = call.columns(prompt.vision)
                attention = call.last_attention().mean(1)
                hidden = image & ~least_attended(attention, image, counts.to(image.device))
            elif hidden is not None:
                call.hide(hidden)

        passes.on_attention(attention_hook, range(self.layer - 1, prompt.parts.depth), of=other)
        beta = self.beta if self.constraint == "always" or prompt.config.do_sample else 0.0
        return self.contrasted(prompt, other, lambda l, induced, _: contrast(l, induced, self.alpha, beta))
