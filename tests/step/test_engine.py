"""The fast step equals the plain one: same sets to the last bit, same choices, same scores, in bounded memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import families
import revisit
from revisit import ReVisiT, Trace
from revisit.step import batched as accelerator
from revisit.step import engine
from revisit.step import reference as core
from revisit.step.batched import refine_without_waiting
from revisit.step.compiled import kernel
from revisit.step.engine import Batch, Columns, Engine, Peaks, Rule, plausible_ids
from revisit.step.reference import Select
from revisit.taps import vision
from revisit.taps.vision import Bank

VOCABULARY, WIDTH = 1000, 16
DIVERGENCES = ("jsd", "official", "kl", "cosine")


class Rows:
    """Vision rows with a plain matrix as head; remembers what was asked of it."""

    def __init__(self, rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn(rows, WIDTH, generator=generator).to(dtype)
        self.head = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype)
        self.asked: list[list[int]] = []
        self.largest = 0

    @property
    def rows(self) -> int:
        return len(self.states)

    def logits(self, start: int, stop: int, ids: torch.Tensor) -> torch.Tensor:
        self.asked.append(ids.tolist())
        self.largest = max(self.largest, (stop - start) * len(ids))
        return self.states[start:stop] @ self.head[ids].T

    def at(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.states[rows] @ self.head[ids].T

    def factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.states, self.head


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with the loops written in torch and with the compiled ones."""
    if request.param == "torch":
        monkeypatch.setattr(kernel, "_LIBRARY", None)
    elif not kernel.available():
        pytest.skip("the compiled loops were not built when the package was installed (no C compiler?)")
    return str(request.param)


