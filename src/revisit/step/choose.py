"""Which implementation takes the steps: the one place that chooses, for transformers and for vLLM."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from revisit.models.head import Projection
from revisit.step import reference
from revisit.step.batched import BatchedStep, Refined
from revisit.step.compiled import kernel
from revisit.step.reference import Refinement
from revisit.step.rule import Rule
from revisit.step.states import RowStates


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
    on_cpu = device.type == "cpu"
    if rule.full_vocabulary or (rule.model_dtype and on_cpu):
        return ReferenceStep(head, rule)
    if on_cpu and kernel.suits(head, rule):
        return kernel.CompiledStep(head, rule, record)
    return BatchedStep(head, rule, room, record)


class ReferenceStep:
    """The reference, row by row."""

    def __init__(self, head: Projection, rule: Rule) -> None:
        self.head, self.rule = head, rule

    @torch.no_grad()
    def take(
        self, logits: Tensor, states: RowStates, uniform: float | Tensor = 0.0, ended: Tensor | None = None
    ) -> Refined:
        over = [False] * len(logits) if ended is None else ended.tolist()
        draws = uniform.flatten().tolist() if isinstance(uniform, Tensor) else [uniform] * len(logits)
        results: list[Refinement | None] = [
            None if over[row] else reference.refine(one, states.item(row).states, self.head, self.rule, draws[row])
            for row, one in enumerate(logits)
        ]
        scores = torch.stack([reference.scatter(result, one) for result, one in zip(results, logits, strict=True)])
        facts = [(0, 0, 0, 0, 0) if r is None else (r.size, r.applied, r.changed, r.state, 1) for r in results]
        sizes, applied, changed, selected, seen = torch.tensor(facts, device=scores.device).T
        weights = torch.tensor([0.0 if r is None else r.weight for r in results], device=scores.device)
        return Refined(scores, sizes, applied.bool(), changed.bool(), selected, weights, seen.bool(), tuple(results))
