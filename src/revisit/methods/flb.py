"""FLB, First Logit Boosting (Ha et al.), a control: add the first step's logits to every later step's.

At step t (from 0) score = l_t + gamma · (1 − e^(−decay · t)) · l_0 on the tokens with p >= beta · max p. The first logits favor
words that begin a sentence; the authors attribute part of the gain to "The".
"""

from __future__ import annotations

import math

from torch import Tensor

from revisit.decoding.contrastive import cut
from revisit.decoding.method import Method, Step
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Share, Strength


def boost(logits: Tensor, first: Tensor, step: int, gamma: float, decay: float, beta: float) -> Tensor:
    """Return the boosted scores on the plausible set of l, -inf elsewhere; `step` counts from 0.  (..., V), (..., V) -> (..., V)"""
    return cut(logits + gamma * -math.expm1(-decay * step) * first, logits, beta)


class FLB(Method):
    """First Logit Boosting; the defaults are those of its AMBER scripts.

    Args:
        gamma: Weight of the first logits in late steps.
        decay: How fast that weight is reached (λ in the paper).
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
    """

    gamma: Strength = 0.3
    decay: Strength = 0.05
    beta: Share = 0.1

    name = "flb"
    summary = "a control: the first step's logits added to every later step's"
    cost = "1 forward"
    source = "Ha et al., First Logit Boosting, arXiv:2604.00455"
    speculative = True

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        first: list[Tensor] = []  # the model's own logits of the first step; beams of an item share theirs

        def step(input_ids: Tensor, logits: Tensor) -> Tensor:
            if not first:
                first.append(passes.raw.clone())
            number = input_ids.shape[1] - prompt.ids.shape[1]
            return boost(logits, first[0], number, self.gamma, self.decay, self.beta)

        return step
