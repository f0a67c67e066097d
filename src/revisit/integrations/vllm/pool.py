"""The vision states of all opted-in requests of one worker, in a pool of fixed size.

The pool is one tensor (blocks, BLOCK, d), made with the model, so that vLLM's memory profile counts it. A request takes the
blocks it needs when it is admitted and gives them back when it ends. Its states are numbered layer by layer (state j·N + i is
vision token i at the j-th of its layers) and fill its blocks in that order.

What the batched step is given (`Blocks`): a view of the front of the pool, which is read once and never copied or padded, and
for every block the row of the logits it belongs to. A request owns one row and one or more blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from revisit.errors import RevisitError

BLOCK = 128  # states


def blocks_for(states: int) -> int:
    """How many blocks hold so many states."""
    return -(-states // BLOCK)


class Blocks(NamedTuple):
    """Vision states of some rows of the logits, in blocks of equal size."""

    states: Tensor  # (n, BLOCK, d) in the model's dtype, a view of the pool
    lengths: Tensor  # (n,) how many of a block's states count; 0 for a block of no row
    rows: Tensor  # (n,) the row of the logits that a block belongs to
    order: Tensor  # (n,) number of the block among those of its row: ties go to the first state


class PoolFull(RevisitError):
    """There are not enough free blocks."""


class Pool:
    """Blocks of vision states that requests take and give back."""

    def __init__(self, blocks: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.states = torch.empty(blocks, BLOCK, width, dtype=dtype, device=device)
        self._free = list(range(blocks))  # a heap: the lowest numbers are taken first, so that the front is dense
        self._taken: set[int] = set()

    @property
    def blocks(self) -> int:
        return len(self.states)

    @property
    def used(self) -> int:
        """How many blocks belong to requests."""
        return len(self._taken)

    def take(self, count: int) -> np.ndarray:
        """The numbers of `count` free blocks, ascending.  -> (count,)"""
        if count > len(self._free):
            raise PoolFull(
                f"{count} blocks of vision states are needed and {len(self._free)} of {self.blocks} are free."
            )
        numbers = [heapq.heappop(self._free) for _ in range(count)]
        self._taken.update(numbers)
        return np.array(numbers, dtype=np.int64)

    def give_back(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Free blocks that were taken."""
        for number in map(int, numbers):
            self._taken.remove(number)
            heapq.heappush(self._free, number)

    def write(self, places: Tensor, states: Tensor) -> None:
        """Keep states at places (block · BLOCK + offset).  (m,), (m, d)"""
        self.states.flatten(0, 1).index_copy_(0, places, states)
