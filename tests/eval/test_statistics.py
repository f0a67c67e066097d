"""Intervals and tests against values worked out by hand, printed in the paper, or given by scipy directly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from revisit.errors import RevisitError
from revisit.eval import statistics as s


def terms(numerators: list[float], denominators: list[float] | None = None) -> dict[str, tuple[float, float]]:
    denominators = denominators or [1.0] * len(numerators)
    return {f"u{i}": (n, d) for i, (n, d) in enumerate(zip(numerators, denominators, strict=True))}


@pytest.mark.parametrize(
    ("percent", "low", "high"),
    [(2.03, 1.96, 2.10), (7.87, 7.74, 8.00), (12.38, 12.23, 12.54), (40.44, 40.21, 40.67), (89.24, 89.09, 89.39)],
)
def test_wilson_gives_the_intervals_printed_in_the_paper(percent: float, low: float, high: float) -> None:
    n = 173_173
    got = s.wilson(round(percent / 100 * n), n)
    assert (100 * got[0], 100 * got[1]) == pytest.approx((low, high), abs=0.011)


def test_holm_by_hand() -> None:
    # Sorted .01 .02 .04 → ×3, ×2, ×1, made monotone: .03, .04, .04
    assert s.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    out = s.holm([0.01, math.nan, 0.02])
    assert out[0] == pytest.approx(0.02)
    assert math.isnan(out[1])
    assert out[2] == pytest.approx(0.02)
    assert s.holm([]) == []


def test_corrected_interval_and_corrected_p_agree() -> None:
    rng = np.random.default_rng(5)
    base = {f"q{i}": (float(rng.random() < 0.5), 1.0) for i in range(300)}
    found = []
    for shift in (0.0, 0.03, 0.05, 0.08, 0.1):
        better = {u: (max(n, float(rng.random() < shift)), d) for u, (n, d) in base.items()}
        found.append(s.paired(base, better, resamples=1999))
    raw = [pair.p_bootstrap for pair in found]
    levels, corrected = s.holm_levels(raw), s.holm(raw)
    for pair, level, p in zip(found, levels, corrected, strict=True):
        at = pair.at(level)
        assert (p < 0.05) == (at.low > 0 or at.high < 0)
    assert s.holm_levels([0.001, math.nan, 0.02, 0.2]) == pytest.approx([1 - 0.05 / 3, 0.95, 1 - 0.05 / 2, 0.95])
    assert s.holm_levels([0.3, 0.04]) == pytest.approx([0.975, 0.975])  # not rejected: both at the first step


def test_proportions_get_wilson_on_their_own_scale() -> None:
    rate = s.interval(terms([1, 0, 0, 0]))
    percent = s.interval(terms([100, 0, 0, 0]), full=100)
    assert rate.kind == percent.kind == "wilson"
    assert (rate.low, rate.high) == pytest.approx(s.wilson(1, 4))
    assert percent.high == pytest.approx(100 * rate.high)
    precision = s.interval(terms([1, 0, 0, 1], [1, 0, 1, 1]))  # two of three positive predictions are right
    assert (precision.low, precision.high) == pytest.approx(s.wilson(2, 3))
    assert s.interval(terms([0, 0, 0])).high == pytest.approx(s.wilson(0, 3)[1])
    assert s.interval(terms([0, 0, 0]), full=100).high == pytest.approx(100 * s.wilson(0, 3)[1])


def test_ratio_bootstrap_agrees_with_scipy_run_directly() -> None:
    rng = np.random.default_rng(3)
    mentions = rng.integers(1, 9, 200).astype(float)
    wrong = rng.binomial(mentions.astype(int), 0.2).astype(float)
    got = s.interval(terms(list(wrong), list(mentions)), resamples=4000)
    direct = stats.bootstrap(
        (wrong, mentions),
        lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True,
        method="percentile",
        n_resamples=4000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert got.kind == "bootstrap"
    assert got.low == pytest.approx(direct.low, abs=0.006)
    assert got.high == pytest.approx(direct.high, abs=0.006)
    assert got.low < wrong.sum() / mentions.sum() < got.high


def test_mean_of_ratios_resamples_within_strata() -> None:
    constant, varying = terms([0.5] * 50), terms([0.0, 0.5, 1.0] * 30)
    alone = s.mean_interval([[varying]], resamples=2000)
    both = s.mean_interval([[constant], [varying]], resamples=2000)
    assert (both.high - both.low) == pytest.approx((alone.high - alone.low) / 2, rel=0.15)
    assert both.low < 0.5 < both.high
    settings = {f"{name}/F1": varying for name in "ab"}
    assert s.metric_interval("F1", 0.5, settings) == s.mean_interval([[varying], [varying]])
    assert s.metric_interval("F1", 0.6, settings) is None  # not their mean: no interval is better than a wrong one


def swap_p_value(a: np.ndarray, b: np.ndarray, wa: np.ndarray, wb: np.ndarray) -> float:
    """The exact two-sided p-value, every swap enumerated by hand: twice the smaller tail."""
    observed = b.sum() / wb.sum() - a.sum() / wa.sum()
    null = []
    for swap in itertools.product([False, True], repeat=len(a)):
        m = np.array(swap)
        x, y = np.where(m, b, a), np.where(m, a, b)
        wx, wy = np.where(m, wb, wa), np.where(m, wa, wb)
        null.append(y.sum() / wy.sum() - x.sum() / wx.sum())
    low = sum(v <= observed + 1e-12 for v in null) / len(null)
    high = sum(v >= observed - 1e-12 for v in null) / len(null)
    return min(1.0, 2 * min(low, high))


def test_permutation_is_exact_for_few_units() -> None:
    a, b = np.array([1.0, 2, 0, 3, 1, 0]), np.array([0.0, 1, 0, 1, 1, 0])
    wa, wb = np.array([3.0, 4, 2, 5, 2, 1]), np.array([3.0, 3, 2, 6, 2, 1])
    got = s.paired(terms(list(a), list(wa)), terms(list(b), list(wb)), resamples=999)
    assert got.difference == pytest.approx(3 / 17 - 7 / 17)
    assert got.p_permutation == pytest.approx(swap_p_value(a, b, wa, wb))
    assert got.units == 6


def test_paired_test_finds_a_real_difference_and_no_false_one() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(400)
    better = terms(list(base + 0.05 + rng.normal(0, 0.1, 400)))
    found = s.paired(terms(list(base)), better, resamples=1999)
    assert found.low > 0
    assert found.p_permutation == pytest.approx(2 / 2000)
    assert found.p_bootstrap == pytest.approx(2 / 2000)
    noise = s.paired(terms(list(base)), terms(list(base + rng.normal(0, 0.1, 400))), resamples=1999)
    assert noise.low < 0 < noise.high
    assert noise.p_permutation > 0.01


def test_pairing_matters_and_order_does_not() -> None:
    rng = np.random.default_rng(5)
    base = rng.normal(0, 10, 100)
    one, two = terms(list(base)), terms(list(base + 1 + rng.normal(0, 0.5, 100)))
    forward = s.paired(one, two, resamples=999)
    assert forward == s.paired(one, dict(reversed(two.items())), resamples=999)
    assert forward.p_permutation < 0.01  # unpaired, a shift of 1 under a spread of 10 would drown


def test_mean_of_ratios_is_compared_stratum_by_stratum() -> None:
    rng = np.random.default_rng(2)
    base = [terms(list(rng.random(n))) for n in (60, 200)]
    method = [{u: (n + 0.1, d) for u, (n, d) in part.items()} for part in base]
    got = s.paired_runs([[b] for b in base], [[m] for m in method], resamples=499)
    assert (got.difference, got.low, got.high) == pytest.approx((0.1, 0.1, 0.1))
    assert got.p_bootstrap == pytest.approx(2 / 500)
    assert math.isnan(got.p_permutation)
    assert got.units == 260


def test_identical_methods_do_not_differ() -> None:
    same = terms([0, 1, 1, 0], [1, 2, 3, 4])
    assert s.paired(same, dict(same)) == s.Paired(0.0, 0.0, 0.0, 1.0, 1.0, 4)


def test_different_units_raise_with_their_name() -> None:
    with pytest.raises(RevisitError, match="1 are only on one side, such as 'u2'"):
        s.paired(terms([1, 2]), terms([1, 2, 3]))


def test_undefined_metrics_stay_undefined() -> None:
    empty = terms([0.0, 0.0], [0.0, 0.0])
    assert math.isnan(s.interval(empty).low)
    assert math.isnan(s.paired(empty, empty).difference)
    assert math.isnan(s.interval(terms([0.3], [1.0])).low)  # one unit has no spread


def test_a_single_differing_unit_is_not_significant() -> None:
    base = {str(i): (1.0, 1.0) for i in range(10)}
    assert s.paired(base, {**base, "3": (0.0, 1.0)}, resamples=99).p_permutation == 1.0


def test_swaps_with_an_empty_denominator_are_ignored() -> None:
    """Two of the four swaps are undefined; the other two differ as much as the observation."""
    base = {"a": (1.0, 1.0), "b": (0.0, 0.0)}
    method = {"a": (0.0, 0.0), "b": (0.0, 1.0)}
    assert s.paired(base, method, resamples=99).p_permutation == 1.0
