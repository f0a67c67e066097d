"""Intervals and paired tests for metrics that are ratios of sums over units.

Every benchmark metric here is sum(numerators) / sum(denominators) over units (items, or the groups that the metric counts): a plain mean
has denominators of one, CHAIR_I has hallucinated over all mentions, F1 has 2TP over 2TP + FP + FN. So one bootstrap and one permutation
test are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Interval, ratio

Floats = NDArray[np.float64]
Terms = Mapping[str, tuple[float, float]]  # unit -> (numerator, denominator)

LEVEL = 0.95
RESAMPLES = 4999  # (count + 1) / (RESAMPLES + 1) is a round number
_BATCH_ELEMENTS = 1_000_000  # number of indices at once, which limits the memory of resampling


@dataclass(frozen=True)
class Paired:
    """Method minus baseline on the same units: the difference, its bootstrap interval, and two-sided p-values."""

    difference: float
    low: float
    high: float
    p_bootstrap: float
    p_permutation: float
    units: int
    level: float = LEVEL
    draws: Floats | None = field(default=None, repr=False, compare=False)  # the bootstrap's differences

    @property
    def p(self) -> float:
        """The p-value of the permutation test, or else, for a mean over settings, of the bootstrap."""
        return self.p_bootstrap if math.isnan(self.p_permutation) else self.p_permutation

    def at(self, level: float) -> Paired:
        """Return the same difference with the interval at another level."""
        if self.draws is None:
            return replace(self, level=level)
        low, high = _percentiles(self.draws, level)
        return replace(self, low=low, high=high, level=level)


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a proportion."""
    if not 0 <= successes <= trials or trials <= 0:
        raise RevisitError(f"A proportion needs 0 <= successes <= trials and trials > 0, not {successes} of {trials}.")
    from statsmodels.stats.proportion import proportion_confint

    low, high = proportion_confint(successes, trials, alpha=1 - LEVEL, method="wilson")
    # With no success or only successes a bound is exactly 0 or 1; rounding may exceed it by 1e-17.
    return max(0.0, float(low)), min(1.0, float(high))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p-values, in the same order; undefined ones (NaN) are not part of the family."""
    known = [p for p in p_values if not math.isnan(p)]
    if not known:
        return list(p_values)
    from statsmodels.stats.multitest import multipletests

    adjusted = iter(multipletests(known, method="holm")[1].tolist())
    return [p if math.isnan(p) else float(next(adjusted)) for p in p_values]


def holm_levels(p_values: Sequence[float]) -> list[float]:
    """Return for each p-value the level of an interval that excludes zero if and only if Holm's correction rejects.

    The k-th smallest of m p-values is tested at 0.05 / (m - k + 1) as long as all smaller ones were rejected; after the first one that
    is not rejected, the level stays the same. An undefined p-value is not part of the family and has the level 95 %.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    levels, error = [LEVEL] * len(p_values), 1 - LEVEL
    share, stopped = error, False
    for rank, (p, index) in enumerate(order):
        if not stopped:
            share = error / (len(order) - rank)
            stopped = p > share
        levels[index] = 1 - share
    return levels


def _divide(numerators: Floats, denominators: Floats) -> Floats:
    """Divide two arrays of sums; NaN where the denominator is zero."""
    out = np.full(np.shape(numerators), np.nan)
    return np.asarray(np.divide(numerators, denominators, out=out, where=np.asarray(denominators) != 0))


def strata(name: str, value: float, per_item: Mapping[str, Terms]) -> list[str]:
    """Return the names of the ratios whose mean is a metric: itself, or its sub-settings (`"coco_random/F1"`), or none."""
    if name in per_item:
        return [name]
    names = [other for other in per_item if other.endswith(f"/{name}")]
    ratios = [ratio(per_item[other].values()) for other in names]
    return names if names and math.isclose(sum(ratios) / len(ratios), value, rel_tol=1e-9) else []


def metric_interval(name: str, value: float, per_item: Mapping[str, Terms], full: float = 1.0) -> Interval | None:
    """Return a metric's interval: from its own terms, or from those of its sub-settings if it is their mean."""
    names = strata(name, value, per_item)
    if names == [name]:
        return interval(per_item[name], full=full)
    return mean_interval([[per_item[other]] for other in names]) if names else None


