"""The fast steps equal the reference for every row, padded, pooled, sliced or shared."""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import random_cases
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_cases import batch, reference_scores

import families
import revisit
from revisit import ReVisiT, Trace
from revisit.errors import RevisitError
from revisit.models.head import LinearHead
from revisit.step import batched
from revisit.step.batched import BatchedStep, refine_batch
from revisit.step.cached import CachedStep
from revisit.step.choice import Implementation, refine_logits
from revisit.step.interface import RowStates, Step, StepInput
from revisit.step.reference import ReferenceStep
from revisit.step.rule import Rule
from revisit.vllm.head import ShardedHead


@pytest.mark.parametrize("backend", ["batched", "cached"])
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**9))
@example(seed=10014184)  # sums beyond float32 under a cap: ±inf or NaN, depending on their order
@example(seed=10019081)
@example(seed=10019207)
@example(seed=20004712)
@example(seed=20004881)
@example(seed=20013666)
@example(seed=20016695)
@example(seed=20018054)
@example(seed=50071706)  # divergences of 1e30, one of which has a share
def test_random_steps_match_the_reference(backend: str, seed: int) -> None:
    counts, differences = random_cases.run(range(seed, seed + 1), backend)
    assert not differences, counts


@pytest.mark.parametrize("implementation", [None, "reference", "torch"])
def test_refine_logits(implementation: Implementation | None) -> None:
    logits, states, head = batch(rows_per_item=2)
    scores = refine_logits(states, head.weight, logits, implementation=implementation)
    torch.testing.assert_close(scores, reference_scores(logits, states, head, Rule()), atol=1e-5, rtol=1e-5)
    assert torch.equal(refine_logits(states, head, logits), refine_logits(states, head.weight, logits))


@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_refine_logits_limits_written_tokens(implementation: Implementation) -> None:
    logits, states, head = batch(rows_per_item=2)
    method = ReVisiT(once=0.7)
    written = logits.topk(9).indices[:, ::2]
    written[3, 1:] = -1  # a shorter answer
    want = reference_scores(logits, states, head, method, written)
    scores = refine_logits(states, head, logits, method, implementation, written=written.int())
    torch.testing.assert_close(scores, want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(want, reference_scores(logits, states, head, method))
    for wrong in (None, written[0], written[:2]):
        with pytest.raises(RevisitError, match="written"):
            refine_logits(states, head, logits, method, implementation, written=wrong)


@pytest.mark.parametrize("implementation", [None, "reference", "torch"])
@pytest.mark.parametrize("rows", [False, True], ids=["all rows", "each row"])
def test_refine_logits_withholds_tokens(implementation: Implementation | None, rows: bool) -> None:
    """The third row has no other plausible token, and the last no image."""
    logits, states, head = batch(items=4)
    logits[2, 7] = 90
    states[3] = states[3][:0]
    withheld = torch.zeros(logits.shape, dtype=torch.bool)
    withheld[:, 7] = True
    withheld[:, ::5] = True
    mask = withheld if rows else withheld[0]
    free = reference_scores(logits, states, head, Rule(alpha=1e-2))
    scores = refine_logits(states, head, logits, Rule(alpha=1e-2), implementation, withheld=mask)
    assert (scores[withheld] == -math.inf).all()
    assert (free[:2][withheld[:2]] > -math.inf).any()
    torch.testing.assert_close(scores[:2], free[:2].masked_fill(withheld[:2], -math.inf), atol=1e-5, rtol=1e-5)
    assert torch.equal(scores[2:], logits[2:].masked_fill(withheld[2:], -math.inf))


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_a_withheld_token_is_never_chosen(mask: list[bool], seed: int) -> None:
    """Whatever the mask, the best token is allowed, and without a mask nothing changes."""
    generator = torch.Generator().manual_seed(seed)
    logits, states = torch.randn(2, 8, generator=generator) * 9, torch.randn(2, 3, 4, generator=generator)
    head, withheld = torch.randn(8, 4, generator=generator), torch.tensor(mask)
    scores = refine_logits(states, head, logits, withheld=withheld)
    assert (scores[:, withheld] == -math.inf).all()
    assert withheld.all() or not withheld[scores.argmax(-1)].any()
    free = refine_logits(states, head, logits)
    assert withheld.any() or torch.equal(scores, free)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(300), torch.zeros(299, dtype=torch.bool), torch.zeros(1, 300, dtype=torch.bool)]
)
def test_masks_that_do_not_fit_raise(wrong: torch.Tensor) -> None:
    logits, states, head = batch()
    with pytest.raises(RevisitError, match="withheld must be a mask"):
        refine_logits(states, head, logits, withheld=wrong)


