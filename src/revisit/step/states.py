"""The vision states of a batch as blocks on the device, padded or in a pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.step.divergence import INFINITY


@dataclass(frozen=True)
class StateBlocks:
    """The vision states of a batch: G blocks of S states, each looked at by c rows (sequences) of the batch.

    Padded blocks (`table` None) belong to c consecutive rows each; pooled blocks to one row, which may own several.
    """

    states: Tensor  # (G, S, d)
    mask: Tensor | None  # (G, S) False behind the last state of a row; None where padding is NaN
    rows: Tensor  # (G, c) the rows that look at a block; any row where nobody does
    table: Tensor | None = None  # (B, M) the blocks of each row in order, -1 behind the last
    seen: Tensor | None = None  # (B,) whether a row has vision states; None where all rows have

    @classmethod
    def padded(cls, states: Tensor, mask: Tensor, copies: int = 1) -> StateBlocks:
        """One block an item, shared by consecutive rows that are its copies (beams, return sequences).

        Padding becomes NaN, in place, and so is never selected: that is free, and a mask would be looked at in every step.
        """
        rows = torch.arange(len(states) * copies, device=states.device).view(-1, copies)
        if bool(mask.all()):
            return cls(states, None, rows)
        states.masked_fill_(~mask[..., None], math.nan)
        return cls(states, None, rows, None, mask.any(-1)[:, None].expand_as(rows).flatten())

    @classmethod
    def of_items(cls, items: Sequence[Tensor], copies: int = 1) -> StateBlocks:
        """From the (n, d) states of each item; n may differ, and be 0 for an item without an image."""
        longest = max(1, *(len(item) for item in items))
        states = items[0].new_zeros(len(items), longest, items[0].shape[-1])
        mask = torch.zeros(states.shape[:2], dtype=torch.bool)
        for number, item in enumerate(items):
            states[number, : len(item)] = item
            mask[number, : len(item)] = True
        return cls.padded(states, mask.to(states.device), copies)

    @classmethod
    def pooled(cls, pool: Tensor, lengths: Tensor, table: Tensor) -> StateBlocks:
        """From a pool of blocks (G, S, d) of which the first `lengths` (G,) states count; row b owns the blocks table[b].

        The table (B, M) holds block numbers in the order of the states, -1 behind the last. All of the pool is read: pass
        the part of it that is in use.
        """
        mask = torch.arange(pool.shape[1], device=pool.device) < lengths[:, None]
        owner = torch.arange(len(table), device=table.device)[:, None].expand_as(table)
        spare = torch.zeros(len(pool) + 1, dtype=torch.long, device=pool.device)  # -1 lands behind the last block
        rows = spare.scatter(0, table.remainder(len(pool) + 1).flatten(), owner.flatten())[:-1, None]
        return cls(pool, mask, rows, table, (table >= 0).any(-1))

    def by_block(self, values: Tensor) -> Tensor:
        """Values of rows, for the rows that look at each block.  (B, K) -> (G, c, K), (B,) -> (G, c, 1)"""
        wide = values.view(len(values), -1)
        return wide.view(*self.rows.shape, -1) if self.table is None else wide[self.rows]

    def by_row(self, values: Tensor) -> Tensor:
        """Values of the states that each row looks at; inf where it has fewer.  (G, S, c) -> (B, M · S)"""
        if self.table is None:
            return values.mT.flatten(0, 1)
        return torch.where(self.table[..., None] < 0, INFINITY, values[..., 0][self.table]).flatten(1)

    def pick(self, values: Tensor, index: Tensor) -> Tensor:
        """The values of some states of each row, by their number in `by_row`.  (G, S, c, K), (B, n) -> (B, n, K)"""
        if self.table is None:
            number = index.view(*self.rows.shape, -1, 1).expand(-1, -1, -1, values.shape[-1])
            return values.transpose(1, 2).gather(2, number).flatten(0, 1)
        size = self.states.shape[1]
        return values[:, :, 0][self.table.gather(1, index // size), index % size]
