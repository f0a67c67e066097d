"""One step of the rows that share settings: all of them at once, with room for the candidates that most of them need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from revisit.integrations.vllm.pool import to_device
from revisit.models.head import Projection
from revisit.step.batched import Candidates, find_candidates, finish
from revisit.step.rule import Rule
from revisit.step.run import CAPACITIES, HostCopy
from revisit.step.states import StateBlocks

NUMBERS = 1 << 28  # of the LM head, copied at a time for the candidates of all blocks
USUAL = 128  # candidates for which a full pool is looked at at once
LARGE = 512  # rows with larger sets are not expected again,
FEW = 16  # unless they are more than one in so many


class SharedStep:
    """Takes the steps of a changing set of rows with the same settings.

    Room for candidates follows the sizes of the last step's plausible sets, of which the host learns by a copy that is
    sent early and waited for once. The few rows with larger sets are taken again, with more room and not too many at a
    time, so that a flat distribution makes nobody else's step larger and memory is bounded.
    """

    def __init__(self, head: Projection, rule: Rule, room: int) -> None:
        self.head, self.rule = head, rule
        self.room = room  # blocks times candidates that are looked at together
        self.expected = 0.0  # candidates that most rows will have, by the last step

    def __call__(
        self,
        logits: Tensor,
        blocks: Sequence[int],
        view: Callable[[Sequence[int]], StateBlocks],
        uniform: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores (B, V), and how many rows used a vision token and changed their likeliest token (2,).

        blocks: how many each row has; view: those of some rows; uniform: the draws (B, 1) of select="random".
        """
        every = range(len(logits))
        vocabulary, capacity = logits.shape[-1], fitting(self.expected, self.room // max(1, sum(blocks)))
        candidates = find_candidates(logits, self.rule, capacity)
        copied = HostCopy(candidates.sizes)
        scores, facts = self._take(logits, candidates, view(every), uniform)
        sizes: list[int] = copied.read()
        larger_ones = [c for c in CAPACITIES if c > capacity][1::2]  # few, each of which is a step of its own
        for small, large in pairwise([capacity, *larger_ones, vocabulary]):
            larger = [row for row in every if small < sizes[row] <= large]
            for part in split(larger, blocks, self.room // large):
                index = to_device(np.array(part), logits.device)
                draws = None if uniform is None else uniform[index]
                some = find_candidates(logits[index], self.rule, large)
                scores[index], facts[index] = self._take(logits[index], some, view(part), draws)
        self.expected = max(1.5 * usual_size(sizes), 0.9 * self.expected)
        return scores, facts.sum(0)

    def _take(
        self, logits: Tensor, some: Candidates, blocks: StateBlocks, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scores (B, V), and whether each row used a vision token and changed (B, 2)."""
        step = finish(logits, some, blocks, self.head, self.rule, 0.0 if uniform is None else uniform)
        return step.scores, torch.stack([step.applied, step.changed], 1)


def room(blocks: int, width: int) -> int:
    """Blocks times candidates that may be looked at together, for a pool of so many blocks of states of this width."""
    return max(blocks * USUAL, NUMBERS // width)


def usual_size(sizes: Sequence[int]) -> int:
    """The size of the largest plausible set, or of the largest but a few where those are very large."""
    ordered = sorted(sizes, reverse=True)
    return ordered[0] if ordered[0] <= LARGE else ordered[len(ordered) // FEW]


def fitting(expected: float, most: int) -> int:
    """The smallest capacity above what is expected, and not above `most`."""
    allowed = [capacity for capacity in CAPACITIES if capacity <= most] or CAPACITIES[:1]
    return next((capacity for capacity in allowed if capacity > expected), allowed[-1])


def split(rows: Sequence[int], blocks: Sequence[int], most: int) -> Iterator[list[int]]:
    """Consecutive rows with at most so many blocks together; a row with more than that is alone."""
    part: list[int] = []
    for row in rows:
        if part and sum(blocks[other] for other in part) + blocks[row] > most:
            yield part
            part = []
        part.append(row)
    if part:
        yield part
