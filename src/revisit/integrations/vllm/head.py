"""The LM head as vLLM splits it: each rank holds the rows of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class ShardedHead:
    """Scores states over a few token ids with the rows of a vocabulary-parallel head.

    Every rank computes the columns it owns and leaves the others zero; the sum over ranks is the whole. All ranks must
    ask for the same ids in the same order, which they do, because vLLM gives every rank the same full logits.
    """

    weight: Tensor | None  # (rows of this rank, d), None if it cannot be indexed (quantised)
    bias: Tensor | None
    start: int  # first token id of this rank
    stop: int  # one past its last
    sum_over_ranks: Callable[[Tensor], Tensor] | None  # None on a single rank
    full: Callable[[Tensor], Tensor]  # states -> final logits over the whole vocabulary, the way the model does it
    soft_cap: float | None = None
    scale: float = 1.0

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """Logits as the model itself would give them.  (n, d), (k,) -> (n, k)"""
        if self.weight is None:
            return self.full(states)[:, ids]
        mine, local = None, ids
        if self.sum_over_ranks is not None:
            mine = (ids >= self.start) & (ids < self.stop)
            local = torch.where(mine, ids - self.start, 0)
        rows = self.weight[local]  # (k, d)
        bias = None if self.bias is None else self.bias[local]
        wide = rows.dtype if model_dtype else torch.promote_types(rows.dtype, torch.float32)
        raw = nn.functional.linear(states.to(wide), rows.to(wide), None if bias is None else bias.to(wide))
        if self.sum_over_ranks is not None and mine is not None:
            raw = self.sum_over_ranks(torch.where(mine, raw, 0))
        if self.soft_cap is not None:
            raw = torch.tanh(raw / self.soft_cap) * self.soft_cap
        return raw * self.scale if self.scale != 1.0 else raw


class Rows:
    """A matrix of vision states as an `engine.Indexable`."""

    def __init__(self, matrix: Tensor, head: ShardedHead, model_dtype: bool) -> None:
        self.matrix, self.head, self.model_dtype = matrix, head, model_dtype

    @property
    def rows(self) -> int:
        return len(self.matrix)

    def logits(self, start: int, stop: int, ids: Tensor) -> Tensor:
        return self.head.logits(self.matrix[start:stop], ids, self.model_dtype)

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        return self.head.logits(self.matrix[rows], ids, self.model_dtype)

    def factors(self) -> tuple[Tensor, Tensor] | None:
        head, weight = self.head, self.head.weight
        more = (head.bias, head.sum_over_ranks, head.soft_cap)
        if weight is None or any(x is not None for x in more) or head.scale != 1.0 or self.model_dtype:
            return None
        return self.matrix, weight
