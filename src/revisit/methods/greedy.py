"""Plain decoding: the model's own distribution, with the same entry points and counters as every method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from revisit.decoding.method import Method, Refine

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.run import Run


class Greedy(Method):
    """The model as it is: greedy, or whatever the generation settings ask for."""

    name = "greedy"
    summary = "the model's own distribution, unchanged"
    cost = "1×"
    source = "—"

    def begin(self, run: Run) -> Refine:
        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            run.recorder.note_plain(input_ids, logits)
            return logits

        return refine