def test_unusable_implementations_raise() -> None:
    logits, states, head = batch()
    with pytest.raises(RevisitError, match="torch"):
        refine_logits(states, head, logits, ReVisiT(divergence="kl"), implementation="triton")
    with pytest.raises(RevisitError, match="Known: reference, torch, triton"):
        refine_logits(states, head, logits, implementation="cuda")


def test_shapes_that_do_not_match_raise() -> None:
    logits, states, head = batch()
    for items, row, part in (
        ([], logits, "a multiple of the 0 items"),
        (states[:2], logits, r"a multiple of the 2 items of the states, not \(3, 300\)"),
        (states[:1], logits[0], r"must be \(B, V\)"),
        (states[:1], logits[:0], r"must be \(B, V\)"),
        ([states[0][:, :9]], logits, r"states \(n, 16\)"),
        (states, torch.randn(3, 301), "at most 300 logits per row"),
    ):
        with pytest.raises(RevisitError, match=part):
            refine_logits(items, head, row)
    with pytest.raises(RevisitError, match="phase"):
        refine_logits(states, head, logits, ReVisiT(phase="answer"))


def test_refine_logits_draws_random_vision_tokens_anew() -> None:
    logits, states, head = batch(items=1)
    torch.manual_seed(0)
    several = {tuple(refine_logits(states, head, logits, ReVisiT(select="random"))[0].tolist()) for _ in range(20)}
    assert len(several) > 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_states_are_multiplied_with_float32_sums(dtype: torch.dtype) -> None:
    logits, states, head = batch()
    halved, half = [item.to(dtype) for item in states], LinearHead(head.weight.to(dtype))
    wide = reference_scores(logits, [item.float() for item in halved], LinearHead(half.weight.float()), Rule())
    torch.testing.assert_close(refine_logits(halved, half, logits), wide, atol=1e-5, rtol=1e-5)


