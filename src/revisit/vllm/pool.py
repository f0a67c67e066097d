"""The vision states of all opted-in requests of one worker, in a pool of fixed size.

The pool is one tensor (blocks, states of a block, d), allocated with the model, so that vLLM's memory profile includes it. The
states of a request are numbered layer by layer (state j·N + i is vision token i at the j-th of its layers) and fill its blocks
in that order. A step reads the front of the pool in place, without copies or padding.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.step.interface import BlockTable, StateBlocks, to_device


class Pool:
    """Blocks of vision states that requests take and give back."""

    def __init__(self, blocks: int, size: int, width: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.states = torch.empty(blocks, size, width, dtype=dtype, device=device)
        self._free = list(range(blocks))  # a heap: taking the lowest numbers keeps the front dense

    @property
    def blocks(self) -> int:
        return len(self.states)

    @property
    def size(self) -> int:
        """The number of states in a block."""
        return self.states.shape[1]

    @property
    def used(self) -> int:
        """The number of blocks that are taken."""
        return self.blocks - len(self._free)

    def take(self, count: int) -> np.ndarray:
        """Take `count` free blocks and return their numbers, ascending.  -> (count,)"""
        if count > len(self._free):
            raise RevisitError(
                f"The pool of vision states has {len(self._free)} free blocks of {self.blocks}, and a request needs {count}."
            )
        return np.array([heapq.heappop(self._free) for _ in range(count)], dtype=np.int64)

    def give_back(self, numbers: Sequence[int] | np.ndarray) -> None:
        """Free blocks that were taken."""
        for number in map(int, numbers):
            heapq.heappush(self._free, number)

    def write(self, places: Tensor, states: Tensor) -> None:
        """Store states at places (block · size + offset).  (m,), (m, d)"""
        self.states.flatten(0, 1).index_copy_(0, places, states.to(self.states.dtype))

    def read(self, places: np.ndarray) -> Tensor:
        """Return the states at places; a copy unless they are contiguous.  (m,) -> (m, d)"""
        states = self.states.flatten(0, 1)
        if len(places) and np.all(np.diff(places) == 1):
            return states[places[0] : places[-1] + 1]
        return states[to_device(places, states.device)]

    def holds(self, states: Tensor) -> bool:
        """Return whether states are a view of the pool."""
        return states.untyped_storage().data_ptr() == self.states.untyped_storage().data_ptr()

    def table(self, owned: Sequence[np.ndarray], states: Sequence[int]) -> BlockTable:
        """Return where the states of some rows are, of which each owns the blocks `owned[row]` with `states[row]` states."""
        blocks = np.zeros((len(owned), max(1, *map(len, owned))), np.int32)
        for row, numbers in enumerate(owned):
            blocks[row, : len(numbers)] = numbers
        device = self.states.device
        return BlockTable(self.states, to_device(blocks, device), to_device(np.array(states, np.int32), device))

    def view(self, owned: Sequence[np.ndarray], states: Sequence[int]) -> StateBlocks:
        """Return the blocks `owned[row]` of some rows, with `states[row]` states in them; rows share all of their blocks or none.

        Blocks are read in place if they make up at least half of the front of the pool, and copied otherwise.
        """
        device = self.states.device
        every = np.unique(np.concatenate([*owned, np.empty(0, np.int64)]))
        front = int(max(every, default=0)) + 1
        table = np.full((len(owned), max(1, *map(len, owned))), -1)
        lengths, slots = np.zeros(front, np.int64), np.zeros(len(owned), np.int64)
        shares: Counter[int] = Counter()
        for row, (numbers, count) in enumerate(zip(owned, states, strict=True)):
            table[row, : len(numbers)] = numbers
            lengths[numbers] = self.size
            lengths[numbers[-1:]] = count - self.size * (len(numbers) - 1)
            for first in numbers[:1]:
                slots[row] = shares[first]
                shares[first] += 1
        pool = self.states[:front]
        if 2 * len(every) < front:
            place = np.full(front + 1, -1)  # -1 means no block
            place[every] = np.arange(len(every))
            pool, lengths, table = self.states[to_device(every, device)], lengths[every], place[table]
        lengths_there, table_there, slots_there = (to_device(values, device) for values in (lengths, table, slots))
        return StateBlocks.pooled(pool, lengths_there, table_there, slots_there, max(shares.values(), default=1))
