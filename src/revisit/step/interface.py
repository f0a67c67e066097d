"""The interface of ReVisiT's step: its input, its output, and the vision states of a batch.

Implementations (`Step`) read the vision states (`RowStates`) in one of three forms: the reference and the compiled step read
the states of one row at a time (`ItemStates`), torch reads blocks that rows share (`StateBlocks`), and Triton reads blocks
through a table (`BlockTable`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from revisit.models.head import Projection, constant
from revisit.step.rule import Rule

if TYPE_CHECKING:
    from revisit.step.compiled.kernel import Columns

# Shared by all implementations (see reference.py).
RESOLUTION = 1e-6  # divergences that differ by less, relative to their scale, are equal
SOFT_TEMPERATURE = 0.1  # of select="soft"

COLUMN_BYTES = 256 << 20  # most memory for the columns that the compiled step keeps for all items of a call


class Step:
    """An implementation of the step, for one LM head and one set of settings."""

    name: str  # of the implementation

    def __init__(self, head: Projection, rule: Rule) -> None:
        self.head, self.rule = head, rule

    def take(self, inputs: StepInput) -> StepOutput:
        """Take one step of all rows."""
        raise NotImplementedError  # every implementation defines it

    def take_in_place(self, inputs: StepInput, rows: Tensor | None, gap: float) -> StepOutput:
        """Replace some rows of the logits by their scores.

        Args:
            inputs: The input of the step, except that its logits (·, V) may have further rows.
            rows: (B,) the rows of the logits that the step computes; None for all.
            gap: How far below its logit the score of a token outside the plausible set is.
        """
        logits = inputs.logits
        chosen = logits if rows is None else logits[rows]
        output = self.take(inputs._replace(logits=chosen))
        scores = output.scores if gap == math.inf else torch.maximum(output.scores, chosen - gap)
        if rows is None:
            logits.copy_(scores)
        else:
            logits.index_copy_(0, rows, scores)
        return output

    def reserve(self, logits: Tensor, states: BlockTable) -> None:
        """Allocate the buffers that the step keeps for rows of this size; a memory profile then includes them."""


class StepInput(NamedTuple):
    """The input of a step of B rows."""

    logits: Tensor  # (B, V)
    states: RowStates  # the vision states of the rows
    uniform: float | Tensor = 0.0  # the draw of select="random", one number or (B, 1)
    ended: Tensor | None = None  # (B,) rows that have ended, which may be left unchanged
    written: Tensor | None = None  # (B, n) tokens generated so far, -1 for none; only `once` needs them


class StepOutput(NamedTuple):
    """The result of a step; everything stays on the device."""

    scores: Tensor  # (B, V), -inf outside the plausible set; the logits themselves for rows that are left unchanged
    sizes: Tensor  # (B,) plausible tokens; 0 for ended rows and logits that are not a distribution
    applied: Tensor  # (B,) whether a vision token was used
    changed: Tensor  # (B,) whether the likeliest token differs from the one before
    states: Tensor  # (B,) the selected vision state, if one was used
    weights: Tensor | float  # (B,) weight of the vision side, if one was used
    seen: Tensor | None = None  # (B,) whether a row has vision states; None if all rows have
    details: tuple[RowDetail | None, ...] = ()  # of the rows that the reference computed


class RowSummary(NamedTuple):
    """The outcome of a step for one row, without its details."""

    size: int  # plausible tokens
    applied: bool  # whether a vision token was used
    changed: bool  # whether the likeliest token differs from the one before
    state: int  # the selected vision state (the first of several), -1 if none was
    weight: float  # of the vision side


@dataclass(frozen=True)
class RowDetail:
    """The outcome of a step for one row; all vectors run over the plausible ids, in vocabulary order."""

    ids: Tensor  # (k,) token ids of the plausible set
    base: Tensor  # (k,) log P, the output distribution renormalized on the set
    vision: Tensor  # (k,) log Q of the selected vision token (or of the mixture of several)
    final: Tensor  # (k,) fused log-scores; a log-distribution unless normalization was switched off
    state: int  # the selected vision state (the first of several), -1 if none was
    divergences: Tensor | None  # (states,), NaN for those that cannot be selected; None if none was compared
    weight: float = 0.0  # of the vision side

    @property
    def size(self) -> int:
        """Number of plausible tokens."""
        return len(self.ids)

    @property
    def applied(self) -> bool:
        """Whether a vision token was used."""
        return self.state >= 0

    @property
    def changed(self) -> bool:
        """Whether the likeliest token differs from the one before."""
        return self.applied and bool(self.base[self.final.argmax()] < self.base.max())


# -- vision states --------------------------------------------------------------------------------------------------


class RowStates(Protocol):
    """The vision states of all rows of a step, in the forms that the implementations read."""

    @property
    def counts(self) -> Sequence[int]:
        """Number of blocks of each row."""

    def item(self, row: int) -> ItemStates:
        """Return the states of one row."""

    def blocks(self, rows: Sequence[int] | None = None) -> StateBlocks:
        """Return the states of these rows, by default of all, as blocks on the device."""

    @property
    def table(self) -> BlockTable:
        """The blocks of all rows."""


@dataclass
class ItemStates:
    """The vision states of one prompt without padding, and the compiled step's cache of their columns."""

    states: Tensor  # (n, d)
    column_bytes: int  # most memory for the cache
    columns: Columns | None = None