def interval(terms: Terms, resamples: int = RESAMPLES, full: float = 1.0) -> Interval:
    """Return the interval of one metric: Wilson for a proportion, otherwise the percentile bootstrap over units.

    `full` is the largest value of the metric: 1, or 100 for a metric in percent.
    """
    numerators, denominators = _same_units([terms])
    if scale := _proportion_scale(numerators, denominators, full):
        low, high = wilson(numerators.sum() / scale, denominators.sum())
        return Interval(low * scale, high * scale, "wilson")
    if len(terms) < 2:
        return Interval(math.nan, math.nan, "bootstrap")
    return mean_interval([[terms]], resamples)


def mean_interval(strata: Sequence[Sequence[Terms]], resamples: int = RESAMPLES) -> Interval:
    """Return the bootstrap interval of the mean of ratios over strata and, within a stratum, over runs of the same units.

    Units are resampled within each stratum, a unit together with its terms in all runs (sampling seeds): answers to one
    question under several seeds are not independent.
    """
    arrays = [_same_units(runs) for runs in strata]  # each (2 * runs, units)
    if not all(array[len(array) // 2 :].any(-1).all() for array in arrays):
        return Interval(math.nan, math.nan, "bootstrap")
    low, high = _percentiles(_bootstrap_mean(arrays, _mean_ratio, resamples), LEVEL)
    return Interval(low, high, "bootstrap")


def paired(baseline: Terms, method: Terms, resamples: int = RESAMPLES) -> Paired:
    """Compare two methods on the same units, in any order."""
    return paired_runs([[baseline]], [[method]], resamples)


def paired_runs(
    baseline: Sequence[Sequence[Terms]], method: Sequence[Sequence[Terms]], resamples: int = RESAMPLES
) -> Paired:
    """Compare means of ratios over strata and, within a stratum, over runs (sampling seeds) of the same units.

    The bootstrap resamples the units of each stratum, with the terms of both methods in all runs together. The permutation test,
    for one stratum only, swaps the two methods unit by unit, in all runs at once (all swaps are enumerated if there are few units).
    """
    strata = [
        np.stack([_same_units([b, m]) for b, m in zip(base_runs, method_runs, strict=True)])
        for base_runs, method_runs in zip(baseline, method, strict=True)
    ]  # each (runs, 4, units)
    units = sum(terms.shape[-1] for terms in strata)
    observed = float(np.mean([_mean_difference(terms.sum(-1).reshape(-1)) for terms in strata]))
    if math.isnan(observed) or min(terms.shape[-1] for terms in strata) < 2:
        return Paired(observed, math.nan, math.nan, math.nan, math.nan, units)
    if all(np.array_equal(terms[:, ::2], terms[:, 1::2]) for terms in strata):
        return Paired(0.0, 0.0, 0.0, 1.0, 1.0 if len(strata) == 1 else math.nan, units)
    rows = [terms.reshape(-1, terms.shape[-1]) for terms in strata]  # each (4 * runs, units)
    draws = _bootstrap_mean(rows, _mean_difference, resamples)
    low, high = _percentiles(draws, LEVEL)
    known = draws[~np.isnan(draws)]
    tail = int(min(np.count_nonzero(known <= 0), np.count_nonzero(known >= 0)))
    p_bootstrap = min(1.0, 2 * (tail + 1) / (len(known) + 1))
    p_permutation = _permutation(strata[0], resamples) if len(strata) == 1 else math.nan
    return Paired(observed, low, high, p_bootstrap, p_permutation, units, draws=draws)


def _same_units(runs: Sequence[Terms]) -> Floats:
    """Stack the runs' numerators, then their denominators (2 * runs, units); raise RevisitError if the units differ."""
    for terms in runs[1:]:
        if odd := sorted(runs[0].keys() ^ terms.keys()):
            raise RevisitError(
                f"A paired test needs the same units on both sides; {len(odd)} are only on one side, such as {odd[0]!r}."
            )
    units = sorted(runs[0])
    values = np.array([[terms[unit] for unit in units] for terms in runs], dtype=np.float64)
    values = values.reshape(len(runs), len(units), 2)  # keeps the last axis when there are no units
    return np.concatenate([values[..., 0], values[..., 1]])


def _proportion_scale(numerators: Floats, denominators: Floats, full: float) -> float:
    """Return the numerator of a success (1 or `full`) if the metric is a proportion, with denominators of 0 or 1; otherwise 0."""
    if not np.isin(denominators, (0.0, 1.0)).all() or denominators.sum() == 0:
        return 0.0
    scale = float(numerators.max()) or full  # unknown without a success
    if scale not in (1.0, full) or not np.isin(numerators, (0.0, scale)).all():
        return 0.0
    return scale if bool((numerators <= denominators * scale).all()) else 0.0


def _mean_difference(sums: Floats) -> Floats:
    """Return the mean over runs of the method's ratio minus the baseline's.

    The sums (4 * runs, ...) have four rows per run: both numerators, then both denominators, the baseline's first.
    """
    base, method, base_below, method_below = sums.reshape(-1, 4, *sums.shape[1:]).swapaxes(0, 1)
    return np.asarray((_divide(method, method_below) - _divide(base, base_below)).mean(0))


def _mean_ratio(sums: Floats) -> Floats:
    """Return the mean over runs of a ratio, from sums (2 * runs, ...): the runs' numerators, then their denominators."""
    half = len(sums) // 2
    return np.asarray(_divide(sums[:half], sums[half:]).mean(0))


def _bootstrap_mean(strata: Sequence[Floats], statistic: Callable[[Floats], Floats], resamples: int) -> Floats:
    """Return the mean over strata of their bootstrap draws."""
    draws = [_bootstrap(terms, statistic, resamples, seed) for seed, terms in enumerate(strata)]
    return np.asarray(np.mean(draws, axis=0))


def _bootstrap(terms: Floats, statistic: Callable[[Floats], Floats], resamples: int, seed: int) -> Floats:
    """Return `statistic` of the terms' sums on `resamples` draws of units with replacement; `terms` is (rows, units)."""
    rng, units = np.random.default_rng(seed), terms.shape[-1]
    varied = (terms != terms[:, :1]).any(-1)  # the sums of the other rows are the same in every draw
    draws = []
    for first in range(0, resamples, size := max(1, _BATCH_ELEMENTS // terms.size)):
        index = rng.integers(0, units, (min(size, resamples - first), units))
        sums = np.repeat(terms[:, :1] * units, len(index), axis=1)  # (rows, draws)
        sums[varied] = terms[varied][:, index].sum(-1)
        draws.append(statistic(sums))
    return np.concatenate(draws)


def _permutation(terms: Floats, resamples: int) -> float:
    """Return the two-sided p-value of swapping the methods unit by unit; `terms` is (runs, 4, units), ordered as in `_mean_difference`."""
    from scipy.stats import permutation_test

    units = terms.shape[-1]
    differs = ((terms[:, 0] != terms[:, 1]) | (terms[:, 2] != terms[:, 3])).any(0)
    fixed = terms[:, :, ~differs].sum(-1)  # (runs, 4): units whose terms agree are the same under every swap
    changed = np.flatnonzero(differs)
    if len(changed) == 1:  # both orders are equally likely
        return 1.0
    flat = terms.reshape(len(terms), 2, -1)  # (runs, 2, 2 * units): numerators and denominators, the baseline's first

    def on_swap(first: NDArray[np.int64], second: NDArray[np.int64], axis: int = -1) -> Floats:
        sums = [run[part][index].sum(axis) for run in flat for part in (0, 1) for index in (first, second)]
        return _mean_difference(np.stack(sums) + fixed.reshape(-1, *[1] * (first.ndim - 1)))

    result = permutation_test(
        (changed, changed + units),
        on_swap,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=max(1, _BATCH_ELEMENTS // len(changed)),
        rng=np.random.default_rng(0),
    )
    null = np.asarray(result.null_distribution)
    if not np.isnan(null).any():
        return float(result.pvalue)
    null = null[~np.isnan(null)]  # ignore swaps with an empty denominator
    observed, extra = result.statistic, 0 if 2 ** len(changed) <= resamples else 1
    near = 1e-14 * abs(observed)
    tails = ((null <= observed + near).sum(), (null >= observed - near).sum())
    return float(min(1.0, 2 * (min(tails) + extra) / (len(null) + extra)))


def _percentiles(draws: Floats, level: float) -> tuple[float, float]:
    """Return the interval with the central `level` of the draws; undefined draws (NaN) are ignored."""
    draws = draws[~np.isnan(draws)]
    if not len(draws):
        return math.nan, math.nan
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
