"""GT and Hal maxima and their tests, compared with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from revisit.eval.statistics import holm
from revisit.paper.grounding import compare, maxima, signed_rank


def test_maxima_by_hand() -> None:
    # probabilities 1/2, 1/4, 1/8, 1/8 over four object words, of which the second and fourth are in the image
    logits = torch.tensor([[3.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 3.0]]) * math.log(2)
    got = maxima(logits, torch.tensor([False, True, False, True]))
    assert got[0].tolist() == pytest.approx([25.0, 50.0])
    assert got[1].tolist() == pytest.approx([100 * 8 / 11, 100 / 11])


def test_signed_rank_with_zeros_ranked_and_left_out() -> None:
    """Check Pratt's treatment by hand: zeros are ranked, then left out of the sums."""
    d = np.array([0.0, 0.0, 1.0, -2.0, 3.0, 4.0, -5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    ranks = rankdata(np.abs(d))
    positive = ranks[d > 0].sum()
    assert ranks[d < 0].sum() == 4 + 7
    n, zeros = len(d), 2
    mean = n * (n + 1) / 4 - zeros * (zeros + 1) / 4
    variance = (n * (n + 1) * (2 * n + 1) - zeros * (zeros + 1) * (2 * zeros + 1)) / 24
    z = (positive - mean) / math.sqrt(variance)
    assert signed_rank(d) == pytest.approx(math.erfc(abs(z) / math.sqrt(2)), rel=0.05)


def test_compare_averages_medians_and_holm() -> None:
    rng = np.random.default_rng(0)
    values = rng.uniform(0, 100, (200, 4))
    values[:, 0] += 10  # the image favours GT
    rows = compare({"all": values, "some": values[:60], "few": values[:12]})
    assert [row["n"] for row in rows] == [200, 60, 12]
    first = rows[0]
    assert [first[k] for k in ("gt_with", "hal_with", "gt_without", "hal_without")] == pytest.approx(values.mean(0))
    difference = values[:, 0] - values[:, 1] - values[:, 2] + values[:, 3]
    assert first["delta"]["median"] == pytest.approx(np.median(difference))
    raw = [row["delta"]["p"] for row in rows]
    assert [row["delta"]["p_holm"] for row in rows] == pytest.approx(holm(raw))
    assert holm(raw) != pytest.approx(raw)
    # an empty set of tokens has no result
    rows = compare({"all": np.ones((3, 4)) * [4, 3, 2, 1.5], "none": np.zeros((0, 4))})
    assert rows[1]["n"] == 0
    assert rows[1]["gt_with"] is None
    assert rows[1]["delta"]["p_holm"] is None
    assert rows[0]["delta"]["median"] == pytest.approx(0.5)