@dataclass(frozen=True)
class StateBlocks:
    """The vision states of a batch in G padded blocks of S states; c consecutive rows share a block."""

    states: Tensor  # (G, S, d)
    mask: Tensor | None  # (G, S) states that may be selected; None if padding is NaN or absent
    rows: Tensor  # (G, c) the rows that share each block
    seen: Tensor | None = None  # (B,) whether a row has vision states; None if all rows have

    def by_block(self, values: Tensor) -> Tensor:
        """Return the values of the rows that share each block.  (B, K) -> (G, c, K)"""
        return values.view(*self.rows.shape, -1)

    def by_row(self, values: Tensor) -> Tensor:
        """Return the values of each row's states, inf after the last.  (G, S, c) -> (B, M · S)"""
        return values.mT.flatten(0, 1)

    def pick(self, values: Tensor, index: Tensor) -> Tensor:
        """Return the values of some states of each row, by their index in `by_row`.  (G, S, c, K), (B, n) -> (B, n, K)"""
        number = index.view(*self.rows.shape, -1, 1).expand(-1, -1, -1, values.shape[-1])
        return values.transpose(1, 2).gather(2, number).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class PooledBlocks(StateBlocks):
    """Blocks of a pool, in any order. A row may have several; `rows` has any row where fewer than c share a block."""

    table: Tensor  # (B, M) the blocks of each row in order, then -1
    slots: Tensor  # (B,) number of each row among the c rows that share its blocks

    @classmethod
    def of_pool(
        cls, pool: Tensor, lengths: Tensor, table: Tensor, slots: Tensor | None = None, rows_per_block: int = 1
    ) -> PooledBlocks:
        """Return the blocks of a pool (G, S, d) with `lengths` (G,) states each; row b has the blocks table[b].

        The table (B, M) has block numbers in the order of the states, then -1. At most `rows_per_block` rows share their blocks, and
        row b is number slots[b] of them. The whole pool is read: pass only the part in use.
        """
        mask = torch.arange(pool.shape[1], device=pool.device) < lengths[:, None]
        slots = torch.zeros(len(table), dtype=torch.long, device=table.device) if slots is None else slots
        owner = torch.arange(len(table), device=table.device)[:, None].expand_as(table)
        place = table.remainder(len(pool) + 1) * rows_per_block + slots[:, None]  # -1 goes to the spare block
        spare = torch.zeros((len(pool) + 1) * rows_per_block, dtype=torch.long, device=pool.device)
        rows = spare.scatter(0, place.flatten(), owner.flatten()).view(-1, rows_per_block)[:-1]
        return cls(pool, mask, rows, (table >= 0).any(-1), table=table, slots=slots)

    def by_block(self, values: Tensor) -> Tensor:
        return values[self.rows]

    def by_row(self, values: Tensor) -> Tensor:
        listed = values.mT[self.table, self.slots[:, None]]  # (B, M, S)
        return torch.where(self.table[..., None] < 0, constant(math.inf, listed.device), listed).flatten(1)

    def pick(self, values: Tensor, index: Tensor) -> Tensor:
        size = self.states.shape[1]
        return values[self.table.gather(1, index // size), index % size, self.slots[:, None]]


class BlockTable(NamedTuple):
    """The blocks of one tensor that hold the vision states of each row, in any order; nothing is copied or padded."""

    states: Tensor  # (G, S, d); states that are NaN cannot be selected
    blocks: Tensor  # (B, M) int32: the blocks of each row in order; numbers after the last are not read
    counts: Tensor  # (B,) int32: number of states of each row, 0 without an image
    rows_per_item: int = 1  # consecutive rows that share their blocks

    @property
    def longest(self) -> int:
        """The most states that a row can have."""
        return self.blocks.shape[1] * self.states.shape[1]


class PaddedStates:
    """Row states in one padded tensor, as in transformers: consecutive rows belong to one item (beams).

    Args:
        states: (items, n, d). Padding becomes NaN, in place, and so is never selected.
        mask: (items, n), False for padding.
        rows_per_item: Number of rows that belong to each item.
    """

    def __init__(self, states: Tensor, mask: Tensor, rows_per_item: int = 1) -> None:
        self.states, self.mask, self.rows_per_item = states, mask, rows_per_item
        self.counts = [1] * (len(states) * rows_per_item)

    @classmethod
    def of_items(cls, items: Sequence[Tensor], rows_per_item: int = 1) -> PaddedStates:
        """Pad the (n, d) states of each item; n may differ, and is 0 for an item without an image."""
        longest = max(1, *(len(item) for item in items))
        states = items[0].new_zeros(len(items), longest, items[0].shape[-1])
        mask = torch.zeros(states.shape[:2], dtype=torch.bool)
        for number, item in enumerate(items):
            states[number, : len(item)] = item
            mask[number, : len(item)] = True
        return cls(states, mask.to(states.device), rows_per_item)

    @functools.cached_property
    def _items(self) -> list[ItemStates]:
        full = self.mask.all(-1).tolist()
        items = [item if whole else item[real] for item, real, whole in zip(self.states, self.mask, full, strict=True)]
        return [ItemStates(states, COLUMN_BYTES // len(items)) for states in items]

    @functools.cached_property
    def _blocks(self) -> StateBlocks:
        states = self.states.float() if self.states.is_cpu else self.states  # half precision is slow on CPUs
        rows = torch.arange(len(states) * self.rows_per_item, device=states.device).view(-1, self.rows_per_item)
        if bool(self.mask.all()):
            return StateBlocks(states, None, rows)
        states.masked_fill_(~self.mask[..., None], math.nan)  # a mask would have to be read in every step
        return StateBlocks(states, None, rows, seen=self.mask.any(-1).repeat_interleave(self.rows_per_item))

    @functools.cached_property
    def table(self) -> BlockTable:
        self.states.masked_fill_(~self.mask[..., None], math.nan)
        places = torch.arange(1, self.mask.shape[1] + 1, device=self.mask.device)
        counts = torch.where(self.mask, places, 0).amax(-1)  # (items,)
        items = torch.arange(len(self.states), device=self.mask.device)
        blocks, counts = (values.repeat_interleave(self.rows_per_item).int() for values in (items, counts))
        return BlockTable(self.states.contiguous(), blocks[:, None], counts, self.rows_per_item)

    def item(self, row: int) -> ItemStates:
        return self._items[row // self.rows_per_item]

    def blocks(self, rows: Sequence[int] | None = None) -> StateBlocks:
        if rows is None:
            return self._blocks
        index = to_device(np.array(rows), self.states.device)
        own = torch.arange(len(rows), device=index.device)[:, None]  # each row has a block of its own
        seen = None if self._blocks.seen is None else self._blocks.seen[index]
        return StateBlocks(self._blocks.states[index // self.rows_per_item], None, own, seen)


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type == "cpu":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)
