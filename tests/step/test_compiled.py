"""The compiled loops against the same in float64, at sizes that do not divide evenly."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from revisit.step import reference as core
from revisit.step.compiled import kernel

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason="the compiled loops were not built when the package was installed (no C compiler?)"
)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("height", [1, 3, 4, 63, 64, 65, 130])
@pytest.mark.parametrize(("width", "count"), [(1, 1), (7, 2), (8, 3), (33, 5), (64, 97), (896, 200)])
def test_projection(height: int, width: int, count: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(height * width + count)
    states = torch.randn(height, width, generator=generator)
    head = torch.randn(300, width, generator=generator)
    ids = torch.randperm(300, generator=generator)[:count]
    slots = torch.randperm(250, generator=generator)[:count]
    store = torch.full((250, height), 7.0)
    kernel.project(states, head, ids, store, slots)
    expected = torch.full((250, height), 7.0, dtype=torch.float64)
    expected[slots] = head[ids].double() @ states.double().T
    torch.testing.assert_close(store.double(), expected, atol=1e-5 * math.sqrt(width), rtol=1e-5)


def test_a_product_is_the_same_number_in_every_tile(threads: int) -> None:
    """A column does not depend on which others were asked for with it, nor a row on its neighbours."""
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(71, 61, generator=generator), torch.randn(10, 61, generator=generator)
    ids = torch.arange(10)
    whole, alone, one = torch.zeros(10, 71), torch.zeros(10, 71), torch.zeros(10, 1)
    kernel.project(states, head, ids, whole, ids)
    for token in range(10):
        kernel.project(states, head, ids[token : token + 1], alone, ids[token : token + 1])
    kernel.project(states[70:], head, ids, one, ids)
    assert torch.equal(whole, alone)
    assert torch.equal(whole[:, 70:], one)


@pytest.mark.parametrize("height", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("count", [2, 63, 64, 65, 700])
@pytest.mark.parametrize("spread", [0.01, 3.0, 200.0])
def test_divergences(height: int, count: int, spread: float, threads: int) -> None:
    generator = torch.Generator().manual_seed(height * count)
    store = torch.randn(800, height, generator=generator) * spread + 50
    slots = torch.randperm(800, generator=generator)[:count]
    log_p = (torch.randn(count, generator=generator) * 3).log_softmax(-1)
    expected = core.jsd(log_p.double(), store[slots].T.double().log_softmax(-1))
    got = kernel.divergences(store, slots, log_p)
    torch.testing.assert_close(got.double(), expected, atol=3e-6, rtol=3e-6)


def test_rows_with_a_logit_that_is_not_finite_are_nan() -> None:
    store = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    for row, poison in ((0, math.nan), (33, math.inf), (69, -math.inf)):
        store[3, row] = poison
    used, spared = (kernel.divergences(store, torch.tensor(s), torch.full((2,), 0.5).log()) for s in ([3, 1], [0, 1]))
    assert used.isnan().nonzero().squeeze(-1).tolist() == [0, 33, 69]
    assert spared.isfinite().all()


def test_an_output_probability_of_zero() -> None:
    """ln P is -inf where float32 has no smaller number than zero; such a token costs what the reference says."""
    log_p = torch.tensor([0.0, -200.0]).log_softmax(-1)
    store = torch.tensor([[1.0, 2.0], [3.0, -80.0]])
    expected = core.jsd(log_p, store.T.log_softmax(-1))
    torch.testing.assert_close(kernel.divergences(store, torch.arange(2), log_p), expected, atol=1e-6, rtol=1e-6)


def shortened(height: int, width: int, count: int, spread: float = 1.0) -> tuple[kernel.Shorts, Tensor, Tensor, Tensor]:
    """Integers of random states with columns of random tokens, in the slots 2, 3, …; the states, the head, the ids."""
    generator = torch.Generator().manual_seed(height * width + count)
    states, head = torch.randn(height, width, generator=generator), torch.randn(300, width, generator=generator)
    states[0] *= spread
    states[:, 0] *= spread
    shorts, ids = kernel.Shorts(states, count + 2), torch.randperm(300, generator=generator)[:count]
    shorts.project(height, head, ids, torch.arange(2, count + 2))
    return shorts, states, head, ids


def bounds(shorts: kernel.Shorts, height: int) -> Tensor:
    """How far a logit can be from what the integers say, as kernel.c has it.  -> (height, columns)"""
    step, length, missed, _ = shorts.scales[:height, :, None].double().unbind(1)
    head_step, head_length, head_missed, _ = shorts.column_scales[2:].double().T
    return missed * (head_length + head_missed) + length * head_missed + 32768 * step * head_step


@pytest.mark.parametrize("height", [1, 15, 16, 17, 130])
@pytest.mark.parametrize(("width", "count"), [(1, 1), (7, 2), (8, 3), (33, 5), (64, 97), (896, 100)])
@pytest.mark.parametrize("spread", [1.0, 1e4, 1e-20, 0.0])
def test_logits_in_integers_are_as_near_as_promised(
    height: int, width: int, count: int, spread: float, threads: int
) -> None:
    shorts, states, head, ids = shortened(height, width, count, spread)
    steps = 65536 * shorts.scales[:height, :1].double() * shorts.column_scales[2:, 0].double()
    logits = steps * shorts.store[2:, :height].T
    wrong = (logits - states.double() @ head[ids].double().T).abs()
    assert (wrong <= bounds(shorts, height) * (1 + 1e-6) + 1e-12).all()
    if spread == 1.0 and width == 896:
        assert wrong.mean() < 0.01 < states.double().matmul(head[ids].double().T).std()  # worth having
    fast = shorts.store.clone()
    shorts.store.zero_()
    shorts.project(height, head, ids, torch.arange(2, count + 2), plain=True)
    assert torch.equal(shorts.store[2:, :height], fast[2:, :height])


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_divergences_by_integers_are_as_near_as_promised(sharpness: float, threads: int) -> None:
    shorts, states, head, ids = shortened(200, 60, 50)
    slots, log_p = (
        torch.arange(2, 52),
        (torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3).log_softmax(-1),
    )
    shorts.scales *= sharpness  # as if the states were longer
    exact = core.jsd(log_p.double(), (sharpness * states.double() @ head[ids].double().T).log_softmax(-1))
    wrong = (shorts.divergences(200, slots, log_p) - exact).abs()
    assert (wrong <= 0.3084 * bounds(shorts, 200).amax(1) + 3e-5).all()
    assert wrong.max() < 1e-2


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 3), st.sampled_from([2, 3, 5, 20]), st.sampled_from([0.1, 1, 4, 15]))
def test_how_far_a_divergence_moves(seed: int, reach: float, size: int, spread: float) -> None:
    """If no logit moves by more than `reach`, the divergence moves by at most 0.3084 of it (kernel.c relies on it).

    With X = ln(Q/M) under Q, the derivative along a move e is ½ Σ Q e (X − E X), so at most half of E|X − E X| ≤ 0.6168: the
    worst Q has two values of Q/M, of which one is 2.
    """
    generator = torch.Generator().manual_seed(seed)
    logits, log_p = torch.randn(2, size, generator=generator, dtype=torch.float64) * spread
    gradient_signs = torch.randn(32, size, generator=generator).sign()
    moved = core.jsd(log_p.log_softmax(-1), (logits + reach * gradient_signs).log_softmax(-1))
    start = core.jsd(log_p.log_softmax(-1), logits.log_softmax(-1)[None])
    assert (moved - start).abs().max() <= 0.3084 * reach


def test_the_worst_distribution_for_that() -> None:
    share = torch.linspace(0.001, 0.499, 2000, dtype=torch.float64)  # of M, where Q/M is 2; elsewhere it is `rest`
    rest = (1 - 2 * share) / (1 - share)
    mean = 2 * share * math.log(2) + (1 - share) * rest * rest.log()
    spread = 2 * share * (math.log(2) - mean).abs() + (1 - share) * rest * (rest.log() - mean).abs()
    assert 0.308 < 0.5 * spread.max() < 0.3084


def test_the_nearest_rows() -> None:
    nan, inf = math.nan, math.inf
    for values, largest, row, rows in (
        ([3.0, 1.0, 1.0 + 1e-6, 2.0, 1.0], False, 1, [1, 2, 4]),
        ([3.0, nan, 3.0 - 1e-6, 2.0], True, 0, [0, 2]),
        ([nan, inf, inf], False, 1, [1, 2]),
        ([nan, 5.0, inf], True, 2, [2]),
        ([nan, nan], False, -1, []),
    ):
        best, near = kernel.nearest(torch.tensor(values), largest, 1.0, 1e-5, 8)
        assert (best, near.tolist()) == (row, rows)
    assert kernel.nearest(torch.zeros(9), False, 1.0, 1e-5, 4)[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [1, 5, 127, 128, 129, 5000])
def test_the_plausible_set(size: int) -> None:
    for seed in range(20):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
        found = kernel.plausible(logits, 1e-2)
        if found is not None:
            assert torch.equal(found, core.plausible(logits.log_softmax(-1), 1e-2).nonzero().squeeze(-1))
    assert found is not None


def test_what_cannot_be_compared_is_left_to_the_reference() -> None:
    for bad in (math.nan, math.inf):
        logits = torch.randn(1000)
        logits[999] = bad
        assert kernel.plausible(logits, 1e-2) is None
    assert kernel.plausible(torch.full((300,), -math.inf), 1e-2) is None
    assert kernel.plausible(torch.full((300,), 2.0), 1.0) is None  # all of them on the threshold


def test_other_types_are_left_to_torch() -> None:
    assert kernel.suits(torch.zeros(3))
    assert not kernel.suits(torch.zeros(3).double())
    assert not kernel.suits(torch.zeros(3, 3), torch.zeros(3, 3).T)


def test_it_can_be_switched_off() -> None:
    code = "from revisit.step.compiled import kernel; print(kernel.available())"
    for value, answer in (("0", "False"), ("1", "True")):
        run = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "REVISIT_KERNEL": value}, capture_output=True, text=True
        )
        assert run.stdout.strip() == answer, run.stderr


def test_a_library_of_another_source_is_not_used(tmp_path: Path) -> None:
    """As after an update of a clone that was not installed again."""
    for name in ("kernel.py", "kernel.c"):
        shutil.copy(Path(kernel.__file__).with_name(name), tmp_path)
    for built in Path(kernel.__file__).parent.glob("_kernel*"):
        shutil.copy(built, tmp_path)
    code = "import runpy; print(runpy.run_path('kernel.py')['available']())"
    for more, answer in (("", "True"), ("/* changed */", "False")):
        with (tmp_path / "kernel.c").open("a") as source:
            source.write(more)
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert run.stdout.strip() == answer, run.stderr
        assert ("install the package again" in run.stderr) == (answer == "False")
