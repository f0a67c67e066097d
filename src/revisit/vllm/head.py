"""The LM head as vLLM splits it: each rank has the rows of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.models.parts import LARGEST_LOGIT, NOT_A_LOGIT, multiply


@dataclass(frozen=True)
class ShardedHead:
    """Projects states over some token ids with the rows of a vocabulary-parallel head.

    Every rank looks up its own rows and leaves the others zero; the sum over ranks is exact. All ranks must use the same ids in
    the same order, which holds because vLLM gives every rank the same logits.
    """

    weight: Tensor  # (rows of this rank, d)
    bias: Tensor | None
    start: int  # first token id of this rank
    stop: int  # one past its last
    sum_over_ranks: Callable[[Tensor], Tensor] | None  # None on a single rank
    soft_cap: float | None = None
    scale: float = 1.0

    @property
    def plain_weight(self) -> Tensor | None:
        more = (self.bias, self.sum_over_ranks, self.soft_cap)
        return self.weight if all(x is None for x in more) and self.scale == 1.0 else None

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """Project states as the model would.  (..., n, d), (..., k) -> (..., n, k)"""
        rows = self._rows(self.weight, ids)  # (..., k, d)
        raw = states.to(rows.dtype) @ rows.mT if model_dtype else multiply(states, rows)
        if self.bias is not None:
            raw = raw + self._rows(self.bias, ids).unsqueeze(-2).to(raw.dtype)
        if self.soft_cap is not None:  # which must not hide an overflow
            raw = torch.where(raw.abs() < LARGEST_LOGIT, torch.tanh(raw / self.soft_cap) * self.soft_cap, NOT_A_LOGIT)
        return raw * self.scale if self.scale != 1.0 else raw

    def _rows(self, values: Tensor, ids: Tensor) -> Tensor:
        """Gather the rows of token ids from all ranks.  (rows of this rank, ...), (..., k) -> (..., k, ...)"""
        if self.sum_over_ranks is None:
            return values[ids]
        mine = (ids >= self.start) & (ids < self.stop)
        found = values[torch.where(mine, ids - self.start, 0)]
        return self.sum_over_ranks(found.masked_fill(~mine.view(*mine.shape, *[1] * (found.ndim - mine.ndim)), 0))
