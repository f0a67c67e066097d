"""Ranks of single vision tokens: brute force agrees, and memory stays bounded."""

from __future__ import annotations

from math import comb
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import families
from revisit.explain import prefill
from revisit.forward import support
from revisit.models.head import Head
from revisit.models.parts import ModelParts
from revisit.paper.objects import ObjectVocabulary
from revisit.paper.projection import CURVE, chance, hits, ranks


def test_ranks_agree_with_sorting_in_bounded_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = torch.nn.Linear.forward
    monkeypatch.setattr(support, "CHUNK_NUMBERS", 300 * 7 + 100)
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: made.append(len(x)) or real(self, x))
    module, states = torch.nn.Linear(8, 300, bias=False), torch.randn(50, 8)
    objects, truth = torch.tensor([3, 50, 120, 299, 7]), [1, 3]
    with torch.no_grad():
        full, over_objects = ranks(Head(module.weight, module=module), states, objects, truth).tolist()
        logits = states @ module.weight.T
    assert max(made) == 7
    for row, a, b in zip(logits, full, over_objects, strict=True):
        order = row.argsort(descending=True).tolist()
        assert a == min(order.index(50), order.index(299))
        order = row[objects].argsort(descending=True).tolist()
        assert b == min(order.index(place) for place in truth)


def test_hits_by_hand() -> None:
    assert CURVE[:3] == (1, 2, 3)
    found = hits(torch.tensor([[0, 2, 3, 50, 1], [0, 0, 9, 10, 2]]))[:, [0, 2, CURVE.index(10)]]
    assert found.tolist() == [[1, 3, 4], [2, 3, 4]]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_states_are_the_models_own(family: str) -> None:
    model, _ = families.build(family)
    inputs = families.inputs(family, ["what is it?"], [[families.image(2)]])
    parts = ModelParts.of(model)
    projected: list[int] = []  # positions that the model itself projects onto the vocabulary
    handle = model.get_output_embeddings().register_forward_hook(
        lambda _m, _a, out: projected.append(out[..., 0].numel())
    )
    (seen,) = prefill.force(model, inputs, layers=range(parts.depth + 1))
    handle.remove()
    assert projected == [1]
    with torch.inference_mode():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    mask = torch.isin(inputs["input_ids"][0], torch.tensor(parts.vision_ids))
    for layer, states in seen.vision.items():
        torch.testing.assert_close(states, hidden[layer][0, mask], atol=1e-5, rtol=1e-5)


def test_chance_by_hand() -> None:
    vocabulary = ObjectVocabulary(("cat", "dog", "seat", "chair", "cow"), (1, 2, 3, 4, 5))
    items: list[Any] = [
        SimpleNamespace(meta={"ground_truth": truth}) for truth in (["chair"], ["cow", "cat", "dog"], [])
    ]
    rows = {row["k"]: row["recall"] for row in chance(SimpleNamespace(items=items), vocabulary)}  # type: ignore[arg-type]
    assert rows[1] == pytest.approx((2 / 5 + 3 / 5 + 0) / 3)
    assert rows[2] == pytest.approx((1 - comb(3, 2) / comb(5, 2) + 1 - comb(2, 2) / comb(5, 2)) / 3)
    assert rows[5] == pytest.approx(2 / 3)
    assert max(rows) == 5
