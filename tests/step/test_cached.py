"""Cached columns are projected once and change no result."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from random_cases import batch, reference_scores

from revisit.models.head import LinearHead
from revisit.step import cached
from revisit.step.cached import CachedStep
from revisit.step.choice import choose
from revisit.step.interface import RowStates, StepInput
from revisit.step.rule import Rule


@dataclass(frozen=True)
class Watched(LinearHead):
    """A head that lists the tokens of which whole columns are projected."""

    columns: list[int] = field(default_factory=list)
    states: int = 0

    def logits(self, states: torch.Tensor, ids: torch.Tensor, model_dtype: bool = False) -> torch.Tensor:
        if len(states) == self.states:
            self.columns.extend(ids.tolist())
        return super().logits(states, ids, model_dtype)


def test_columns_are_projected_once() -> None:
    logits, states, head = batch(items=1, rows_per_item=2)
    watched = Watched(head.weight, states=len(states[0]))
    step, rows = CachedStep(watched, Rule(alpha=1e-2)), RowStates.of_items(states, 2)
    first = step.take(StepInput(logits, rows)).scores
    plausible = (first > -torch.inf).any(0).nonzero().squeeze(-1).tolist()
    assert sorted(watched.columns) == plausible  # the two rows of the item share them
    assert torch.equal(step.take(StepInput(logits, rows)).scores, first)
    assert len(watched.columns) == len(plausible)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, states, head = batch()
    together, alone = CachedStep(head, Rule(alpha=1e-2)), CachedStep(head, Rule(alpha=1e-2))
    rows, items = RowStates.of_items(states), [RowStates.of_items([item]) for item in states]
    for scale in (3, 1, 2):
        scores = together.take(StepInput(scale * logits, rows)).scores
        for row, item in enumerate(items):
            single = alone.take(StepInput(scale * logits[row : row + 1], item)).scores
            assert torch.equal(single[0], scores[row])


@pytest.mark.parametrize("columns", [1, 40, 200])
def test_columns_that_find_no_room(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of any size, of which only some fit, in steps after which most columns are dropped."""
    monkeypatch.setattr(cached, "COLUMNS", columns)
    logits, states, head = batch()
    step, rows = CachedStep(head, Rule(alpha=1e-2, neighbors=2)), RowStates.of_items(states)
    for scale in (1, 3, 0.5, 2, 3, 1):
        got = step.take(StepInput(scale * logits, rows))
        torch.testing.assert_close(got.scores, reference_scores(scale * logits, states, head, step.rule))


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states, head = batch()
    whole = CachedStep(head, Rule()).take(StepInput(logits, RowStates.of_items(states))).scores
    monkeypatch.setattr(cached.reference, "CHUNK_NUMBERS", 1000)
    sliced = CachedStep(head, Rule()).take(StepInput(logits, RowStates.of_items(states))).scores
    torch.testing.assert_close(sliced, whole)


def test_exact_settings_use_the_reference() -> None:
    head, cpu, gpu = LinearHead(torch.zeros(9, 4)), torch.device("cpu"), torch.device("cuda")
    assert choose(head, Rule(vocabulary="full"), gpu).name == "reference"
    assert choose(head, Rule(precision="model"), cpu).name == "reference"
    assert choose(head, Rule(precision="model"), gpu).name == "reference"
    assert choose(head, Rule(divergence="kl"), gpu).name == "reference"
    assert choose(head, Rule(divergence="kl"), cpu).name == "torch"
    assert isinstance(choose(head, Rule(), cpu), CachedStep)