def some_logits(seed: int, spread: float, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def assert_same(a: core.Refinement, b: core.Refinement, what: str = "", all_divergences: bool = False) -> None:
    """Without `all_divergences` only that of the selected row must be exact, and the others near."""
    assert torch.equal(a.ids, b.ids), what
    assert a.row == b.row, what
    for name in ("base", "vision", "final", "divergences"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), what
        if x is not None:
            near = 1e-5 if name != "divergences" or all_divergences else 2e-3
            torch.testing.assert_close(x, y, atol=near, rtol=near, equal_nan=True)
    if a.divergences is not None and a.row >= 0:
        assert b.divergences is not None
        torch.testing.assert_close(a.divergences[a.row], b.divergences[b.row], atol=1e-5, rtol=1e-5)


# -- the plausible set --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1.0, 0.5, 1e-1, 1e-3, 1e-5, 1e-30]),
    st.sampled_from([0.1, 1.0, 4.0, 30.0]),
    st.sampled_from([0.0, 1.0, -500.0, 5e4]),
    st.integers(1, 400),
)
def test_the_set_is_the_references_to_the_last_bit(
    seed: int, alpha: float, spread: float, shift: float, size: int
) -> None:
    """Tokens are put exactly on the threshold and one step of rounding to either side of it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator) * spread + shift
    cut = logits.max() + math.log(alpha)
    for place in torch.randint(0, size, (8,), generator=generator).tolist():
        if place != int(logits.argmax()):
            away = torch.tensor(math.inf if place % 2 else -math.inf)
            logits[place] = torch.nextafter(cut, away) if place % 3 else cut
    logits[torch.rand(size, generator=generator) < 0.1] = -math.inf
    expected = core.plausible(logits.log_softmax(-1), alpha).nonzero().squeeze(-1)
    if logits.isfinite().any():
        assert torch.equal(plausible_ids(Peaks(logits[None]), 0, alpha), expected)


def test_no_softmax_over_the_vocabulary_unless_a_token_is_on_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_from_log_probabilities", lambda *_: pytest.fail("exact decision was not needed"))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [3, 500, 999]] = torch.tensor([20.0, 19.0, 12.0])
    assert plausible_ids(Peaks(logits), 0, 1e-2).tolist() == [3, 500]
    assert plausible_ids(Peaks(logits), 0, 1e-4).tolist() == [3, 500, 999]
    assert len(plausible_ids(Peaks(logits), 0, 1e-10)) == VOCABULARY


# -- one step -----------------------------------------------------------------------------------------------------

RULES = [
    *(Rule(1e-3, divergence=d) for d in DIVERGENCES),
    *(Rule(1e-3, divergence=d, how="max") for d in DIVERGENCES),
    Rule(1e-3, how="random"),
    Rule(1e-2, fusion="interpolation", weight=0.3),
    Rule(1e-3, weight=0.0, normalize=False),
    Rule(1.0),
    *(Rule(1e-2, divergence=d, full_vocabulary=True) for d in DIVERGENCES),
    *(Rule(1e-3, divergence=d, model_dtype=True, normalize=False) for d in DIVERGENCES),
]


@pytest.mark.parametrize("all_divergences", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.divergence}-{r.how}-{r.fusion}-{r.full_vocabulary}")
def test_engine_equals_reference(rule: Rule, all_divergences: bool) -> None:
    """Over many steps, so that most columns come from the store and some were forgotten in between."""
    vision = Rows(60)
    fast = Engine(vision, rule, store_bytes=150 * 4 * 60, all_divergences=all_divergences)
    exact = all_divergences or fast.stepper is None
    sizes = []
    for seed in range(40):
        logits = some_logits(seed, 1.0 + seed % 4)
        expected = rule.reference(logits[0], vision, uniform=seed / 40)
        assert_same(expected, fast.refine(Peaks(logits), uniform=seed / 40), f"step {seed}", exact)
        sizes.append(len(expected.ids))
    if rule.alpha < 1 and not rule.full_vocabulary:
        books = fast.stepper.books if fast.stepper else fast.columns.books
        assert min(sizes) < books.capacity < max(sizes)  # both the store and the stream were used
        assert 0 < fast.projected < fast.asked


def test_usual_steps_are_taken_by_the_compiled_step(loops: str) -> None:
    """And those it leaves are taken the other way: equal rows, a token on the threshold, a set larger than the store."""
    vision = Rows(60)
    fast = Engine(vision, Rule(1e-3), store_bytes=400 * 4 * 60)
    if loops == "torch":
        assert fast.stepper is None
        return
    assert fast.stepper is not None

    def taken(one: Engine, logits: torch.Tensor) -> kernel.Taken | None:
        assert one.stepper is not None
        return kernel.take([(one.stepper, logits, None)], one.scratch.room)[0]

    steps = [taken(fast, some_logits(seed, 3.0)[0]) for seed in range(20)]
    assert sum(step is not None and step.applied for step in steps) >= 18
    assert 0 < fast.stepper.books.held <= fast.stepper.books.capacity
    wide, edge, flat = some_logits(1, 0.1)[0], some_logits(1, 3.0)[0], some_logits(1, 3.0)[0]
    edge[int(edge.argmin())] = edge.max() + math.log(1e-3)
    assert taken(fast, wide) is None
    assert taken(fast, edge) is None
    before = fast.asked
    assert_same(Rule(1e-3).reference(edge, vision), fast.refine(Peaks(edge[None])))
    assert fast.asked > before  # with the set decided by log-probabilities
    vision.states[:] = vision.states[0]
    again = Engine(vision, Rule(1e-3))
    equals = taken(again, flat)
    assert equals is not None
    assert equals.near is not None
    assert (equals.applied, equals.near.tolist()) == (False, list(range(60)))
    assert_same(Rule(1e-3).reference(flat, vision), again.refine(Peaks(flat[None])))
    with pytest.raises(IndexError):  # more logits than the head has rows: said by torch, not read from beyond its end
        again.refine(Peaks(torch.cat([flat - 100, flat])[None]))
    for rule in (Rule(1e-3, divergence="kl"), Rule(1e-3, how="random"), Rule(1e-3, fusion="interpolation")):
        assert Engine(vision, rule).stepper is None


def test_half_precision_rounding_is_the_references() -> None:
    vision = Rows(40, dtype=torch.bfloat16)
    for divergence in DIVERGENCES:
        rule = Rule(1e-3, divergence=divergence, model_dtype=True, normalize=False)
        fast = Engine(vision, rule)
        for seed in range(8):
            logits = some_logits(seed, 2.0)
            a, b = rule.reference(logits[0], vision), fast.refine(Peaks(logits))
            assert (a.row, a.ids.tolist()) == (b.row, b.ids.tolist())
            assert torch.equal(a.final, b.final)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_are_not_finite(divergence: Any, streamed: bool) -> None:
    vision = Rows(12)
    rule = Rule(1e-2, divergence=divergence)
    logits = some_logits(3, 2.0)
    best = rule.reference(logits[0], vision).row
    for poison in (math.nan, math.inf):
        vision.states[best] = poison
        fast = Engine(vision, rule, store_bytes=0 if streamed else engine.STORE_BYTES)
        result = fast.refine(Peaks(logits))
        assert result.row not in (-1, best)
        assert_same(rule.reference(logits[0], vision), result)
    vision.states[:] = math.nan
    result = Engine(vision, rule, store_bytes=0 if streamed else engine.STORE_BYTES).refine(Peaks(logits))
    assert result.row == -1
    assert torch.equal(result.final, result.base)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("streamed", [False, True])
def test_tokens_that_no_vision_row_allows(divergence: Any, streamed: bool) -> None:
    """A logit of -inf, in some rows or in all of them: such a row is never selected."""

    class Banned(Rows):
        def factors(self) -> None:
            return None

        def logits(self, start: int, stop: int, ids: torch.Tensor) -> torch.Tensor:
            out = super().logits(start, stop, ids)
            out[: max(0, 5 - start)] = out[: max(0, 5 - start)].masked_fill(ids % 3 == 0, -math.inf)
            return out.masked_fill(ids == 23, -math.inf)

    vision = Banned(12)
    rule = Rule(1e-2, divergence=divergence)
    fast = Engine(vision, rule, store_bytes=0 if streamed else engine.STORE_BYTES)
    chosen = set()
    for seed in range(10):
        logits = some_logits(seed, 2.0)
        result = fast.refine(Peaks(logits))
        assert_same(rule.reference(logits[0], vision), result, f"step {seed}")
        assert result.row >= 5 or (result.row == -1 and 23 in result.ids)
        chosen.add(result.row)
    assert -1 in chosen
    assert len(chosen) > 2


def test_equal_rows_go_to_the_first() -> None:
    vision = Rows(30)
    vision.states[:] = vision.states[0]
    logits = some_logits(1, 2.0)
    assert Engine(vision, Rule(1e-3)).refine(Peaks(logits)).row == 0


@pytest.mark.parametrize("how", ["min", "max"])
@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-3, 1e-4, 1e-6])
def test_rows_that_integers_cannot_tell_apart(apart: float, how: Select) -> None:
    """States so alike that the 16-bit ranking is wrong about them: the choice is the reference's all the same."""
    vision = Rows(200)
    vision.states[:] = vision.states[0] + apart * vision.states
    rule = Rule(1e-3, how=how)
    fast = Engine(vision, rule)
    for seed in range(20):
        logits = some_logits(seed, 2.0)
        expected, got = rule.reference(logits[0], vision), fast.refine(Peaks(logits))
        if apart > 1e-4:
            assert_same(expected, got, f"step {seed}")
        else:  # not even float32 can tell them all apart
            assert expected.divergences is not None
            values = expected.divergences[[expected.row, got.row]]
            assert abs(values[0] - values[1]) < 1e-6
    if fast.stepper is not None:
        assert (fast.stepper.exact > 20 * 100) == (apart < 1e-2)  # the more alike, the more rows are computed exactly


