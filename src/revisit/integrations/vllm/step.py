"""One step of the rows that share settings: all of them at once, with room for the candidates that most of them need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from revisit.models.head import Projection
from revisit.step.batched import CAPACITIES, HostCopy, StateBlocks, find_candidates, finish, refine
from revisit.step.rule import Rule

FEW = 16  # one row in so many may need more room than the others


class SharedStep:
    """Takes the steps of a changing set of rows with the same settings.

    Room for candidates follows the sizes of the last step's plausible sets. The few rows with larger sets, of which the host
    learns by a copy that is sent early and waited for once, are taken again alone, so that one flat distribution does not
    make everybody's step large.
    """

    def __init__(self, head: Projection, rule: Rule) -> None:
        self.head, self.rule = head, rule
        self.capacity = CAPACITIES[0]

    def __call__(
        self, logits: Tensor, blocks: StateBlocks, alone: Callable[[int], StateBlocks], uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores (B, V), and how many rows used a vision token and changed their likeliest token (2,).

        `alone(row)`: the blocks of one row; `uniform`: the draws (B, 1) of select="random".
        """
        candidates = find_candidates(logits, self.rule, self.capacity)
        sizes = HostCopy(candidates.sizes)
        step = finish(logits, candidates, blocks, self.head, self.rule, 0.0 if uniform is None else uniform)
        scores, used, changed = step.scores, step.applied, step.changed
        found = sizes.read()
        for row, size in enumerate(found):
            if self.capacity <= size < logits.shape[-1]:
                draw = 0.0 if uniform is None else uniform[row : row + 1]
                again = refine(logits[row : row + 1], alone(row), self.head, self.rule, uniform=draw)
                scores[row], used[row], changed[row] = again.scores[0], again.applied[0], again.changed[0]
        self.capacity = room_for(found, self.capacity, logits.shape[-1])
        return scores, torch.stack([used.sum(), changed.sum()])


def room_for(sizes: Sequence[int], capacity: int, vocabulary: int) -> int:
    """The capacity of the next step: what all but a few rows need, and a half more; at most one bucket less than now.

    A row that did not fit says only that it needs more than there was.
    """
    ordered = sorted(sizes, reverse=True)
    wanted = 1.5 * ordered[len(ordered) // FEW]
    fitting = next((c for c in CAPACITIES if c > wanted), CAPACITIES[-1])
    smaller = max((c for c in CAPACITIES if c < capacity), default=CAPACITIES[0])
    return min(max(fitting, smaller), max(vocabulary, CAPACITIES[0]))
