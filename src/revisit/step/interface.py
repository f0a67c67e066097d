"""The interface of ReVisiT's step: its input, its output, and the vision states of a batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from revisit.models.head import LinearHead
from revisit.step.rule import Rule

# Shared by all implementations (see reference.py).
RESOLUTION = 1e-6  # divergences that differ by less, relative to their scale, are equal
SOFT_TEMPERATURE = 0.1  # of select="soft"


class Step:
    """An implementation of the step, for one LM head and one set of settings."""

    name: str  # of the implementation

    def __init__(self, head: LinearHead, rule: Rule) -> None:
        self.head, self.rule = head, rule
        self.fallback: str | None = None  # why Triton is not used on an accelerator, in a few words
        self.buffers: dict[str, Tensor] = {}  # memory between kernels; steps that never run at once may share it

    def implementation(self, inputs: StepInput) -> str:
        """Return the name of the implementation that computes a step, with the reason if Triton could have been expected."""
        return f"{self.name}: {self.fallback}" if self.fallback else self.name

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

    def reserve(self, logits: Tensor, states: RowStates) -> None:
        """Allocate as much memory as a step of this size needs, to include it in a memory profile."""


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


@dataclass(frozen=True, eq=False)
class RowStates:
    """The vision states of all rows of a step: blocks of one tensor, and a table of the blocks of each row.

    With transformers every item has one block, padded to the longest. In vLLM a request has several blocks of a pool.
    """

    states: Tensor  # (G, S, d); a state with a NaN is never selected
    table: np.ndarray  # (B, M) the blocks of each row in order; numbers after the last are not read
    lengths: np.ndarray  # (B,) number of states in the blocks of each row, 0 without an image
    rows_per_item: int = 1  # consecutive rows that have the same blocks

    @classmethod
    def of_items(cls, items: Sequence[Tensor], rows_per_item: int = 1) -> RowStates:
        """Pad the (n, d) states of each item; n may differ, and is 0 for an item without an image."""
        longest = max(1, *map(len, items))
        states = items[0].new_zeros(len(items), longest, items[0].shape[-1])
        for number, item in enumerate(items):
            states[number, : len(item)] = item
        return cls.of_blocks(states, [len(item) for item in items], rows_per_item)

    @classmethod
    def of_blocks(cls, states: Tensor, lengths: Sequence[int], rows_per_item: int = 1) -> RowStates:
        """Return the states of items that have one block (S, d) each, of which the first `lengths` are theirs."""
        table = np.arange(len(states)).repeat(rows_per_item)[:, None]
        return cls(states, table, np.array(lengths).repeat(rows_per_item), rows_per_item)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def longest(self) -> int:
        """The most states that a row can have."""
        return int(self.table.shape[1]) * self.states.shape[1]

    def row(self, number: int) -> Tensor:
        """Return the states of one row; a copy unless its blocks follow each other.  -> (n, d)"""
        length = int(self.lengths[number])
        blocks = self.table[number, : -(-length // self.states.shape[1])]
        return self._read(blocks).flatten(0, 1)[:length]

    def rows(self, numbers: Sequence[int]) -> RowStates:
        """Return the states of some rows."""
        return RowStates(self.states, self.table[numbers], self.lengths[numbers])

    @functools.cached_property
    def blocks(self) -> Tensor:
        """The table on the device.  (B, M) int32"""
        return to_device(self.table.astype(np.int32), self.states.device)

    @functools.cached_property
    def counts(self) -> Tensor:
        """The number of states of each row, on the device.  (B,) int32"""
        return to_device(self.lengths.astype(np.int32), self.states.device)

    @functools.cached_property
    def seen(self) -> Tensor | None:
        """Whether each row has vision states, None if all have.  (B,)"""
        return None if self.lengths.all() else self.counts > 0

    @property
    def in_place(self) -> bool:
        """Whether `padded` is a view."""
        return _ascends(self.table[:: self.rows_per_item].ravel())

    @functools.cached_property
    def padded(self) -> tuple[Tensor, Tensor | None]:
        """The states of each item, and a mask that is False for padding, None without padding.  (I, N, d), (I, N)"""
        table, lengths = self.table[:: self.rows_per_item], self.lengths[:: self.rows_per_item]
        states = self._read(table.ravel()).view(len(table), self.longest, -1)
        if (lengths == self.longest).all():
            return states, None
        return states, torch.arange(self.longest, device=states.device) < self.counts[:: self.rows_per_item, None]

    def _read(self, blocks: np.ndarray) -> Tensor:
        """Return blocks, in place if they follow each other.  (m,) -> (m, S, d)"""
        if _ascends(blocks):
            first = int(blocks[0]) if len(blocks) else 0
            return self.states[first : first + len(blocks)]
        return self.states[to_device(blocks, self.states.device)]


def _ascends(numbers: np.ndarray) -> bool:
    """Return whether each number is the previous one plus 1."""
    return bool((np.diff(numbers) == 1).all())


def to_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """Copy numbers to the device without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return pinned.to(device, non_blocking=True)
