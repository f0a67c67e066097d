"""The base class of methods that contrast the model with a second run of itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from revisit.decoding.method import Method, StepFunction
from revisit.decoding.run import Run
from revisit.forward.branch import Branch, add_branch
from revisit.step.reference import plausible

# (logits (rows, V), contrasted logits (rows, V), number of the step from 0) -> scores (rows, V)
Combine = Callable[[Tensor, Tensor, int], Tensor]


def cut(scores: Tensor, logits: Tensor, beta: float) -> Tensor:
    """Set scores to -inf outside the plausible set of the model's own logits.  (..., V), (..., V) -> (..., V)"""
    return scores.masked_fill(~plausible(logits, beta), -math.inf)


def contrast(logits: Tensor, other: Tensor, alpha: float, beta: float) -> Tensor:
    """Return (1 + alpha)·l − alpha·l_other on the plausible set of l, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    return cut((1 + alpha) * logits - alpha * other, logits, beta)


class Contrastive(Method):
    """A method that decodes with a second, contrasted run of the model.

    Args:
        mode: "stacked" runs both as one batch with one KV cache; "sequential" runs one after the other, as is done for models
            whose caches cannot be stacked; "auto" stacks, except for a single row on a CPU, where two products of a matrix
            with one vector are faster than one with two.
    """

    mode: Literal["auto", "stacked", "sequential"] = "auto"

    def branch(self, run: Run, inputs: dict[str, Any] | None = None) -> Branch:
        """Add a second run of the model, for the inputs of another prompt; None for the same prompt again."""
        alone_on_cpu = len(run.input_ids) == 1 and run.input_ids.device.type == "cpu"
        stacked = self.mode == "stacked" or (self.mode == "auto" and not alone_on_cpu)
        return add_branch(run, inputs, stacked=stacked)

    def contrasted(self, run: Run, branch: Branch, has_image: Tensor, combine: Combine) -> StepFunction:
        """Return the step of a contrastive method; rows without an image (has_image (rows,) is false) are decoded plainly."""
        start = run.input_ids.shape[1]

        def step(input_ids: Tensor, logits: Tensor) -> Tensor:
            other = branch.take().to(logits.device)  # (rows, V)
            scores = combine(logits, other, input_ids.shape[1] - start)
            return run.decode_by(input_ids, logits, scores, other, has_image)

        return step
