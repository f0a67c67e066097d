"""ReVisiT's step on CPUs: the reference row by row, with projections that are kept from step to step.

Most plausible tokens were plausible in an earlier step. So the *column* of a token, its logits under all vision states of an
item, is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from revisit.models.head import LARGEST_LOGIT, LinearHead
from revisit.step import reference
from revisit.step.interface import RowStates, StepInput
from revisit.step.rule import Rule

COLUMN_BYTES = 256 << 20  # most memory for the columns of all items
COLUMNS = 16384  # most columns of an item
TINY = 1e-37  # smallest probability whose logarithm is taken


class CachedStep(reference.ReferenceStep):
    """The step with cached columns."""

    name = "torch"

    def __init__(self, head: LinearHead, rule: Rule) -> None:
        super().__init__(head, rule)
        self.columns: WeakKeyDictionary[RowStates, dict[int, Columns]] = WeakKeyDictionary()

    def comparison(self, inputs: StepInput, row: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        if self.rule.model_dtype:
            return None
        states = inputs.states
        items, number = self.columns.setdefault(states, {}), row // states.rows_per_item
        if number not in items:
            room = COLUMN_BYTES // (len(states) // states.rows_per_item)
            items[number] = Columns(states.row(row), self.head, inputs.logits.shape[1], room)
        return partial(items[number].divergences, rule=self.rule)


class Columns:
    """The columns of one item; the system allocates only the part of the memory that is written."""

    def __init__(self, states: Tensor, head: LinearHead, vocabulary: int, room: int) -> None:
        self.states, self.head = states.float().contiguous(), head  # (n, d)
        capacity = min(COLUMNS, vocabulary, room // (4 * max(1, len(states))))
        self.store = torch.empty(capacity, len(states))
        self.slot_of = torch.full((vocabulary,), -1)
        self.used = 0  # slots

    def divergences(self, log_p: Tensor, ids: Tensor, rule: Rule) -> Tensor:
        """Return the divergence of every state, as the reference's `all_divergences`.  (k,), (k,) -> (n,)"""
        if len(ids) > len(self.store):
            return reference.all_divergences(log_p, self.states, self.head, ids, rule)
        slots, parts = self.slots(ids), []
        for columns in self.store.split(max(1, reference.CHUNK_NUMBERS // len(ids)), dim=1):
            x = columns.index_select(0, slots)  # (k, slice)
            usual = rule.divergence == "jsd"
            parts.append(
                jsd(log_p.float(), x) if usual else reference.logit_divergence(log_p, x.mT, rule.divergence, False)
            )
        return torch.cat(parts)

    def slots(self, ids: Tensor) -> Tensor:
        """Return where the columns of some tokens, at most as many as there is room for, are stored.  (k,) -> (k,)"""
        missing = ids[self.slot_of[ids] < 0]
        if self.used + len(missing) > len(self.store):
            self.slot_of.fill_(-1)
            self.used, missing = 0, ids
        end = self.used + len(missing)
        if len(missing):
            self.store[self.used : end] = self.head.logits(self.states, missing).mT
            self.slot_of[missing] = torch.arange(self.used, end)
            self.used = end
        return self.slot_of[ids]


def jsd(log_p: Tensor, x: Tensor) -> Tensor:
    """Return the Jensen–Shannon divergence of states from their logits, which are overwritten.  (k,), (k, n) -> (n,)

    This is H(M) − ½ H(P) − ½ H(Q), where H(Q) = ln Σ exp(x) − Σ Q x needs no logarithm of Q. NaN for states that cannot be
    selected.
    """
    p = log_p.exp()
    top, least = x.amax(0), x.amin(0)
    q = x.sub_(top).exp()
    total = q.sum(0)
    entropy = total.log() - x.mul_(q).sum(0) / total
    both = q.div_(total).add_(p.clamp_min(TINY)[:, None])  # 2 M
    mixed = math.log(2) - 0.5 * torch.log(both, out=x).mul_(both).sum(0)
    values = mixed + 0.5 * (p @ log_p - entropy)
    return torch.where((top < LARGEST_LOGIT) & (least > -LARGEST_LOGIT), values, math.nan)
