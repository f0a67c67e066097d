"""The LM head as vLLM splits it: each rank has the rows of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.models.head import LinearHead


@dataclass(frozen=True)
class ShardedHead(LinearHead):
    """The rows of a vocabulary-parallel head that this rank has.

    Every rank looks up its own rows and leaves the others zero; the sum over ranks is exact. All ranks must use the same ids in
    the same order, which holds because vLLM gives every rank the same logits.
    """

    start: int = 0  # first token id of this rank
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None  # None on a single rank
    total: int = 0  # token ids of all ranks

    @property
    def local(self) -> bool:
        return self.sum_over_ranks is None

    @property
    def vocabulary(self) -> int:
        return self.total or len(self.weight)

    def all_logits(self, states: Tensor) -> Tensor:
        mine = super().all_logits(states)
        if self.sum_over_ranks is None:
            return mine
        whole = mine.new_zeros(len(mine), self.vocabulary)
        whole[:, self.start : self.start + mine.shape[1]] = mine
        return self.sum_over_ranks(whole)

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        return True  # vLLM's memory profile leaves no room for logits of the whole vocabulary

    def rows(self, values: Tensor, ids: Tensor) -> Tensor:
        """Gather the rows of token ids from all ranks.  (rows of this rank, ...), (..., k) -> (..., k, ...)"""
        if self.sum_over_ranks is None:
            return values[ids]
        mine = (ids >= self.start) & (ids < self.start + len(values))
        found = values[torch.where(mine, ids - self.start, 0)]
        return self.sum_over_ranks(found.masked_fill(~mine.view(*mine.shape, *[1] * (found.ndim - mine.ndim)), 0))