def test_states_that_are_not_finite_are_never_selected() -> None:
    vision = Rows(60)
    vision.states[7, 3], vision.states[20, 0], vision.states[59] = math.nan, math.inf, 1e30
    vision.states[30] = 0
    for how in ("min", "max"):
        rule = Rule(1e-3, how=how)
        fast = Engine(vision, rule)
        for seed in range(10):
            logits = some_logits(seed, 2.0)
            expected, got = rule.reference(logits[0], vision), fast.refine(Peaks(logits))
            assert got.row == expected.row not in (7, 20)
            torch.testing.assert_close(got.final, expected.final, atol=1e-5, rtol=1e-5)


# -- the store ----------------------------------------------------------------------------------------------------


def held(columns: Columns) -> set[int]:
    return set(columns.books.slot_of.nonzero().squeeze(-1).tolist())


def test_a_column_is_projected_once_while_it_fits() -> None:
    vision = Rows(20)
    columns = Columns(vision, 1 << 20)
    store, slots = columns.slots(torch.tensor([1, 2, 3]))
    store[slots[1:]] += 1  # to be seen again, and so not projected again
    store, slots = columns.slots(torch.tensor([2, 3, 9, 700]))
    assert (columns.asked, columns.projected) == (7, 5)
    store[slots[:2]] -= 1
    torch.testing.assert_close(store[slots], vision.head[[2, 3, 9, 700]] @ vision.states.T)


