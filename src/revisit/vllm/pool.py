"""The vision states of all opted-in requests of one worker, in a pool of fixed size.

The pool is one tensor (blocks, states of a block, d), allocated with the model to be part of vLLM's memory profile. The states
of a request are numbered layer by layer (state j·N + i is vision token i at the j-th of its layers) and fill its blocks in that
order. A step reads the front of the pool in place, without copies or padding.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.step.interface import BlockTable, PooledBlocks, to_device


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

    def read(self, blocks: np.ndarray, count: int) -> Tensor:
        """Return the states in a request's blocks; a copy unless they are contiguous.  (M,) -> (count, d)"""
        states, index = self.states.flatten(0, 1), self.index(blocks, np.arange(count))
        if count and np.all(np.diff(index) == 1):
            return states[index[0] : index[-1] + 1]
        return states[to_device(index, states.device)]

    def table(self, owned: Sequence[np.ndarray], counts: Sequence[int]) -> BlockTable:
        """Return the blocks of some rows: row r has the blocks `owned[r]`, with `counts[r]` states in them."""
        device = self.states.device
        blocks = to_device(_padded(owned, 0).astype(np.int32), device)
        return BlockTable(self.states, blocks, to_device(np.array(counts, np.int32), device))

    def view(self, owned: Sequence[np.ndarray], counts: Sequence[int]) -> PooledBlocks:
        """Return the blocks of some rows, like `table`, for the torch step; two rows share all of their blocks or none.

        Blocks are read in place if they make up at least half of the front of the pool, and copied otherwise.
        """
        size, device = self.states.shape[1], self.states.device
        every = np.unique(np.concatenate([*owned, np.empty(0, np.int64)]))
        front = int(max(every, default=0)) + 1
        table = _padded(owned, -1)
        lengths, slots = np.zeros(front, np.int64), np.zeros(len(owned), np.int64)
        shares: Counter[int] = Counter()
        for row, (numbers, count) in enumerate(zip(owned, counts, strict=True)):
            lengths[numbers] = size
            lengths[numbers[-1:]] = count - size * (len(numbers) - 1)
            for first in numbers[:1]:
                slots[row] = shares[first]
                shares[first] += 1
        pool = self.states[:front]
        if 2 * len(every) < front:
            moved = np.full(front + 1, -1)  # -1 means no block
            moved[every] = np.arange(len(every))
            pool, lengths, table = self.states[to_device(every, device)], lengths[every], moved[table]
        lengths_there, table_there, slots_there = (to_device(values, device) for values in (lengths, table, slots))
        return PooledBlocks.of_pool(pool, lengths_there, table_there, slots_there, max(shares.values(), default=1))


def _padded(owned: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """Return the blocks of some rows as one array, each row padded with `filler`.  -> (rows, most)"""
    table = np.full((len(owned), max(1, *map(len, owned))), filler)
    for row, numbers in enumerate(owned):
        table[row, : len(numbers)] = numbers
    return table
