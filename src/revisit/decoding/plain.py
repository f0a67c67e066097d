"""Plain decoding: the model's own distribution, with the same entry points and counters as every method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from revisit.decoding.method import Method

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.loop import Run
    from revisit.decoding.method import Refine


@dataclass(frozen=True)
class Plain(Method):
    """The model as it is: greedy, or whatever the generation settings ask for."""

    name = "greedy"
    summary = "the model's own distribution, unchanged"
    cost = "1×"
    source = "—"

    def begin(self, run: Run) -> Refine:
        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            for row in run.active(input_ids):
                run.note_plain(row, logits[row])
            return logits

        return refine