def test_the_longest_unused_columns_are_forgotten() -> None:
    vision = Rows(20)
    columns = Columns(vision, 4 * 4 * 20)
    assert columns.capacity == 4
    for ids in ([1, 2], [3, 4], [1, 2]):
        columns.slots(torch.tensor(ids))
    store, slots = columns.slots(torch.tensor([1, 5]))  # 3 or 4 has to go, never 1 or 2
    torch.testing.assert_close(store[slots], vision.head[[1, 5]] @ vision.states.T)
    assert {1, 2, 5} < held(columns)
    store, slots = columns.slots(torch.tensor([10, 11, 12, 13]))
    torch.testing.assert_close(store[slots], vision.head[[10, 11, 12, 13]] @ vision.states.T)
    assert held(columns) == {10, 11, 12, 13}
    assert store.shape == (4, 20)


def test_words_of_every_step_survive_a_wide_one() -> None:
    vision = Rows(20)
    columns = Columns(vision, 4 * 6 * 20)
    for _ in range(8):
        columns.slots(torch.tensor([1, 2]))
    for ids in ([10, 11, 12, 13], [14, 15, 16, 17], [18, 19]):
        columns.slots(torch.tensor(ids))
    assert {1, 2} < held(columns)
    for ids in range(20, 800):  # but not for ever
        columns.slots(torch.tensor([ids]))
    assert len(held(columns)) == 6
    assert not {1, 2} & held(columns)
    store, slots = columns.slots(torch.tensor([1, 795, 799]))
    torch.testing.assert_close(store[slots], vision.head[[1, 795, 799]] @ vision.states.T)


def test_the_books_stay_true() -> None:
    """Over random steps: a token has one slot, the slot is its own, and what a step reads is not forgotten in it."""
    books = engine.Books(50)
    generator = torch.Generator().manual_seed(0)
    known: set[int] = set()
    for _ in range(300):
        size = int(torch.randint(1, 51, (1,), generator=generator))
        ids = (torch.rand(size, generator=generator) ** 4 * 40_000).long().unique()
        slots, unknown, fresh = books.find(ids)
        assert set(unknown.tolist()) == set(ids.tolist()) - known
        assert len(set(slots.tolist())) == len(ids)
        assert torch.equal(slots[torch.isin(ids, unknown)], fresh)
        assert torch.equal(books.id_in[slots], ids)
        known = set(books.slot_of.nonzero().squeeze(-1).tolist())
        assert len(known) == books.held <= 50
        assert set(ids.tolist()) <= known
        assert all(int(books.id_in[int(books.slot_of[token]) - 1]) == token for token in known)


