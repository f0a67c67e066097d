"""The method's pure functions: golden values, and properties that must hold for any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from revisit.step import reference as core


class Rows:
    """Vision rows whose logits over the whole vocabulary are given."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.all = logits

    @property
    def rows(self) -> int:
        return len(self.all)

    def logits(self, start: int, stop: int, ids: torch.Tensor) -> torch.Tensor:
        return self.all[start:stop, ids]


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


OFFICIAL = {"divergence": "official", "normalize": False}


def close(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, vector(*expected), atol=tolerance, rtol=0)


def test_golden_a() -> None:
    rows = torch.stack([vector(0, 1, 2, 0, 1, 9), vector(1, 0.5, 0.2, -2, 0, 0), vector(3, 0, 0, 0, 0, 0)])
    logits = vector(2, 1.5, 0, -1, -3, -6)
    result = core.refine(logits, Rows(rows), alpha=0.1, **OFFICIAL)
    assert result.ids.tolist() == [0, 1, 2]
    close(result.base, [-0.554957, -1.054957, -2.554957])
    close(result.vision, [-0.720694, -1.220694, -1.520694])
    close(result.divergences, [0.104258, 0.007301, 0.036673])
    assert result.row == 1
    close(core.scatter(result, 6)[:3], [-1.275651, -2.275651, -4.075651])
    assert core.scatter(result, 6)[3:].eq(-math.inf).all()
    paper = core.refine(logits, Rows(rows), alpha=0.1)
    close(paper.divergences, [0.235965, 0.020356, 0.087415])
    assert paper.row == 1


def test_golden_b_official_and_textbook_divergence_choose_differently() -> None:
    rows = torch.stack([vector(-5.2, 1.2, 0.4, 0), vector(-2.8, 0.4, -2.0, -3.4)])
    logits = vector(2.1, -0.3, -1.2, 1.9)
    official = core.refine(logits, Rows(rows), alpha=1e-3, **OFFICIAL)
    close(official.divergences, [0.237869, 0.194390])
    close(official.final, [-4.009051, -3.209051, -6.509051, -4.809051])
    textbook = core.refine(logits, Rows(rows), alpha=1e-3, normalize=False)
    close(textbook.divergences, [0.394148, 0.471805])
    close(textbook.final, [-7.626810, -3.626810, -5.326810, -2.626810])
    assert (int(official.final.argmax()), int(textbook.final.argmax())) == (1, 3)


def test_golden_c_one_plausible_token_is_an_identity_step() -> None:
    class Untouchable(Rows):
        def logits(self, start: int, stop: int, ids: torch.Tensor) -> torch.Tensor:
            raise AssertionError("no vision row may be read")

    result = core.refine(vector(20, 0, 0, 0), Untouchable(torch.zeros(2, 4)), alpha=1e-5, **OFFICIAL)
    assert core.scatter(result, 4).tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert result.row == -1


def test_other_divergences_by_hand() -> None:
    p, q = vector(0.5, 0.5).log(), vector(0.9, 0.1).log()[None]
    expected_kl = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    expected_cosine = 1 - 0.5 / (math.sqrt(0.5) * math.sqrt(0.82))
    close(core.kl(p, q), [expected_kl])
    close(core.cosine(p, q), [expected_cosine])


def test_fusions_by_hand() -> None:
    p, q = vector(0.6, 0.4).log(), vector(0.2, 0.8).log()
    close(core.fuse(p, q, "poe", 1.0).exp(), [0.12 / 0.44, 0.32 / 0.44])
    close(core.fuse(p, q, "poe", 0.0).exp(), [0.6, 0.4])
    close(core.fuse(p, q, "interpolation", 0.25).exp(), [0.5, 0.5])


def test_zero_probability_rows_do_not_become_nan() -> None:
    p = vector(0.0, 1.0).log()
    q = vector(0.0, 1.0).log()[None]
    for name, function in core.DIVERGENCES.items():
        assert abs(float(function(p, q)[0])) < 1e-12, name


@pytest.mark.parametrize("how", ["min", "max", "random"])
def test_rows_with_nan_are_never_selected(how: str) -> None:
    divergences = vector(math.nan, 0.3, math.nan, 0.1)
    for uniform in (0.0, 0.49, 0.51, 0.99):
        assert core.select(divergences, how, uniform) in (1, 3)
    assert core.select(vector(math.nan, math.nan), how) == -1


def test_overflowing_vision_rows_lose_and_all_overflowing_is_an_identity() -> None:
    logits = vector(1, 0.5, 0.2).float()
    inf = torch.full((1, 3), math.inf)
    mixed = core.refine(logits, Rows(torch.cat([inf, torch.zeros(1, 3)])), alpha=1e-2)
    assert mixed.row == 1
    none = core.refine(logits, Rows(inf), alpha=1e-2)
    assert none.row == -1
    torch.testing.assert_close(none.final, none.base)


def test_half_precision_rows_are_compared_in_float32() -> None:
    rows = (torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3).half()
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    half = core.refine(logits, Rows(rows), alpha=1e-3)
    full = core.refine(logits, Rows(rows.float()), alpha=1e-3)
    assert half.row == full.row
    torch.testing.assert_close(half.final, full.final)


def test_slices_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, rows = torch.randn(30, generator=generator), torch.randn(101, 30, generator=generator)
    whole = core.refine(logits, Rows(rows), alpha=1e-4)
    monkeypatch.setattr(core, "CHUNK_NUMBERS", 64)
    sliced = core.refine(logits, Rows(rows), alpha=1e-4)
    torch.testing.assert_close(sliced.divergences, whole.divergences)
    assert sliced.row == whole.row


