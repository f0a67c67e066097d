"""GT and Hal maxima and their tests, compared with values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

import families
from revisit.eval.benchmarks.base import Item
from revisit.eval.run import Reporter
from revisit.eval.statistics import holm
from revisit.forward.states import forced_inputs
from revisit.paper import grounding
from revisit.paper.grounding import compare, maxima, signed_rank
from revisit.paper.steps import Selection
from revisit.paper.study import Caption, Subject


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


@pytest.mark.skipif("gemma4" not in families.FAMILIES, reason="its processor needs torchvision in this transformers")
def test_probabilities_are_those_of_the_model_on_a_capped_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM head's raw products are not logits if the model caps them."""
    model, processor = families.build("gemma4")
    monkeypatch.setattr(model.config.get_text_config(), "final_logit_softcapping", 2.0)
    caption = Caption(Item("a", "what", (Path("x"),), {"ground_truth": ["cat"]}), (60, 61, 62))
    prompt = families.inputs("gemma4", ["what"], [[families.image(1)]])
    subject = Subject(out="unused")
    vocabulary = SimpleNamespace(
        words=("cat", "dog"), indices=lambda _: [0], tensor=lambda _: torch.tensor([70, 71]), summary=dict
    )
    vars(subject).update(loaded=(model, processor), vocabulary=vocabulary)
    monkeypatch.setattr(Subject, "captions", lambda *_: [caption])
    monkeypatch.setattr(Subject, "inputs", lambda *_: dict(prompt))
    monkeypatch.setattr(grounding, "select", lambda *_: Selection([], {}, set()))
    found = grounding.gt_vs_hal(subject, Reporter())["rows"][0]
    longer = forced_inputs(dict(prompt), [caption.tokens])
    with torch.no_grad():
        logits = model(**longer).logits[0, -4:-1, [70, 71]]
    want = 100 * logits.double().softmax(-1).mean(0)
    assert [found["gt_with"], found["hal_with"]] == pytest.approx(want.tolist(), abs=0.05)