def test_flat_steps_stay_within_their_slices(monkeypatch: pytest.MonkeyPatch, loops: str) -> None:
    """A set of 1000 tokens over 500 rows, with room for 5000 numbers at a time."""
    made: list[int] = []

    def columns(states: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(len(states) * len(ids))
        return compiled(states, head, ids)

    compiled = kernel.columns
    monkeypatch.setattr(kernel, "columns", columns)
    monkeypatch.setattr(engine, "SLICE", 5000)
    monkeypatch.setattr(engine, "BLOCK", 2000)
    monkeypatch.setattr(engine, "GATHER", 300)
    vision = Rows(500)
    rule = Rule(1e-30)
    expected = rule.reference(some_logits(0, 1.0)[0], vision)
    vision.largest = 0
    fast = Engine(vision, rule, store_bytes=0)
    assert_same(expected, fast.refine(Peaks(some_logits(0, 1.0))))
    if loops == "compiled":
        assert len(made) == 500 // 5 + 1
        assert max(made) == 5000
        assert vision.largest == 0
    else:
        assert not made
        assert 0 < vision.largest <= 5000
        assert max(map(len, vision.asked[-5:])) <= 300
        assert 0 < sum(buffer.numel() for buffer in fast.scratch.buffers) <= 3 * 2000


# -- without waiting ----------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Fails on anything that makes the host wait for a value on the device, except a flag being read."""

    WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.WAITS, f"{name} makes the host wait"
        if name in ("index", "index_put_"):
            indices = [i for i in args[1] if i is not None]
            assert all(i.dtype != torch.bool for i in indices), "indexing by a mask makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _flags_are_read_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reading a flag is the one wait that is allowed: it was sent before the work that hides it."""
    read = accelerator.Flag.read

    def outside(self: accelerator.Flag) -> list[bool]:
        with torch.utils._python_dispatch._disable_current_modes():
            return read(self)

    monkeypatch.setattr(accelerator.Flag, "read", outside)
    return


@pytest.mark.parametrize("rule", [r for r in RULES if not r.full_vocabulary], ids=str)
def test_without_waiting_equals_reference(rule: Rule) -> None:
    vision = Rows(60)
    for seed in range(6):
        logits = some_logits(seed, 1.5, rows=3)
        logits[2] *= 20  # a single plausible token
        with Watch():
            got = refine_without_waiting(logits, [vision], rule, uniform=seed / 6, capacity=VOCABULARY - 1)
        assert not any(got.overflow.read())
        for row in range(3):
            expected = rule.reference(logits[row], vision, uniform=seed / 6)
            torch.testing.assert_close(got.scores[row], core.scatter(expected, VOCABULARY), atol=1e-5, rtol=1e-5)
            assert int(got.sizes[row]) == len(expected.ids)
            assert bool(got.applied[row]) == (expected.row >= 0)
            assert bool(got.changed[row]) == (expected.row >= 0 and expected.moved)


def test_overflowing_items_are_taken_again_exactly() -> None:
    rule = Rule(1e-3)
    visions = [Rows(20, seed=1), Rows(0), Rows(30, seed=2)]
    batch = Batch(visions, rule, copies=2)
    logits = some_logits(0, 2.0, rows=6)
    logits[:2] *= 10  # the first item fits in 32 candidates, the last does not
    got = batch.refine_without_waiting(logits, 0.0, capacity=32)
    noted: list[tuple[int, int | None]] = []
    plain = batch.refine(logits, range(6), 0.0, lambda row, r: noted.append((row, None if r is None else r.size)))
    torch.testing.assert_close(got.scores, plain, atol=1e-5, rtol=1e-5)
    assert sorted(noted) == [(row, None if size < 0 else size) for row, size in enumerate(got.sizes.tolist())]
    assert got.sizes[0] <= 32 < got.sizes[5]
    assert torch.equal(got.scores[2:4], logits[2:4])


def test_rows_that_are_not_finite_without_waiting() -> None:
    vision = Rows(12)
    logits = some_logits(3, 2.0)
    rule = Rule(1e-2)
    vision.states[rule.reference(logits[0], vision).row] = math.nan
    expected = core.scatter(rule.reference(logits[0], vision), VOCABULARY)
    torch.testing.assert_close(refine_without_waiting(logits, [vision], rule).scores[0], expected, atol=1e-5, rtol=1e-5)
    vision.states[:] = math.inf
    got = refine_without_waiting(logits, [vision], rule)
    assert not got.applied
    expected = core.scatter(rule.reference(logits[0], vision), VOCABULARY)
    torch.testing.assert_close(got.scores[0], expected, atol=1e-5, rtol=1e-5)


# -- through generate() -------------------------------------------------------------------------------------------

METHOD = ReVisiT(alpha=1e-2, layers="all")
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def two_pictures(family: str = "llava") -> Any:
    return families.inputs(family, ["hi", "what is it?"], [[families.picture(0)], [families.picture(1)]])


@pytest.mark.parametrize("extra", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}], ids=str)
def test_forced_on_it_decodes_and_counts_the_same(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.build("llava")
    inputs = two_pictures()
    runs = []
    for free in (True, False):
        monkeypatch.setattr(accelerator, "waiting_is_free", lambda _, free=free: free)
        torch.manual_seed(0)
        trace = Trace()
        out = revisit.generate(model, **inputs, method=METHOD, trace=trace, **{**OPTIONS, **extra})
        runs.append((out.tolist(), [dataclasses.asdict(row) for row in trace.rows]))
    assert runs[0] == runs[1]
    assert sum(row["applied"] for row in runs[0][1]) > 0


@pytest.mark.usefixtures("_flags_are_read_outside")
def test_no_step_waits_when_forced_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "waiting_is_free", lambda _: False)
    model, _ = families.build("llava")
    taken = []
    whole = Batch.refine_without_waiting

    def watched(self: Batch, *args: Any, **kwargs: Any) -> Any:
        with Watch():
            taken.append(whole(self, *args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(Batch, "refine_without_waiting", watched)
    revisit.generate(model, **two_pictures(), method=METHOD, **OPTIONS)
    assert len(taken) == 8


def test_static_cache() -> None:
    model, _ = families.build("llava")
    inputs = two_pictures()
    expected = revisit.generate(model, **inputs, method=METHOD, **OPTIONS)
    assert torch.equal(
        expected, revisit.generate(model, **inputs, method=METHOD, cache_implementation="static", **OPTIONS)
    )


def test_states_are_kept_once_and_shared_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Bank] = []
    make = Bank.__init__

    def spy(self: Bank, *args: Any) -> None:
        make(self, *args)
        seen.append(self)

    monkeypatch.setattr(Bank, "__init__", spy)
    model, _ = families.build("llava")
    inputs = two_pictures()
    revisit.generate(model, **inputs, method=METHOD, num_beams=4, **OPTIONS)
    assert len(seen) == 2  # two items, eight rows
    for bank in seen:
        assert bank.matrix is not None
        storages = {states.untyped_storage().data_ptr() for states in bank.states.by_layer.values()}
        assert storages == {bank.matrix.untyped_storage().data_ptr()}
        assert bank.matrix.untyped_storage().nbytes() == bank.matrix.numel() * 4  # no row of the prompt beyond these
        assert len(bank.matrix) == bank.states.tokens * len(bank.states.layers)


def test_a_compiled_prefill_runs_as_written() -> None:
    """Code compiled before the hooks were there would not call them."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    run = torch.compile(lambda x: module(x), backend="eager")
    run(torch.ones(1, 2))
    calls: list[int] = []
    handle = module[0].register_forward_hook(lambda *_: calls.append(1))
    run(torch.ones(1, 2))
    unseen = len(calls)
    vision._FORCE_EAGER.begin()
    run(torch.ones(1, 2))
    assert len(calls) == unseen + 1
    vision._FORCE_EAGER.begin()  # a second decode in another thread begins before the first has its prefill
    vision._FORCE_EAGER.end()
    run(torch.ones(1, 2))
    assert len(calls) == unseen + 2
    vision._FORCE_EAGER.end()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    handle.remove()
