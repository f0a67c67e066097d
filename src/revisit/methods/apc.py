"""APC, a control: the plausibility constraint that most methods apply, and nothing else.

Tokens with p < alpha · max p are dropped and the rest keep their logits. Greedy decoding is unchanged by it; under
sampling it shows how much of a method's gain comes from its constraint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from revisit.decoding.method import Method, Refine
from revisit.methods.contrastive import cut
from revisit.registry import PositiveShare

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.run import Run


class APC(Method):
    """Settings of the control.

    Args:
        alpha: How unlikely a token may be, relative to the likeliest, and still be considered; 0.1 is what the contrastive
            methods use, 1e-5 what ReVisiT uses.
    """

    alpha: PositiveShare = 0.1

    name = "apc"
    summary = "a control: the plausibility constraint of the other methods, and nothing else"
    cost = "1 forward"
    source = "Li et al., Contrastive Decoding, arXiv:2210.15097 (the constraint)"

    def begin(self, run: Run) -> Refine:
        run.find_vision_tokens(required=False)

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            return run.decode_by(input_ids, logits, cut(logits, logits, self.alpha))

        return refine
