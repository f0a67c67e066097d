"""The reference: golden values, and properties that hold for any input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from revisit.models.head import LinearHead
from revisit.step import reference
from revisit.step.interface import RESOLUTION, RowDetail
from revisit.step.rule import Rule


def identity(states: torch.Tensor) -> LinearHead:
    """Return a head for states that are logits over the whole vocabulary."""
    return LinearHead(torch.eye(states.shape[-1], dtype=states.dtype))


def refine(
    logits: torch.Tensor, rows: torch.Tensor, uniform: float = 0.0, written: torch.Tensor | None = None, **settings: Any
) -> RowDetail:
    result = reference.refine_row(logits, rows, identity(rows), Rule(**settings), uniform, written)
    assert result is not None
    return result


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


OFFICIAL = {"divergence": "official", "normalize": False}


def close(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, vector(*expected), atol=tolerance, rtol=0)


def test_golden_a() -> None:
    rows = torch.stack([vector(0, 1, 2, 0, 1, 9), vector(1, 0.5, 0.2, -2, 0, 0), vector(3, 0, 0, 0, 0, 0)])
    logits = vector(2, 1.5, 0, -1, -3, -6)
    result = refine(logits, rows, alpha=0.1, **OFFICIAL)
    assert result.ids.tolist() == [0, 1, 2]
    close(result.base, [-0.554957, -1.054957, -2.554957])
    close(result.vision, [-0.720694, -1.220694, -1.520694])
    close(result.divergences, [0.104258, 0.007301, 0.036673])
    assert result.state == 1
    close(reference.scatter(result, logits)[:3], [-1.275651, -2.275651, -4.075651])
    assert reference.scatter(result, logits)[3:].eq(-math.inf).all()
    paper = refine(logits, rows, alpha=0.1)
    close(paper.divergences, [0.235965, 0.020356, 0.087415])
    assert paper.state == 1


def test_golden_b_official_and_textbook_divergence_choose_differently() -> None:
    rows = torch.stack([vector(-5.2, 1.2, 0.4, 0), vector(-2.8, 0.4, -2.0, -3.4)])
    logits = vector(2.1, -0.3, -1.2, 1.9)
    official = refine(logits, rows, alpha=1e-3, **OFFICIAL)
    close(official.divergences, [0.237869, 0.194390])
    close(official.final, [-4.009051, -3.209051, -6.509051, -4.809051])
    textbook = refine(logits, rows, alpha=1e-3, normalize=False)
    close(textbook.divergences, [0.394148, 0.471805])
    close(textbook.final, [-7.626810, -3.626810, -5.326810, -2.626810])
    assert (int(official.final.argmax()), int(textbook.final.argmax())) == (1, 3)


def test_golden_c_one_plausible_token_is_an_identity_step() -> None:
    logits = vector(20, 0, 0, 0)
    result = refine(logits, torch.full((2, 4), math.nan), alpha=1e-5, **OFFICIAL)
    assert reference.scatter(result, logits).tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert (result.state, result.divergences) == (-1, None)  # no vision token was compared


def test_other_divergences_by_hand() -> None:
    p, q = vector(0.5, 0.5).log(), vector(0.9, 0.1).log()[None]
    expected_kl = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    expected_cosine = 1 - 0.5 / (math.sqrt(0.5) * math.sqrt(0.82))
    close(reference.kl(p, q), [expected_kl])
    close(reference.cosine(p, q), [expected_cosine])


def test_fusions_by_hand() -> None:
    p, q = vector(0.6, 0.4).log(), vector(0.2, 0.8).log()
    close(reference.fuse(p, q, "poe", 1.0).exp(), [0.12, 0.32])
    close(reference.fuse(p, q, "poe", 0.0).exp(), [0.6, 0.4])
    close(reference.fuse(p, q, "interpolation", 0.25).exp(), [0.5, 0.5])


def test_zero_probability_rows_do_not_become_nan() -> None:
    p = vector(0.0, 1.0).log()
    q = vector(0.0, 1.0).log()[None]
    for name, function in reference.DIVERGENCES.items():
        assert abs(float(function(p, q)[0])) < 1e-12, name


@pytest.mark.parametrize("select", ["min", "max", "random", "soft"])
def test_vision_tokens_with_nan_are_never_selected(select: Any) -> None:
    divergences = vector(math.nan, 0.3, math.nan, 0.1)
    for uniform in (0.0, 0.49, 0.51, 0.99):
        chosen, shares = reference.select(divergences, 4, Rule(select=select), uniform)
        assert set(chosen.tolist()) <= {1, 3}
        assert float(shares.sum()) == pytest.approx(1)
    assert not len(reference.select(vector(math.nan, math.nan), 4, Rule(select=select))[0])


def test_half_precision_rows_are_compared_in_float32() -> None:
    rows = (torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3).half()
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1))
    half = refine(logits, rows, alpha=1e-3)
    full = refine(logits, rows.float(), alpha=1e-3)
    assert half.state == full.state
    torch.testing.assert_close(half.final, full.final)


def test_slices_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    logits, rows = torch.randn(30, generator=generator), torch.randn(101, 30, generator=generator)
    whole = refine(logits, rows, alpha=1e-4)
    monkeypatch.setattr(reference, "CHUNK_NUMBERS", 64)
    sliced = refine(logits, rows, alpha=1e-4)
    torch.testing.assert_close(sliced.divergences, whole.divergences)
    assert sliced.state == whole.state


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
        "select": st.sampled_from(["min", "max"]),
        "fusion": st.sampled_from(["poe", "interpolation"]),
        "weight": st.sampled_from([0.0, 0.3, 1.0]),
    }
)


@given(steps(), variants)
@settings(max_examples=150, deadline=None)
def test_final_is_a_distribution_on_the_plausible_set(step: tuple, variant: dict) -> None:
    logits, rows, alpha = step
    result = refine(logits, rows, alpha=alpha, **variant)
    scores = reference.scatter(result, logits)
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
    plain = refine(logits, rows, alpha=alpha)
    shuffled = refine(logits, rows[order], alpha=alpha)
    if plain.state < 0:
        assert shuffled.state < 0
        return
    chosen = plain.divergences[plain.state]
    assert shuffled.divergences[shuffled.state].item() == pytest.approx(chosen.item(), abs=RESOLUTION)
    if (plain.divergences - chosen).abs().lt(2 * RESOLUTION).sum() == 1:  # unless there is a tie
        assert order[shuffled.state] == plain.state


@given(steps())
@settings(max_examples=100, deadline=None)
def test_identical_vision_sharpens_but_never_reorders(step: tuple) -> None:
    logits, _, alpha = step
    result = refine(logits, logits[None], alpha=alpha)
    base, final = result.base.exp(), result.final.exp()
    assert final.max() >= base.max() - 1e-9
    order = base.argsort(descending=True, stable=True)
    assert (final[order].diff() <= 1e-9).all()


@given(steps(), st.sampled_from(["jsd", "official"]))
@settings(max_examples=100, deadline=None)
def test_float32_and_float64_agree(step: tuple, divergence: str) -> None:
    logits, rows, alpha = step
    wide = refine(logits, rows, alpha=alpha, divergence=divergence)
    narrow = refine(logits.float(), rows.float(), alpha=alpha, divergence=divergence)
    p = logits.log_softmax(-1)
    if (p - p.max() - math.log(alpha)).abs().min() < 1e-5:
        return  # a token right on the threshold may fall on either side
    assert wide.ids.tolist() == narrow.ids.tolist()
    if wide.divergences is not None and narrow.divergences is not None:
        torch.testing.assert_close(narrow.divergences.double(), wide.divergences, atol=2e-5, rtol=2e-4)
        ranked = wide.divergences.sort().values
        if len(ranked) == 1 or ranked[1] - ranked[0] > 1e-3:
            assert wide.state == narrow.state
            torch.testing.assert_close(narrow.final.double(), wide.final, atol=1e-4, rtol=1e-4)


@given(steps())
@settings(max_examples=60, deadline=None)
def test_jsd_is_bounded_and_symmetric(step: tuple) -> None:
    logits, rows, _ = step
    log_p, log_q = logits.log_softmax(-1), rows.log_softmax(-1)
    there = reference.jsd(log_p, log_q)
    back = torch.stack([reference.jsd(row, log_p[None])[0] for row in log_q])
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
    got = reference.logit_divergence(log_p, logits, "official", True)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(got, reference.official_divergence(log_p, log_q), rtol=1e-4, atol=0)


# -- corners ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[-math.inf] * 4, [0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0]], ids=str)
def test_logits_without_a_distribution_are_unchanged(bad: list[float]) -> None:
    logits = torch.tensor(bad)
    for rule in (Rule(), Rule(vocabulary="full")):
        result = reference.refine_row(logits, torch.zeros(2, 4), identity(torch.zeros(2, 4)), rule)
        assert result is None
        assert reference.scatter(result, logits) is logits


def test_without_vision_tokens_the_logits_are_unchanged() -> None:
    assert reference.refine_row(vector(1, 2), torch.zeros(0, 2), identity(torch.zeros(0, 2)), Rule()) is None


def test_overflowing_vision_rows_are_never_selected() -> None:
    logits = torch.tensor([1.0, 0.5, 0.2])
    bad = torch.tensor([[math.inf] * 3, [1e38, -1e38, 0.0], [-2e30, 0.0, 0.0]])
    result = refine(logits, torch.cat([bad, torch.tensor([[1.0, 0.5, 0.3]])]), alpha=1e-2)
    assert result.state == 3
    assert result.divergences is not None
    assert result.divergences.isnan().tolist() == [True, True, True, False]
    none = refine(logits, bad, alpha=1e-2)
    assert none.state == -1
    torch.testing.assert_close(none.final, none.base)


def test_a_cap_does_not_hide_an_overflow() -> None:
    states = torch.tensor([[3e38, 3e38], [2e30, 0.0], [1e20, 0.5], [0.1, 0.3]])
    head = LinearHead(torch.tensor([[2.0, 1.0], [2.0, -1.0], [0.0, 1.0]]), transform=torch.tanh)
    result = reference.refine_row(torch.tensor([1.0, 0.5, 0.2]), states, head, Rule(alpha=1e-2))
    assert result is not None
    assert result.divergences is not None
    assert result.divergences.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize(("select", "first"), [("min", 1), ("max", 0)])
def test_ties_go_to_the_first(select: Any, first: int) -> None:
    """Also if equal numbers differ in their last bits because of the order of a sum."""
    far, near = torch.tensor([5.0, -5.0, 0.0]), torch.tensor([1.0, 0.5, 0.2])
    rows = torch.stack([far, near * (1 + 2e-7), near, far * (1 - 1e-7), near])
    assert refine(torch.tensor([1.0, 0.5, 0.2]), rows, alpha=1e-3, select=select).state == first


def test_the_released_rounding_compares_numbers_as_they_are() -> None:
    divergences = vector(0.1 + 1e-9, 0.1)
    assert reference.select(divergences, 4, Rule())[0].tolist() == [0]
    assert reference.select(divergences, 4, Rule(precision="model"))[0].tolist() == [1]


# -- more than the paper ------------------------------------------------------------------------------------------


def test_adaptive_weights_by_hand() -> None:
    p, q = vector(0.75, 0.25).log(), vector(0.25, 0.75).log()
    divergence = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    agreement, uncertainty = 1 - divergence / math.log(2), math.sqrt(0.25)
    for name, expected in (("agreement", agreement), ("uncertainty", uncertainty), ("both", agreement * uncertainty)):
        assert float(reference.vision_weight(p, q, name)) == pytest.approx(expected)
    apart = vector(1.0, 0.0).log(), vector(0.0, 1.0).log()
    assert float(reference.vision_weight(*apart, "agreement")) == pytest.approx(0, abs=1e-12)
    assert float(reference.vision_weight(p, p, "agreement")) == pytest.approx(1)
    result = refine(vector(1, 0.5, 0.2), vector(0.1, 0.5, 0.3)[None], weight="agreement")
    torch.testing.assert_close(result.final, (result.base + result.weight * result.vision).log_softmax(-1))
    assert 0 < result.weight < 1


def test_once_by_hand() -> None:
    """P = (½, ¼, ¼) and Q = (½, ⅜, ⅛)."""
    logits, rows = vector(2, 1, 1).log(), vector(4, 3, 1).log()[None]
    every = torch.tensor([0, 1, 2])
    for once, written, final in (
        (1.0, torch.tensor([0, -1, 0]), [4, 3, 1]),  # the others' mean is ¼; -1 is no token, and twice is once
        (0.5, torch.tensor([0]), [math.sqrt(32), 3, 1]),
        (1.0, torch.tensor([0, 1]), [2, 1, 1]),  # only ⅛ is left
        (1.0, torch.tensor([1, 2]), [16, 6, 2]),  # token 1 is at the mean ⅜, so nothing is above it
        (1.0, every, [2, 1, 1]),
        (1.0, None, [16, 6, 2]),
        (0.0, every, [16, 6, 2]),
    ):
        result = refine(logits, rows, written=written, once=once)
        close(result.final.exp() * sum(final), final)
        close(result.vision.exp() * 8, [4, 3, 1])
    mixed = refine(logits, rows, written=torch.tensor([1]), once=1.0, fusion="interpolation", weight=0.5)
    close(mixed.final.exp(), [24 / 44, 11 / 44, 9 / 44])
    adaptive = refine(logits, rows, written=every, once=1.0, weight="agreement")
    assert adaptive.weight == refine(logits, rows, weight="agreement").weight


WEIGHTS = st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0, 50.0, 1000.0, "agreement", "uncertainty", "both"])


@given(steps(), st.sets(st.integers(0, 11)), WEIGHTS, st.sampled_from(["poe", "interpolation"]), st.booleans())
@settings(max_examples=1000, deadline=None)
def test_once_lets_the_image_promote_no_written_token(
    step: tuple, written: set[int], weight: Any, fusion: str, single: bool
) -> None:
    """Limited tokens keep their probability, and all others keep their scores."""
    logits, rows, alpha = (value.float() if single and isinstance(value, torch.Tensor) else value for value in step)
    if fusion == "interpolation" and isinstance(weight, float):
        weight = min(weight, 1.0)
    options: dict[str, Any] = {"alpha": alpha, "weight": weight, "fusion": fusion}
    tokens = torch.tensor(sorted(written), dtype=torch.long)
    free = refine(logits, rows, **options, normalize=False)
    scores = refine(logits, rows, **options, normalize=False, written=tokens, once=1.0).final
    final = refine(logits, rows, **options, written=tokens, once=1.0).final
    rounding = (1e-5 if single else 1e-12) * (1 + float(free.final.abs().max()))  # of the scores
    repeated = torch.isin(free.ids, tokens)
    limited = scores != free.final
    assert not limited[~repeated].any()
    assert (final[repeated] <= free.base[repeated] + rounding).all()
    torch.testing.assert_close(final[limited], free.base[limited], atol=rounding, rtol=0)


@given(steps(), st.sets(st.integers(0, 11), max_size=4))
@settings(max_examples=100, deadline=None)
def test_part_of_once_lies_between_none_and_all(step: tuple, written: set[int]) -> None:
    logits, rows, alpha = step
    none, part, every = (
        refine(logits, rows, written=torch.tensor(sorted(written)), alpha=alpha, once=once, normalize=False).final
        for once in (0.0, 0.3, 1.0)
    )
    torch.testing.assert_close(part, none + 0.3 * (every - none))


@pytest.mark.parametrize("divergence", ["jsd", "official", "kl", "cosine"])
def test_the_agreement_weight_uses_the_true_divergence(divergence: Any) -> None:
    logits, rows = vector(1, 0.5, 0.2), vector(0.1, 0.5, 0.3)[None]
    result = refine(logits, rows, weight="agreement", divergence=divergence)
    assert result.weight == pytest.approx(refine(logits, rows, weight="agreement").weight)


def test_several_vision_tokens_are_averaged() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, rows = torch.randn(8, generator=generator).double(), torch.randn(20, 8, generator=generator).double()
    one, three, every = (refine(logits, rows, neighbors=n) for n in (1, 3, 100))
    assert one.divergences is not None
    nearest = one.divergences.argsort()[:3]
    assert one.state == three.state == int(nearest[0])
    torch.testing.assert_close(three.vision.exp(), rows.softmax(-1)[nearest].mean(0))
    torch.testing.assert_close(every.vision.exp(), rows.softmax(-1).mean(0))
    soft = refine(logits, rows, select="soft")
    shares = (-one.divergences / 0.1).softmax(-1)
    torch.testing.assert_close(soft.vision.exp(), shares @ rows.softmax(-1))
    assert soft.state == one.state
