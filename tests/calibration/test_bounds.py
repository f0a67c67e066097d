"""The statistics of a promised rate, on numbers computed by hand and by simulation."""

import math
import random

import pytest

pytest.importorskip("scipy")

from revisit.calibration.bounds import (
    Outcome,
    certified_rate,
    conformal_threshold,
    fixed_sequence,
    p_value,
    smallest_rate,
)


def test_the_binomial_p_value():
    assert p_value([1, 0, 0], 0.5, "caption") == pytest.approx(4 / 8)
    assert p_value([0] * 22, 0.1, "caption") == pytest.approx(0.9**22)
    assert p_value([1.0] * 40 + [0.0] * 460, 0.1, "caption") <= 0.1 < p_value([1.0] * 41 + [0.0] * 459, 0.1, "caption")


def test_the_hoeffding_bentkus_p_value():
    entropy = 0.1 * math.log(0.1 / 0.3) + 0.9 * math.log(0.9 / 0.7)
    assert p_value([0.1] * 50, 0.3, "share") == pytest.approx(
        min(math.exp(-50 * entropy), math.e * _binomial(5, 50, 0.3))
    )
    assert p_value([0.5] * 50, 0.3, "share") == 1


def _binomial(k, n, p):
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def test_the_sequence_stops_at_the_first_floor_that_is_not_certified():
    outcomes = [
        Outcome(floor, (1.0,) * errors + (0.0,) * (100 - errors)) for floor, errors in ((0.5, 5), (0.4, 40), (0.3, 5))
    ]
    assert [outcome.floor for outcome in fixed_sequence(iter(outcomes), 0.2, 0.9, "caption")] == [0.5]
    assert fixed_sequence(reversed(outcomes[:2]), 0.2, 0.9, "caption") == []


def test_later_floors_are_not_computed():
    def outcomes():
        yield Outcome(0.5, (1.0,) * 10)
        raise AssertionError

    assert fixed_sequence(outcomes(), 0.2, 0.9, "caption") == []


def test_what_few_images_can_certify():
    assert smallest_rate(22, 0.9, "caption") == pytest.approx(1 - 0.1 ** (1 / 22))
    for loss in ("caption", "share"):
        rate = smallest_rate(30, 0.9, loss)
        assert p_value([0.0] * 30, rate + 1e-6, loss) <= 0.1 < p_value([0.0] * 30, rate - 1e-4, loss)
    assert certified_rate([1.0] * 40 + [0.0] * 460, 0.9, "caption") == pytest.approx(0.0978, abs=1e-3)


@pytest.mark.parametrize("loss", ["caption", "share"])
def test_the_promise_holds_over_calibrations(loss):
    """Losses that rise as the floor falls, with a floor at 0.2: the chosen risk exceeds it in at most 10 % of 2,000 calibrations."""
    risks, dice, wrong = (0.05, 0.15, 0.199, 0.21, 0.3), random.Random(3), 0
    for _ in range(2000):
        draws = [[float(dice.random() < risk) for _ in range(100)] for risk in risks]
        if loss == "share":
            draws = [[0.5 * (a + b) for a, b in zip(row, reversed(row), strict=True)] for row in draws]
        certified = fixed_sequence((Outcome(float(n), tuple(row)) for n, row in enumerate(draws)), 0.2, 0.9, loss)
        wrong += bool(certified) and risks[len(certified) - 1] > 0.2
    assert wrong <= 200


def test_the_conformal_threshold():
    critical = [0.1, 0.5, 0.3, -1.0, 0.2, -1.0, -1.0, -1.0, -1.0]  # nine texts; four keep a mistake at threshold 0
    assert conformal_threshold(critical, 0.05) is None  # (0 + 1) / 10 > 0.05
    assert conformal_threshold(critical, 0.1) == math.nextafter(0.5, 1)
    assert conformal_threshold(critical, 0.3) == math.nextafter(0.2, 1)
    for rate in (0.1, 0.2, 0.3, 0.4):
        threshold = conformal_threshold(critical, rate)
        assert (sum(value >= threshold for value in critical) + 1) / 10 <= rate + 1e-12


def test_the_conformal_promise_holds_on_average():
    dice, mistakes = random.Random(5), 0
    for _ in range(3000):
        *critical, new = (dice.random() if dice.random() < 0.5 else -1.0 for _ in range(30))
        mistakes += new >= conformal_threshold(critical, 0.2)
    assert mistakes / 3000 <= 0.22
