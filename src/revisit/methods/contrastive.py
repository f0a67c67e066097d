"""What the contrastive methods share: their plausibility cut, and how a combination of two branches becomes a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from revisit.decoding.method import Method, Refine

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.contrast.branch import Branch
    from revisit.decoding.run import Run

    Combine = Callable[[Tensor, Tensor, int], Tensor]  # (logits, contrast logits, step from 0), all (rows, V) -> scores


def cut(scores: Tensor, logits: Tensor, beta: float) -> Tensor:
    """The scores, -inf where the model's own logits say p < beta · max p; beta 0 cuts nothing.  (..., V) -> (..., V)"""
    if beta == 0:
        return scores.masked_fill(logits == -math.inf, -math.inf)
    return scores.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(beta), -math.inf)


def contrast(logits: Tensor, other: Tensor, alpha: float, beta: float) -> Tensor:
    """(1 + alpha)·l − alpha·l_other where l allows it, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut((1 + alpha) * logits - alpha * other, logits, beta)


class Contrastive(Method):
    """A method that decodes with a second, contrasted run of the model.

    Args:
        mode: "stacked" runs both as one batch with one KV cache; "sequential" one after the other (a reference, and what is
            done where a model's cache cannot be stacked); "auto" stacks, except a single row on a CPU, which multiplies a
            matrix with one vector twice in less time than with two at once.
    """

    mode: Literal["auto", "stacked", "sequential"] = "auto"

    def branch(self, run: Run, inputs: dict[str, Any] | None = None) -> Branch:
        """A second run of the model next to the first; `inputs` are those of its prompt, None for the same prompt again."""
        from revisit.contrast.branch import add_branch

        alone_on_cpu = len(run.input_ids) == 1 and run.input_ids.device.type == "cpu"
        stacked = self.mode == "stacked" or (self.mode == "auto" and not alone_on_cpu)
        return add_branch(run, inputs, stacked=stacked)

    def contrasted(self, run: Run, branch: Branch, has_image: Tensor, combine: Combine) -> Refine:
        """The step of a contrastive method; rows without an image (has_image (rows,) false) decode plainly."""
        start = run.input_ids.shape[1]

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            other = branch.take().to(logits.device)  # (rows, V)
            scores = combine(logits, other, input_ids.shape[1] - start)
            scores = scores.where(has_image[:, None].to(scores.device), logits)
            return run.decode_by(input_ids, logits, scores, other, has_image)

        return refine
