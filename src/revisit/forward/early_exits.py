"""Early exits: logits of intermediate layers at the last position, through the model's own head.

The states are added as further rows to the head's own product of the same step, so its weight, the largest matrix of
a small model, is read once for the final and all early logits. Products of a few rows with a large matrix are slow on CPUs,
so a copy of the weight, packed for such products, is kept there as long as the model lives.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.forward.states import Hooks, Pass, normed
from revisit.models.head import Head, has_plain_weight
from revisit.models.parts import ModelParts, describe

PACK_FROM = 1 << 24  # numbers in a head's weight above which packing pays off

# head -> (version of its weight, the packed copy)
_PACKED: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, int], Tensor]] = weakref.WeakKeyDictionary()


def packs(head: nn.Module) -> bool:
    """Return whether products with this head are faster with a packed copy of its weight."""
    weight = getattr(head, "weight", None)
    return (
        has_plain_weight(head)
        and weight is not None
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= PACK_FROM
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def packed_product(head: nn.Linear, rows: Tensor) -> Tensor:
    """Apply the head to (n, d) rows through its packed weight.  -> (n, V)"""
    weight = head.weight.detach()
    version = (weight.data_ptr(), head.weight._version)
    entry = _PACKED.get(head)
    if entry is None or entry[0] != version:
        entry = _PACKED[head] = version, torch.ops.mkldnn._reorder_linear_weight(weight, len(rows))
    bias = None if head.bias is None else head.bias.detach()
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, entry[1], bias, "none", [], "")
    return product


class EarlyExits:
    """The logits (rows, layers, V) of the chosen hidden states of a pass, for every forward that contains it."""

    def __init__(
        self, parts: ModelParts, layers: tuple[int, ...], of: Pass, stack: ExitStack, *, final_norm: bool
    ) -> None:
        self.parts, self.layers, self.of = parts, layers, of
        self.norm = parts.final_norm if final_norm else None
        self.logits: Tensor | None = None
        self._head: Head | None = None  # known from the first step on
        self._states: dict[int, Tensor] = {}  # layer -> (rows, d), of the running forward
        self._shape: torch.Size | None = None
        self._rows: Tensor | None = None  # all rows of the product, if the packed weight computes it
        self._final: Tensor | None = None  # (d,) final state of the first row, to find the transform of the logits
        states, hooks = Hooks(stack, of=of), Hooks(stack)
        for layer in layers:
            states.state(parts, layer, partial(self._keep, layer))
        hooks.before(parts.head, self._before_head, first=True)  # before the one that shards its input
        hooks.after(parts.head, self._after_head)

    def take(self, logits: Tensor, *, model_dtype: bool = False) -> Tensor:
        """Return the early logits of this step, in at least float32 or the head's dtype; `logits` (rows, V) are the model's own.

        -> (rows, layers, V)
        """
        if self.logits is None or self._final is None:
            raise RevisitError(
                f"The forward of {describe(self.parts.model)} did not pass through its layers and its LM head as modules, so its early "
                "exits were not captured; this way of running the model is not supported."
            )
        if self._head is None:
            self._head = self.parts.calibrate(self._final, logits[0])
        early, self.logits = self.logits[..., : logits.shape[-1]], None  # without the rows that pad a head
        if not model_dtype:
            early = early.to(torch.promote_types(early.dtype, torch.float32))
        return self._head.transformed(early.to(logits.device))

    def _keep(self, layer: int, hidden: Tensor) -> None:
        self._states[layer] = hidden[:, -1]

    def _before_head(self, hidden: Tensor) -> Tensor | None:
        """Append the early states to the head's rows.  (batch, positions, d) -> (n, d)"""
        if self.of.live is None or len(self._states) < len(self.layers):
            return None
        self._shape = hidden.shape
        self._final = self.of.of(hidden)[0, -1]
        states = [self._states[layer].to(hidden.device) for layer in self.layers]  # layers may be on several devices
        early = torch.stack(states, dim=1)  # (rows, layers, d)
        self._states.clear()
        if self.norm is not None:
            early = normed(self.norm, early)
        rows = torch.cat([hidden.flatten(0, -2), early.to(hidden.device, hidden.dtype).flatten(0, 1)])
        if packs(self.parts.head):
            self._rows = rows
            return rows[:0]  # `_after_head` computes the product
        return rows  # (batch·positions + rows·layers, d)

    def _after_head(self, output: Tensor) -> Tensor | None:
        if self._shape is None:
            return None
        if self._rows is not None:
            head = cast("nn.Linear", self.parts.head)
            output, self._rows = packed_product(head, self._rows), None
        count = self._shape[:-1].numel()  # of the head's own rows
        shape, self._shape = self._shape, None
        self.logits = output[count:].unflatten(0, (-1, len(self.layers)))  # (rows, layers, V)
        logits: Tensor = output[:count].unflatten(0, shape[:-1])
        return logits