# -- properties ---------------------------------------------------------------------------------------------------

numbers = st.floats(-12, 12, allow_nan=False, width=32)


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, float]:
    vocabulary = draw(st.integers(2, 12))
    count = draw(st.integers(1, 6))
    logits = draw(st.lists(numbers, min_size=vocabulary, max_size=vocabulary))
    rows = draw(st.lists(st.lists(numbers, min_size=vocabulary, max_size=vocabulary), min_size=count, max_size=count))
    alpha = draw(st.sampled_from([1.0, 0.5, 0.1, 1e-2, 1e-5]))
    return torch.tensor(logits, dtype=torch.float64), torch.tensor(rows, dtype=torch.float64), alpha


variants = st.fixed_dictionaries(
    {
        "divergence": st.sampled_from(["jsd", "official", "kl", "cosine"]),
        "how": st.sampled_from(["min", "max"]),
        "fusion": st.sampled_from(["poe", "interpolation"]),
        "weight": st.sampled_from([0.0, 0.3, 1.0]),
    }
)


@given(steps(), variants)
@settings(max_examples=150, deadline=None)
def test_final_is_a_distribution_on_the_plausible_set(step: tuple, variant: dict) -> None:
    logits, rows, alpha = step
    result = core.refine(logits, Rows(rows), alpha=alpha, **variant)
    scores = core.scatter(result, len(logits))
    outside = torch.ones_like(logits, dtype=torch.bool)
    outside[result.ids] = False
    assert scores.exp().sum().item() == pytest.approx(1.0, abs=1e-9)
    assert scores[outside].eq(-math.inf).all()
    p = logits.softmax(-1)
    assert (p[result.ids] >= alpha * p.max() * (1 - 1e-9)).all()
    assert (p[outside] <= alpha * p.max() * (1 + 1e-9)).all()
    assert int(logits.argmax()) in result.ids.tolist()


@given(steps(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_permuting_vision_rows_permutes_the_choice(step: tuple, random) -> None:
    logits, rows, alpha = step
    order = list(range(len(rows)))
    random.shuffle(order)
    plain = core.refine(logits, Rows(rows), alpha=alpha)
    shuffled = core.refine(logits, Rows(rows[order]), alpha=alpha)
    if plain.row < 0:
        assert shuffled.row < 0
        return
    chosen = plain.divergences[plain.row]
    assert shuffled.divergences[shuffled.row].item() == pytest.approx(chosen.item(), abs=1e-12)
    if (plain.divergences - chosen).abs().lt(1e-9).sum() == 1:  # unless there is a tie
        assert order[shuffled.row] == plain.row


@given(steps())
@settings(max_examples=100, deadline=None)
def test_identical_vision_sharpens_but_never_reorders(step: tuple) -> None:
    logits, _, alpha = step
    result = core.refine(logits, Rows(logits[None]), alpha=alpha)
    base, final = result.base.exp(), result.final.exp()
    assert final.max() >= base.max() - 1e-9
    order = base.argsort(descending=True, stable=True)
    assert (final[order].diff() <= 1e-9).all()


@given(steps(), st.sampled_from(["jsd", "official"]))
@settings(max_examples=100, deadline=None)
def test_float32_and_float64_agree(step: tuple, divergence: str) -> None:
    logits, rows, alpha = step
    wide = core.refine(logits, Rows(rows), alpha=alpha, divergence=divergence)
    narrow = core.refine(logits.float(), Rows(rows.float()), alpha=alpha, divergence=divergence)
    p = logits.log_softmax(-1)
    if (p - p.max() - math.log(alpha)).abs().min() < 1e-5:
        return  # a token right on the threshold may fall on either side
    assert wide.ids.tolist() == narrow.ids.tolist()
    if wide.divergences is not None and narrow.divergences is not None:
        torch.testing.assert_close(narrow.divergences.double(), wide.divergences, atol=2e-5, rtol=2e-4)
        ranked = wide.divergences.sort().values
        if len(ranked) == 1 or ranked[1] - ranked[0] > 1e-3:
            assert wide.row == narrow.row
            torch.testing.assert_close(narrow.final.double(), wide.final, atol=1e-4, rtol=1e-4)


@given(steps())
@settings(max_examples=60, deadline=None)
def test_jsd_is_bounded_and_symmetric(step: tuple) -> None:
    logits, rows, _ = step
    log_p, log_q = logits.log_softmax(-1), rows.log_softmax(-1)
    there = core.jsd(log_p, log_q)
    back = torch.stack([core.jsd(row, log_p[None])[0] for row in log_q])
    assert (there >= -1e-12).all()
    assert (there <= math.log(2) + 1e-12).all()
    torch.testing.assert_close(there, back)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_published_rounding_of_both_softmaxes(dtype: torch.dtype) -> None:
    """In half precision Q is a rounded softmax, not the exponential of a rounded log-softmax."""
    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(50, 30, generator=generator)).to(dtype)
    log_p = (4 * torch.randn(30, generator=generator)).log_softmax(-1)
    log_q, q = logits.log_softmax(-1), logits.softmax(-1)
    m = 0.5 * (log_p.exp() + q)
    want = 0.5 * ((m * (m.log() - log_p)).mean(-1) + (m * (m.log() - log_q)).mean(-1))
    got = core.compare(log_p, logits, "official", True)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, core.official_divergence(log_p, log_q), rtol=1e-4, atol=0)
