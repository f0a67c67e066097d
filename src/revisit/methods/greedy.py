"""Plain decoding: the model's own distribution, with the counters that every method has."""

from __future__ import annotations

from torch import Tensor

from revisit.decoding.method import Method, StepFunction
from revisit.decoding.run import Run


class Greedy(Method):
    """Decode plainly: greedy, sampling or beams, by the generation settings."""

    name = "greedy"
    summary = "the model's own distribution, unchanged"
    cost = "1×"
    source = "—"
    speculative = True

    def begin(self, run: Run) -> StepFunction:
        def step(input_ids: Tensor, logits: Tensor) -> Tensor:
            run.recorder.note_plain(input_ids, logits)
            return logits

        return step
