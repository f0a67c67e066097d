"""Records of a real decoding run of a tiny random model."""

from __future__ import annotations

import pytest
import torch

import families
import made_up
import revisit
from revisit import ReVisiT, Trace
from revisit.decoding.trace import StepRecord
from revisit.models.outputs import new_tokens
from revisit.models.prompts import prepare
from revisit.models.tokens import token_texts
from revisit.pages.answers import AnswerPage, wrong_steps
from revisit.words import wrong_spans


@pytest.fixture(scope="module")
def decoded() -> AnswerPage:
    model, processor = families.build("llava")
    image = families.image(1, (90, 60))
    return revisit.ask(
        (model, processor), image, "hi", ReVisiT(alpha=0.05), compare_with="greedy", max_new_tokens=8
    ).page


def test_an_answer_equals_that_of_generate(decoded: AnswerPage) -> None:
    model, processor = families.build("llava")
    inputs = prepare(processor, ["hi"], [[families.image(1, (90, 60))]])
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
        assert step.ids[0] == step.token
        assert (step.ids, step.base, step.final) == (recorded.ids, recorded.base, recorded.final)
        if step.divergences is not None:
            assert torch.equal(step.divergences, recorded.divergences)
            assert int(step.divergences.min(0).values.argmin()) == step.vision_token
    assert len(shown.changed) == trace.rows[0].changed


def test_plain_decoding_changes_nothing_and_the_layout_covers_the_image(decoded: AnswerPage) -> None:
    plain = decoded.answers[1]
    assert plain.trace.name == "greedy"
    assert plain.changed == []
    assert all(step.shift == pytest.approx(0) and step.vision_token is None for step in plain.steps)
    assert all(step.ids[0] == step.token for step in plain.steps)
    assert decoded.layout.tokens == 16
    region = decoded.layout.region(0)
    assert region is not None
    assert region.box == pytest.approx((15, 0, 30, 15), abs=0.5)  # 90 × 60, of which the model gets the middle 60 × 60


@pytest.mark.parametrize(
    ("base", "final", "shift"),
    [
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], 0),
        ([1.0, 0.0], [0.0, 1.0], 1),
        ([0.6, 0.3], [0.4, 0.5], 0.2),  # 0.2 moved from the first to the second; 0.1 of both is outside the list
        ([0.6], [0.9], 0.3),
    ],
)
def test_shift_by_hand(base: list[float], final: list[float], shift: float) -> None:
    ids = list(range(len(base)))
    assert StepRecord(1, 0, ids, base, None, final, 2).shift == pytest.approx(shift)


def test_wrong_words_by_hand() -> None:
    answer = made_up.output(
        "greedy", [made_up.step(n, text) for n, text in enumerate(["A", " do", "g", " and", " cats"])]
    )
    assert wrong_steps(answer, ["cat"]) == {1, 2}
    assert wrong_steps(answer, []) == {1, 2, 4}
    assert wrong_steps(answer, None) == set()
    text = "Two dogs and a hot dog on a bench."
    assert [text[start:end] for start, end in wrong_spans(text, ["bench"])] == ["dogs", "hot dog"]
    assert wrong_spans(text, ["dog", "hot dog", "bench"]) == []


def test_texts_wait_for_complete_characters() -> None:
    tokenizer = families.tokenizer()
    tokens = tokenizer("aé☃", add_special_tokens=False)["input_ids"]
    pieces = token_texts(tokenizer, tokens)
    assert pieces == ["a", "", "é", "", "", "☃"]
