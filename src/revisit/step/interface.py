"""What a step takes and gives, and which implementation takes it: for transformers and for vLLM."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from revisit.models.parts import Projection
from revisit.step.rule import Rule

if TYPE_CHECKING:
    from revisit.step.compiled.kernel import Columns
    from revisit.step.reference import Refinement

# What every implementation agrees on (see reference.py).
RESOLUTION = 1e-6  # divergences nearer to each other than this, by their scale, are equal
SOFT_TEMPERATURE = 0.1  # of select="soft"

COLUMN_BYTES = 256 << 20  # most memory for the columns that the compiled step keeps of all items of a run

# A tensor of the host, because a Python number would first be written to the device by a kernel of its own.
INFINITY = torch.tensor(math.inf)


@dataclass
class Item:
    """The vision states of one image prompt, without padding, and what the compiled step keeps of them."""

    states: Tensor  # (n, d)
    column_bytes: int  # memory that the compiled step may use for it
    columns: Columns | None = None


class RowStates(Protocol):
    """The vision states of all rows of a step."""

    @property
    def counts(self) -> Sequence[int]:
        """How many blocks each row has; 0 without an image."""

    def item(self, row: int) -> Item:
        """The states of one row."""

    def blocks(self, rows: Sequence[int] | None = None) -> StateBlocks:
        """The states of all rows, or of the given ones, as blocks on the device."""


class PaddedStates:
    """Row states from one padded tensor, as transformers decodes: consecutive rows are copies of an item (beams).

    Args:
        states: (items, n, d). Padding becomes NaN, in place.
        mask: (items, n), False for padding.
        copies: How many rows share an item.
    """

    def __init__(self, states: Tensor, mask: Tensor, copies: int = 1) -> None:
        self.states, self.mask, self.copies = states, mask, copies
        self.counts = [1] * (len(states) * copies)

    @classmethod
    def of_items(cls, items: Sequence[Tensor], copies: int = 1) -> PaddedStates:
        """From the (n, d) states of each item; n may differ, and be 0 for an item without an image."""
        longest = max(1, *(len(item) for item in items))
        states = items[0].new_zeros(len(items), longest, items[0].shape[-1])
        mask = torch.zeros(states.shape[:2], dtype=torch.bool)
        for number, item in enumerate(items):
            states[number, : len(item)] = item
            mask[number, : len(item)] = True
        return cls(states, mask.to(states.device), copies)

    @functools.cached_property
    def _items(self) -> list[Item]:
        full = self.mask.all(-1).tolist()
        own = [item if whole else item[real] for item, real, whole in zip(self.states, self.mask, full, strict=True)]
        return [Item(states, COLUMN_BYTES // len(own)) for states in own]

    @functools.cached_property
    def _blocks(self) -> StateBlocks:
        states = self.states.float() if self.states.is_cpu else self.states  # half precision is slow on CPUs
        return StateBlocks.padded(states, self.mask, self.copies)

    def item(self, row: int) -> Item:
        return self._items[row // self.copies]

    def blocks(self, rows: Sequence[int] | None = None) -> StateBlocks:
        return self._blocks if rows is None else self._blocks.of_rows(rows)


@dataclass(frozen=True)
class StateBlocks:
    """The vision states of a batch: G blocks of S states, each looked at by c rows (sequences) of the batch.

    Padded blocks (`table` None) belong to c consecutive rows each; pooled blocks to one row, which may own several.
    """

    states: Tensor  # (G, S, d)
    real: Tensor | None  # (G, S) False for padding; None where there is none
    rows: Tensor  # (G, c) the rows that look at a block; any row where nobody does
    table: Tensor | None = None  # (B, M) the blocks of each row in order, -1 behind the last
    seen: Tensor | None = None  # (B,) whether a row has vision states; None where all rows have

    @classmethod
    def padded(cls, states: Tensor, mask: Tensor, copies: int = 1) -> StateBlocks:
        """One block an item, shared by consecutive rows that are its copies (beams, return sequences).

        Padding becomes NaN, in place, and so is never selected: that is free, and a mask would be read in every step.
        """
        rows = torch.arange(len(states) * copies, device=states.device).view(-1, copies)
        if bool(mask.all()):
            return cls(states, None, rows)
        states.masked_fill_(~mask[..., None], math.nan)
        return cls(states, mask, rows, None, mask.any(-1)[:, None].expand_as(rows).flatten())

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

    @property
    def mask(self) -> Tensor | None:
        """Which states may be selected (G, S); None where the rest is NaN, or nothing."""
        return None if self.table is None else self.real

    def of_rows(self, rows: Sequence[int]) -> StateBlocks:
        """Some rows of padded blocks, each with a block of its own."""
        index = to_device(np.array(rows), self.states.device)
        items = index // self.rows.shape[1]
        real, seen = (
            (None if self.real is None else self.real[items]),
            (None if self.seen is None else self.seen[index]),
        )
        return StateBlocks(self.states[items], real, torch.arange(len(rows), device=index.device)[:, None], None, seen)

    def by_block(self, values: Tensor) -> Tensor:
        """Values of rows, for the rows that look at each block.  (B, K) -> (G, c, K), (B,) -> (G, c, 1)"""
        wide = values.view(len(values), -1)
        return wide.view(*self.rows.shape, -1) if self.table is None else wide[self.rows]

    def by_row(self, values: Tensor) -> Tensor:
        """Values of the states that each row looks at; inf where it has fewer.  (G, S, c) -> (B, M · S)"""
        if self.table is None:
            return values.mT.flatten(0, 1)
        return torch.where(self.table[..., None] < 0, INFINITY, values[..., 0][self.table]).flatten(1)

    def real_by_row(self) -> Tensor:
        """Which numbers of `by_row` are states and not padding.  -> (B, M · S)"""
        real = torch.ones_like(self.states[..., 0]) if self.real is None else self.real.float()
        return self.by_row(real[..., None].expand(-1, -1, self.rows.shape[1])) == 1

    def pick(self, values: Tensor, index: Tensor) -> Tensor:
        """The values of some states of each row, by their number in `by_row`.  (G, S, c, K), (B, n) -> (B, n, K)"""
        if self.table is None:
            number = index.view(*self.rows.shape, -1, 1).expand(-1, -1, -1, values.shape[-1])
            return values.transpose(1, 2).gather(2, number).flatten(0, 1)
        size = self.states.shape[1]
        return values[:, :, 0][self.table.gather(1, index // size), index % size]


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Numbers on their way to the device; the host does not wait for them."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)


class Refined(NamedTuple):
    """What a step gives; everything stays on the device."""

    scores: Tensor  # (B, V), -inf outside the plausible set; the logits themselves where a row is left as it is
    sizes: Tensor  # (B,) plausible tokens; 0 where the logits are not a distribution or the row has ended
    applied: Tensor  # (B,) whether a vision token was used
    changed: Tensor  # (B,) whether the likeliest token was not the likeliest before
    states: Tensor  # (B,) the selected vision state, where one was used
    weights: Tensor | float  # (B,) weight of the vision side, where one was used
    seen: Tensor | None = None  # (B,) whether a row has vision states; None where all rows have
    refinements: tuple[Refinement | None, ...] = ()  # of each row, where the step is recorded


class Step(Protocol):
    """Takes steps with one head and one set of settings."""

    def take(
        self, logits: Tensor, states: RowStates, uniform: float | Tensor = 0.0, ended: Tensor | None = None
    ) -> Refined:
        """One step of all rows.

        Args:
            logits: (B, V).
            states: The vision states of the rows.
            uniform: The draw of select="random", one number or (B, 1).
            ended: (B,) rows that have ended, which may be left as they are.
        """


def choose(
    head: Projection, rule: Rule, device: torch.device, *, room: int | None = None, record: bool = False
) -> Step:
    """What takes the steps with these settings.

    The full vocabulary, and on a CPU the rounding of the released code, are taken by the reference, row by row: a batch
    gains nothing there, and the result is right to the last bit. The usual step on a CPU is taken by compiled code,
    where it was built, and everything else by the whole batch at once in torch.

    Args:
        head: The LM head.
        rule: The settings.
        device: Where the states are.
        room: Blocks times candidates that the batched step may compare together; see `batched.room_for`.
        record: Whether `Refined.refinements` is filled in.
    """
    from revisit.step.batched import BatchedStep  # here, because the implementations import what this file declares
    from revisit.step.compiled import kernel
    from revisit.step.reference import ReferenceStep

    on_cpu = device.type == "cpu"
    if rule.full_vocabulary or (rule.model_dtype and on_cpu):
        return ReferenceStep(head, rule)
    if on_cpu and kernel.suits(head, rule):
        return kernel.CompiledStep(head, rule, record)
    return BatchedStep(head, rule, room, record)
