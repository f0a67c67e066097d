"""A control: the adaptive plausibility constraint that most methods apply, and nothing else.

Tokens with p < alpha · max p are dropped, and the rest keep their logits. Greedy decoding is unchanged; under sampling, the
control shows how much of a method's gain comes from its constraint.
"""

from __future__ import annotations

from torch import Tensor

from revisit.decoding.contrastive import cut
from revisit.decoding.method import Method, StepFunction
from revisit.decoding.run import Run
from revisit.registry import PositiveShare


class PlausibleOnly(Method):
    """Keep plausible tokens, and change nothing else.

    Args:
        alpha: Plausibility threshold relative to the likeliest token. The contrastive methods use 0.1, ReVisiT 1e-5.
    """

    alpha: PositiveShare = 0.1

    name = "plausible-only"
    summary = "a control: only the plausibility constraint of the other methods"
    cost = "1 forward"
    source = "Li et al., Contrastive Decoding, arXiv:2210.15097 (the constraint)"
    speculative = True

    def begin(self, run: Run) -> StepFunction:
        run.find_vision_tokens(required=False)

        def step(input_ids: Tensor, logits: Tensor) -> Tensor:
            return run.decode_by(input_ids, logits, cut(logits, logits, self.alpha))

        return step
