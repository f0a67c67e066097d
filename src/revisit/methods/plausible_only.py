"""A control: the adaptive plausibility constraint that most methods apply, and nothing else.

Tokens with p < alpha · max p are dropped, and the rest keep their logits. Greedy decoding is unchanged; under sampling, the
control shows how much of a method's gain comes from its constraint.
"""

from __future__ import annotations

from revisit.decoding.contrastive import cut
from revisit.decoding.method import Method, Step
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import PositiveShare


class PlausibleOnly(Method):
    """Keep plausible tokens, and change nothing else.

    Args:
        alpha: Plausibility threshold relative to the likeliest token. The contrastive methods use 0.1, ReVisiT 1e-5.
    """

    alpha: PositiveShare = 0.1

    name = "plausible_only"
    summary = "a control: only the plausibility constraint of the other methods"
    cost = "1 forward"
    source = "Li et al., Contrastive Decoding, arXiv:2210.15097 (the constraint)"
    speculative = True

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        return lambda input_ids, logits: cut(logits, logits, self.alpha)
