"""How hidden states become logits over a few tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LARGEST_LOGIT = 1e30  # states times head beyond this overflowed, or nearly so
# On the host: a Python number would be written to the device by a kernel of its own.
NOT_A_LOGIT = torch.tensor(math.nan)


class Projection(Protocol):
    """Anything that scores states over some token ids as the model itself would."""

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """In float32 at least, or rounded like the model's own logits.  (..., n, d), (..., k) -> (..., n, k)"""

    @property
    def plain_weight(self) -> Tensor | None:
        """The (V, d) weight if logits are states times it and nothing more; else None."""


@dataclass(frozen=True)
class LinearHead:
    """A head whose rows can be gathered: a weight, perhaps a bias, perhaps an elementwise function of the logits."""

    weight: Tensor  # (V, d)
    bias: Tensor | None = None  # (V,)
    transform: Callable[[Tensor], Tensor] | None = None

    @property
    def plain_weight(self) -> Tensor | None:
        return self.weight if self.bias is None and self.transform is None else None

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        """NaN where a product is beyond the largest logit and a function such as a cap would hide that.  -> (..., n, k)"""
        if not model_dtype and ids.ndim > 1 and not self.gathers(states, ids):
            every = multiply(states.flatten(0, -2)[None], self.weight[None]).view(*states.shape[:-1], -1)  # (..., n, V)
            raw = every.gather(-1, ids.unsqueeze(-2).expand(*states.shape[:-1], -1))
        else:
            rows = self.weight[ids]  # (..., k, d)
            raw = states.to(rows.dtype) @ rows.mT if model_dtype else multiply(states, rows)
        if self.bias is not None:
            raw = raw + self.bias[ids].unsqueeze(-2).to(raw.dtype)
        if self.transform is None:
            return raw
        return torch.where(raw.abs() < LARGEST_LOGIT, self.transform(raw), NOT_A_LOGIT)

    def gathers(self, states: Tensor, ids: Tensor) -> bool:
        """Whether gathered rows move fewer bytes than logits over the whole vocabulary, as they do for all but very large sets."""
        vocabulary, width = self.weight.shape
        rows = (3 * ids.numel() - vocabulary) * width * self.weight.element_size()  # each written once and read twice
        return rows <= 4 * (vocabulary + 2 * ids.shape[-1]) * states.numel() // width


def multiply(states: Tensor, rows: Tensor) -> Tensor:
    """Products in float32 at least.  (..., n, d), (..., k, d) -> (..., n, k)

    Half-precision operands on a GPU are multiplied as they are, with float32 sums, where torch can do that.
    """
    half = states.is_cuda and states.ndim == 3 and states.dtype == rows.dtype and rows.dtype in HALF
    if half and _has_wide_products(states.device, states.dtype):
        return torch.bmm(states, rows.mT, out_dtype=torch.float32)
    wide = torch.promote_types(rows.dtype, torch.float32)
    return states.to(wide) @ rows.to(wide).mT


_WIDE_PRODUCTS: dict[tuple[torch.device, torch.dtype], bool] = {}


def _has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device multiplies half-precision matrices into float32 ones; tried once."""
    key = (device, dtype)
    if key not in _WIDE_PRODUCTS:
        one = torch.zeros(1, 8, 8, device=device, dtype=dtype)
        try:
            torch.bmm(one, one, out_dtype=torch.float32)
            _WIDE_PRODUCTS[key] = True
        except (RuntimeError, NotImplementedError, TypeError):
            _WIDE_PRODUCTS[key] = False
    return _WIDE_PRODUCTS[key]
