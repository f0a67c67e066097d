"""The statistics of a promised rate: p-values, learn then test, and conformal risk control.

A loss is between 0 and 1: per caption, whether it names an absent object, or the share of its objects that are absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from scipy.stats import binom

from revisit.guard.rates import Loss


@dataclass(frozen=True)
class Outcome:
    """The losses of the calibration images at one floor."""

    floor: float
    losses: tuple[float, ...]


def p_value(losses: Sequence[float], rate: float, loss: Loss) -> float:
    """Return a p-value for the hypothesis that the expected loss is above `rate`.

    It is the binomial probability of so few errors for "caption", and the Hoeffding-Bentkus bound for "share".
    """
    n, total = len(losses), sum(losses)
    if loss == "caption":
        return float(binom.cdf(round(total), n, rate))
    mean = total / n
    hoeffding = math.exp(-n * _relative_entropy(min(mean, rate), rate))
    bentkus = math.e * float(binom.cdf(math.ceil(total - 1e-9), n, rate))
    return min(hoeffding, bentkus, 1.0)


def _relative_entropy(a: float, b: float) -> float:
    first = a * math.log(a / b) if a > 0 else 0.0
    second = (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    return first + second


def fixed_sequence(outcomes: Iterable[Outcome], rate: float, confidence: float, loss: Loss) -> list[Outcome]:
    """Return the outcomes at which the rate is certified: those before the first one that is not rejected at 1 - confidence.

    The outcomes must come in an order that does not depend on the losses, such as from the strictest floor down. Then the expected
    loss at every returned floor is at most `rate`, with probability `confidence` over the calibration images: learn then test
    (Angelopoulos et al., arXiv:2110.01052). Later outcomes are not computed.
    """
    certified = []
    for outcome in outcomes:
        if p_value(outcome.losses, rate, loss) > 1 - confidence + 1e-12:
            break
        certified.append(outcome)
    return certified


def smallest_rate(n: int, confidence: float, loss: Loss) -> float:
    """Return the smallest rate that n images without any mistake would certify."""
    delta = 1 - confidence
    exact = 1 - delta ** (1 / n)  # (1 - rate)^n = delta, which is also Hoeffding's bound
    return exact if loss == "caption" else _first(lambda rate: p_value([0.0] * n, rate, loss) <= delta, exact)


def certified_rate(losses: Sequence[float], confidence: float, loss: Loss) -> float:
    """Return the smallest rate that these losses certify at one floor."""
    return _first(lambda rate: p_value(losses, rate, loss) <= 1 - confidence, 0.0)


def _first(holds: Callable[[float], bool], low: float) -> float:
    """Return the smallest rate from `low` to 1 for which a condition holds that holds for all larger ones."""
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def conformal_threshold(critical: Sequence[float], rate: float) -> float | None:
    """Return the smallest threshold whose expected loss on a new text is at most `rate`; None if there is none.

    Conformal risk control (Angelopoulos et al., arXiv:2208.02814) for a loss that falls from 1 to 0 where the threshold passes the text's
    critical value: with n texts, (number of critical values at or above the threshold + 1) / (n + 1) <= rate.
    """
    allowed = math.floor(rate * (len(critical) + 1) + 1e-9) - 1  # texts that may keep their mistake
    if allowed < 0:
        return None
    ordered = sorted(critical, reverse=True)
    return math.nextafter(ordered[allowed], math.inf) if allowed < len(ordered) else 0.0
