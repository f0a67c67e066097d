"""The vision states of all opted-in requests of one worker, in a pool of fixed size.

The pool is one tensor (blocks, states of a block, d), allocated with the model to be part of vLLM's memory profile. The states
of a request are numbered layer by layer (state j·N + i is vision token i at the j-th of its layers) and fill its blocks in that
order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.step.interface import RowStates


class Pool:
    """Blocks of vision states, which requests take and free."""

    def __init__(self, blocks: int, size: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.states = torch.empty(blocks, size, width, dtype=dtype, device=device)
        self._free = list(range(blocks))  # a heap: taking the lowest numbers keeps the front dense

    @property
    def used(self) -> int:
        """The number of blocks that are taken."""
        return len(self.states) - len(self._free)

    def take(self, count: int) -> np.ndarray:
        """Take `count` free blocks and return their numbers, ascending.  -> (count,)"""
        if count > len(self._free):
            raise RevisitError(
                f"The pool of vision states has {len(self._free)} free blocks of {len(self.states)}, and a request needs {count}."
            )
        return np.array([heapq.heappop(self._free) for _ in range(count)], dtype=np.int64)

    def free(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Free blocks that were taken."""
        for number in map(int, numbers):
            heapq.heappush(self._free, number)

    def index(self, blocks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the index in the whole pool of states with these numbers in a request's blocks.  (M,), (m,) -> (m,)"""
        size = self.states.shape[1]
        index: np.ndarray = blocks[numbers // size] * size + numbers % size
        return index

    def write(self, index: Tensor, states: Tensor) -> None:
        """Store states by index.  (m,), (m, d)"""
        self.states.flatten(0, 1).index_copy_(0, index, states.to(self.states.dtype))

    def rows(self, owned: Sequence[np.ndarray], counts: Sequence[int]) -> RowStates:
        """Return the states of some rows: row r has the blocks `owned[r]`, with `counts[r]` states in them."""
        table = np.zeros((len(owned), max(1, *map(len, owned))), np.int64)
        for row, numbers in enumerate(owned):
            table[row, : len(numbers)] = numbers
        return RowStates(self.states, table, np.array(counts, np.int64))
