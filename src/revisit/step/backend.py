"""Which implementation takes the steps of a run: the one place that chooses, once a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from revisit.models.head import Projection
from revisit.step import reference
from revisit.step.batched import Step
from revisit.step.compiled import kernel
from revisit.step.reference import Refinement
from revisit.step.rule import Rule
from revisit.step.run import BatchedStep, host_sync_is_cheap
from revisit.step.states import StateBlocks


class Backend(Protocol):
    """Takes the steps of one run."""

    def __call__(self, logits: Tensor, uniform: float | Tensor = 0.0, ended: Tensor | None = None) -> Step:
        """One step of all rows (B, V); rows that have `ended` (B,) may be left as they are."""


def choose(states: Tensor, mask: Tensor, head: Projection, rule: Rule, *, copies: int, record: bool) -> Backend:
    """The backend of a run, from the padded vision states (items, n, d) with their mask (items, n).

    A recorded step, the full vocabulary and, on a CPU, the released code's rounding are taken by the reference, row by
    row: slower, and to the last bit. The usual step on a CPU is taken by compiled code, where it was built, and everything
    else by the whole batch at once in torch.
    """
    exact = record or rule.full_vocabulary or (rule.model_dtype and host_sync_is_cheap(states.device))
    if exact:
        return ReferenceStep(items_of(states, mask), head, rule, copies)
    if states.device.type == "cpu":
        states = states.float()  # once: half precision is slow on CPUs
    if kernel.suits(states, head, rule):
        return kernel.CompiledStep(items_of(states, mask), head, rule, copies)
    return BatchedStep(StateBlocks.padded(states, mask, copies), head, rule)


def items_of(states: Tensor, mask: Tensor) -> list[Tensor]:
    """The (n, d) states of each item without padding; copied only where there is some."""
    full = mask.all(-1).tolist()
    return [item if whole else item[inside] for item, inside, whole in zip(states, mask, full, strict=True)]


class ReferenceStep:
    """The reference, row by row; its `Step` carries everything that there is to know of each row."""

    def __init__(self, items: Sequence[Tensor], head: Projection, rule: Rule, copies: int) -> None:
        self.items, self.head, self.rule, self.copies = items, head, rule, copies

    @torch.no_grad()
    def __call__(self, logits: Tensor, uniform: float | Tensor = 0.0, ended: Tensor | None = None) -> Step:
        assert isinstance(uniform, float)
        over = [False] * len(logits) if ended is None else ended.tolist()
        results = [None if over[row] else self._refine(logits, row, uniform) for row in range(len(logits))]
        scores = torch.stack([reference.scatter(result, row) for result, row in zip(results, logits, strict=True)])
        return summarize(scores, results)

    def _refine(self, logits: Tensor, row: int, uniform: float) -> Refinement | None:
        return reference.refine(logits[row], self.items[row // self.copies], self.head, self.rule, uniform)


def summarize(scores: Tensor, results: Sequence[Refinement | None]) -> Step:
    """The steps of single rows as the step of a batch."""
    counts = [(0, 0, 0, 0, 0) if r is None else (r.size, r.applied, r.changed, r.state, 1) for r in results]
    sizes, applied, changed, states, seen = torch.tensor(counts, device=scores.device).T
    weights = torch.tensor([0.0 if r is None else r.weight for r in results], device=scores.device)
    return Step(scores, sizes, applied.bool(), changed.bool(), states, weights, seen.bool(), tuple(results))
