"""From a trace to what is shown, on a real decode of a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import families
import revisit
from revisit import ReVisiT, RevisitError, Trace
from revisit.decoding.trace import StepRecord
from revisit.explain import record
from revisit.methods.greedy import Greedy
from revisit.models.prompts import new_tokens, prepare


@pytest.fixture(scope="module")
def decoded() -> record.Decode:
    model, processor = families.build("llava")
    image = families.picture(1, (90, 60))
    return record.explain(
        model, processor, [image], "hi", [ReVisiT(alpha=0.05), Greedy()], max_new_tokens=8, do_sample=False
    )


def test_an_answer_is_what_generate_returns(decoded: record.Decode) -> None:
    model, processor = families.build("llava")
    inputs = prepare(processor, ["hi"], [[families.picture(1, (90, 60))]])
    trace = Trace(record=True)
    output = revisit.generate(
        model, **inputs, method=ReVisiT(alpha=0.05), trace=trace, max_new_tokens=8, do_sample=False
    )
    tokens = new_tokens(output, inputs)[0].tolist()
    shown = decoded.answers[0]
    assert [step.token for step in shown.steps] == tokens
    for step, recorded in zip(shown.steps, trace.rows[0].records, strict=True):
        assert step.vision_token == recorded.vision_token
        assert step.layer == recorded.layer
        best = max(step.candidates, key=lambda c: c.final)
        assert best.token == step.token
        if recorded.divergences is not None:
            assert step.heat is not None
            assert np.allclose(step.heat, recorded.divergences.numpy().min(0))
            assert int(step.heat.argmin()) == step.vision_token
    assert len(shown.changed) == trace.rows[0].changed


def test_plain_decoding_shows_its_candidates_and_changes_nothing(decoded: record.Decode) -> None:
    plain = decoded.answers[1]
    assert plain.name == "greedy"
    assert plain.changed == []
    assert all(step.shift == pytest.approx(0) and step.vision_token is None for step in plain.steps)
    assert all(step.candidates[0].token == step.token for step in plain.steps)


def test_the_layout_covers_the_image(decoded: record.Decode) -> None:
    assert decoded.layout.tokens == 16
    region = decoded.layout.region(0)
    assert region is not None
    assert region.box == pytest.approx((15, 0, 30, 15), abs=0.5)  # 90 × 60, of which the middle 60 × 60 is seen


def test_shift_by_hand() -> None:
    assert record.shift([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]) == 0
    assert record.shift([1.0, 0.0], [0.0, 1.0]) == 1
    # 0.2 went from the first to the second; 0.1 of both lies outside the list
    assert record.shift([0.6, 0.3], [0.4, 0.5]) == pytest.approx(0.2)
    assert record.shift([0.6], [0.9]) == pytest.approx(0.3)


def test_the_chosen_token_and_both_favorites_are_always_among_the_shown() -> None:
    ids = list(range(300, 340))
    base = [0.01] * 40
    base[39] = 0.6
    vision = [0.02] * 38 + [0.22, 0.02]
    final = sorted((0.5 * 0.6**k for k in range(40)), reverse=True)
    step = record.step_of(
        families.tokenizer(),
        335,
        "x",
        StepRecord(0, 335, ids, base, vision, final, plausible_tokens=40),
        {"name": "revisit"},
    )
    shown = [candidate.token for candidate in step.candidates]
    assert len(shown) == record.SHOWN_CANDIDATES
    assert {335, 339, 338, 300} <= set(shown)
    assert step.instead_of == record.token_text(families.tokenizer(), 339)


def test_pieces_wait_for_whole_characters() -> None:
    tokenizer = families.tokenizer()
    tokens = tokenizer("aé☃", add_special_tokens=False)["input_ids"]
    pieces = record.token_texts(tokenizer, tokens)
    assert pieces == ["a", "", "é", "", "", "☃"]


def test_a_select_max_method_keeps_the_largest_divergence() -> None:
    table = torch.tensor([[0.1, 0.4], [0.3, float("nan")]])
    made = StepRecord(0, 1, [1, 2], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5], 2, 3, 1, 0.4, table)
    tokenizer = families.tokenizer()
    heat = record.step_of(tokenizer, 1, "x", made, {"name": "revisit", "select": "max"}).heat
    assert heat is not None
    assert heat.tolist() == pytest.approx([0.3, 0.4])
    heat = record.step_of(tokenizer, 1, "x", made, {"name": "revisit", "select": "min"}).heat
    assert heat is not None
    assert heat.tolist() == pytest.approx([0.1, 0.4])


def test_what_cannot_be_explained_is_refused() -> None:
    model, processor = families.build("llava")
    with pytest.raises(RevisitError, match="without a decoding method"):
        record.explain(model, processor, [families.picture(1)], "hi", [])
    with pytest.raises(RevisitError, match="Beam search cannot be shown"):
        record.explain(model, processor, [families.picture(1)], "hi", [Greedy()], num_beams=2)


def test_labels_name_what_is_not_default() -> None:
    assert record.label({"name": "revisit", **ReVisiT().settings()}) == "revisit"
    assert record.label({"name": "revisit", **ReVisiT(alpha=0.1).settings()}) == "revisit:alpha=0.1"
