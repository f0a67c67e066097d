"""The base class of methods that contrast the model with a second forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from revisit.decoding.method import Method, Step, StepResult
from revisit.forward.contrast import Contrast
from revisit.forward.prompt import Prompt
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
    """A method that decodes with a second, contrasted pass of the model.

    Args:
        mode: "stacked" runs both passes as one batch with one KV cache; "sequential" runs one after the other, as is done for models
            whose caches cannot be stacked; "auto" stacks, except for a single row on a CPU, where two products of a matrix
            with one vector are faster than one with two.
    """

    mode: Literal["auto", "stacked", "sequential"] = "auto"

    def contrasted(self, prompt: Prompt, other: Contrast, combine: Combine) -> Step:
        """Return the step that combines the logits with those of another pass, in rows with an image."""

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            contrasted = other.take().to(logits.device)  # (rows, V)
            scores = combine(logits, contrasted, input_ids.shape[1] - prompt.ids.shape[1])
            return StepResult(scores, contrasted, prompt.has_image)

        return step