def test_bias_and_cap_of_a_head() -> None:
    logits, states, head = batch()
    capped = LinearHead(head.weight, torch.randn(300, generator=torch.Generator().manual_seed(1)), torch.tanh)
    want = reference_scores(logits, states, capped, Rule())
    torch.testing.assert_close(refine_logits(states, capped, logits), want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(want, reference_scores(logits, states, head, Rule()))


@pytest.mark.parametrize("order", ["shuffled", "in place"])
@pytest.mark.parametrize("step", [ReferenceStep, CachedStep, BatchedStep])
def test_pooled_blocks_equal_padded_ones(step: type[Step], order: str) -> None:
    """Blocks of four states in a pool, with free ones in between or in order; the second row has no image."""
    logits, states, head = batch(items=4)
    states[1] = states[1][:0]
    pool, table = torch.full((28, 4, 16), math.nan), np.zeros((4, 7), np.int64)
    numbers = torch.arange(28)
    if order == "shuffled":
        numbers = numbers[torch.randperm(28, generator=torch.Generator().manual_seed(0))]
    for row, item in enumerate(states):
        table[row] = numbers[7 * row : 7 * row + 7]
        for block, part in zip(table[row], item.split(4), strict=False):
            pool[block, : len(part)] = part
    pooled = RowStates(pool, table, np.array([len(item) for item in states]))
    assert pooled.in_place == (order == "in place")
    for rule in (Rule(), Rule(select="max"), Rule(neighbors=3, weight="agreement")):
        got = step(head, rule).take(StepInput(logits, pooled))
        want = step(head, rule).take(StepInput(logits, RowStates.of_items(states)))
        assert torch.equal(got.scores, want.scores)
        assert got.applied.tolist() == [True, False, True, True]
        assert torch.equal(got.scores[1], logits[1])
    for row, item in enumerate(states):
        assert torch.equal(pooled.row(row), item)


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states, head = batch()
    rows, rules = RowStates.of_items(states), (Rule(), Rule(neighbors=3))
    whole = [refine_batch(logits, rows, head, rule, capacity=300) for rule in rules]
    monkeypatch.setattr(batched, "NUMBERS", 1000)
    for rule, want in zip(rules, whole, strict=True):
        got = refine_batch(logits, rows, head, rule, capacity=300)
        torch.testing.assert_close(got.scores, want.scores, atol=1e-5, rtol=1e-5)
        assert torch.equal(got.states, want.states)


def test_the_rows_of_a_split_head_are_gathered_once_for_all_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states, head = batch()
    summed: list[torch.Tensor] = []
    sharded = ShardedHead(head.weight, sum_over_ranks=lambda rows: summed.append(rows) or rows)  # type: ignore[func-returns-value]
    monkeypatch.setattr(batched, "NUMBERS", 1000)
    scores = BatchedStep(sharded, Rule()).take(StepInput(logits, RowStates.of_items(states))).scores
    torch.testing.assert_close(scores, reference_scores(logits, states, head, Rule()), atol=1e-5, rtol=1e-5)
    assert len(summed) == 1


def test_rows_with_large_sets_are_computed_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, states, head = batch()
    logits *= torch.tensor([5.0, 0.5, 5.0])[:, None]  # the second row is flat
    taken, find = [], batched.find_candidates

    def watched(logp: torch.Tensor, sizes: torch.Tensor, capacity: int) -> Any:
        taken.append((len(logp), capacity))
        return find(logp, sizes, capacity)

    monkeypatch.setattr(batched, "find_candidates", watched)
    rule, written = Rule(alpha=1e-3, once=0.5, weight="agreement"), logits.topk(4).indices
    want = reference_scores(logits, states, head, rule, written)
    monkeypatch.setattr(batched, "USUAL", 1)
    for copied in (10**6, 300 * 16):
        monkeypatch.setattr(batched, "COPIED", copied)
        got = BatchedStep(head, rule).take(StepInput(logits, RowStates.of_items(states), written=written))
        torch.testing.assert_close(got.scores, want, atol=1e-5, rtol=1e-5)
        assert got.sizes.tolist() == (want > -torch.inf).sum(-1).tolist()
    assert taken == [(3, 300), (2, max(got.sizes[::2].tolist())), (1, 300)]


def test_ended_rows_do_not_enlarge_the_step_of_others() -> None:
    logits, states, head = batch()
    logits[1] = 0  # every token of a row that has ended is plausible
    ended = torch.arange(len(logits)) == 1
    got = BatchedStep(head, Rule(alpha=1e-3)).take(StepInput(logits, RowStates.of_items(states), ended=ended))
    want = reference_scores(logits, states, head, Rule(alpha=1e-3))
    torch.testing.assert_close(got.scores[~ended], want[~ended], atol=1e-5, rtol=1e-5)
    assert got.sizes[1] == 0
    assert torch.equal(got.scores[1], logits[1])


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 5000), st.booleans())
def test_parts_of_the_rows_fit_the_room(sizes: list[int], room: int, pooled: bool) -> None:
    table = np.arange(len(sizes))[:: -1 if pooled else 1, None]
    states = RowStates(torch.zeros(len(sizes), 9, 1), table, np.full(len(sizes), 9))
    with mock.patch.multiple(batched, COPIED=room, USUAL=1):
        parts = batched.split(sizes, states)
    assert sorted(row for part in parts for row in part) == list(range(len(sizes)))
    for part in parts:
        needed = len(part) * (max(sizes[row] for row in part) + 9 * (not states.in_place))
        assert len(part) == 1 or needed <= max(room, len(sizes))


METHOD = ReVisiT(alpha=1e-3, layers="all")
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize("extra", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_a_recorded_run_decodes_and_counts_the_same(extra: dict[str, Any]) -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["hi", "what is it?"], [[families.image(0)], [families.image(1)]])
    runs = []
    for record in (True, False):
        torch.manual_seed(0)
        trace = Trace(record=record)
        out = revisit.generate(model, **inputs, method=METHOD, trace=trace, **{**OPTIONS, **extra})
        rows = [dataclasses.replace(row, records=[]) for row in trace.rows]
        runs.append((out.tolist(), [dataclasses.asdict(row) for row in rows]))
    assert runs[0] == runs[1]
    assert sum(row["applied"] for row in runs[0][1]) > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_only_generated_tokens_count_as_written(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["hi", "what is it?"], [[families.image(0)], [families.image(1)]])
    taken: list[Any] = []
    take = CachedStep.take

    def watched(self: Any, inputs: StepInput) -> Any:
        taken.append(inputs.written)
        return take(self, inputs)

    monkeypatch.setattr(CachedStep, "take", watched)
    method, options = METHOD.replace(once=1.0, layers="last"), {**OPTIONS, "num_beams": beams}
    out = revisit.generate(model, **inputs, method=method, **options)
    answer = out[:, inputs["input_ids"].shape[1] :]
    assert [tokens.shape for tokens in taken] == [(2 * beams, step) for step in range(len(taken))]
    if beams == 1:
        assert all(torch.equal(tokens, answer[:, : tokens.shape[1]]) for tokens in taken)
    plain = revisit.generate(model, **inputs, method=method.replace(once=0.0), **options)
    assert taken[-1] is None
    assert not torch.equal(out, plain)  # this model repeats itself
