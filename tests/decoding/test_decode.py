"""Rows of a batch equal single answers, each by its own settings, seed and end."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from revisit import methods
from revisit.decoding import decode as module
from revisit.decoding.decode import Decoded, ItemDraw, RowSampling, decode, decode_prompts
from revisit.decoding.method import Step
from revisit.decoding.settings import Decoding
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.methods.greedy import Greedy
from revisit.models.devices import widest_float
from revisit.models.loading import load
from revisit.models.prompts import prepare

PROMPTS = ["Please describe this image in detail.", "Is there a dog in the image?", "What is in the picture?"]


@functools.cache
def loaded() -> tuple[Any, Any]:
    return load("tiny")


@functools.cache
def images() -> list[list[Any]]:
    return [[render(scene("unusual", 3, number))] for number in range(3)]


def inputs_of(*rows: int) -> Any:
    return prepare(loaded()[1], [PROMPTS[row] for row in rows], [images()[row] for row in rows])


def alone(row: int, how: Decoding, seed: int = 0) -> Decoded:
    return decode_prompts(*loaded(), [PROMPTS[row]], [images()[row]], methods.get("revisit"), how, [seed])[0]


def test_rows_with_their_own_settings_equal_single_answers() -> None:
    settings = [
        Decoding(max_new_tokens=30),
        Decoding(max_new_tokens=12, temperature=0.8, top_p=0.9),
        Decoding(max_new_tokens=20, temperature=1.5, top_k=20),
    ]
    seeds = [1, 2, 3]
    inputs = inputs_of(0, 1, 2)
    found = decode(*loaded(), inputs, methods.get("revisit"), settings, seeds=seeds)
    for row, how in enumerate(settings):
        single = alone(row, how, seeds[row])
        assert (found[row].text, found[row].tokens, found[row].finish) == (single.text, single.tokens, single.finish)
        assert found[row].counters() == single.counters()
        assert len(found[row].tokens) <= how.max_new_tokens


def test_settings_of_a_method_may_have_names_of_generate() -> None:
    """DeCo's top_p and top_k choose its candidates; those of the call are for sampling."""
    inputs = inputs_of(0)
    how = Decoding(max_new_tokens=2, temperature=0.8, top_p=0.9, top_k=20)
    assert len(decode(*loaded(), inputs, methods.get("deco"), [how])[0].tokens) == 2
    with pytest.raises(RevisitError, match="alpha is a setting of the method, not an argument of generate"):
        decode(*loaded(), inputs, methods.get("deco"), [how], alpha=0.5)


def test_why_an_answer_ended() -> None:
    short = alone(0, Decoding(max_new_tokens=3))
    assert (short.finish, len(short.tokens)) == ("length", 3)
    whole = alone(0, Decoding(max_new_tokens=200))
    assert whole.finish == "stop"
    assert whole.tokens[-1] in loaded()[0].generation_config.eos_token_id
    exact = alone(0, Decoding(max_new_tokens=len(whole.tokens)))
    assert (exact.finish, exact.tokens) == ("stop", whole.tokens)


def test_on_token_gets_every_token_once_and_ends_its_row() -> None:
    tokens_of: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def on_token(row: int, token: int) -> bool:
        tokens_of[row].append(token)
        return row == 0 and len(tokens_of[0]) == 4

    inputs = inputs_of(0, 1, 2)
    found = decode(*loaded(), inputs, Greedy(), [Decoding(max_new_tokens=40)] * 3, on_token=on_token)
    assert [list(answer.tokens) for answer in found] == [tokens_of[0], tokens_of[1], tokens_of[2]]
    assert (len(tokens_of[0]), found[0].finish) == (4, "stop")
    assert found[0].trace.rows[0].step_count == 4
    tokens_of = {0: [], 1: [], 2: []}
    beamed = [Decoding(max_new_tokens=8, num_beams=2)] * 3
    found = decode(*loaded(), inputs, Greedy(), beamed, on_token=on_token)  # at the end, when they are known
    assert [list(answer.tokens) for answer in found] == [tokens_of[0], tokens_of[1], tokens_of[2]]
    assert len(tokens_of[0]) == 4


def test_prompts_without_an_image_are_decoded_plainly() -> None:
    mixed = decode_prompts(
        *loaded(), PROMPTS, [images()[0], [], images()[2]], methods.get("revisit"), Decoding(max_new_tokens=10)
    )
    assert [answer.counters()["vision_tokens"] > 0 for answer in mixed] == [True, False, True]
    assert mixed[1].counters()["applied"] == 0
    (plain,) = decode_prompts(*loaded(), [PROMPTS[1]], [[]], Greedy(), Decoding(max_new_tokens=10))
    assert mixed[1].tokens == plain.tokens


def test_counters_of_beams_and_greedy_rows_beside_sampled_ones() -> None:
    (beamed,) = decode_prompts(
        *loaded(), [PROMPTS[0]], [images()[0]], methods.get("revisit"), Decoding(max_new_tokens=8, num_beams=3)
    )
    assert len(beamed.trace.rows) == 3
    assert beamed.counters()["vision_tokens"] == beamed.trace.rows[0].vision_tokens > 0
    scores = torch.randn(2, 50)
    kept = RowSampling([Decoding(), Decoding(temperature=1.0)], [0, 0])(torch.zeros(2, 1, dtype=torch.long), scores)
    assert torch.equal(kept[0], scores[0])
    assert int(kept[1].isfinite().sum()) == 1


def test_a_row_with_no_token_left_is_not_hidden_by_its_draw() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0], [-torch.inf] * 3])
    drawn = ItemDraw([1, 2])(torch.zeros(2, 1, dtype=torch.long), scores)
    assert int(drawn[0].isfinite().sum()) == 1
    assert drawn[1].tolist() == [-torch.inf] * 3


def test_a_step_has_one_draw_per_row_however_often_it_is_applied() -> None:
    scores, once, twice = torch.zeros(1, 1000), ItemDraw([7]), ItemDraw([7])
    for length in range(1, 9):
        ids = torch.zeros(1, length, dtype=torch.long)
        drawn = once(ids, scores)
        assert torch.equal(twice(ids, scores), drawn)
        assert torch.equal(twice(ids, scores), drawn)


def test_draws_need_no_float64_where_a_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert widest_float(torch.device("mps")) == torch.float32
    scores, ids = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, dtype=torch.long)
    monkeypatch.setattr(module, "widest_float", lambda _: torch.float32)
    monkeypatch.setattr(torch.Tensor, "double", None)
    tokens = [int(ItemDraw([seed])(ids, scores).argmax()) for seed in range(400)]
    share = sum(token == int(scores.argmax()) for token in tokens) / len(tokens)
    assert share == pytest.approx(float(scores.softmax(-1).max()), abs=0.05)


def test_sampling_falls_back_to_the_model_if_the_plausible_token_is_banned() -> None:
    """No token is repeated, although the only plausible token often is banned by `no_repeat_ngram_size`."""
    inputs = inputs_of(0)
    method = methods.get("plausible_only", alpha=1.0)
    how = [Decoding(max_new_tokens=40, temperature=1.0)]
    found = decode(*loaded(), inputs, method, how, no_repeat_ngram_size=1)[0].tokens
    assert len(set(found)) == len(found) > 5


class FirstRowToken0(Greedy):
    """Leaves the first row only token 0."""

    name = "first-row-token-0"

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        def step(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            scores = logits.clone()
            scores[0, 1:] = -torch.inf
            return scores

        return step


def test_a_fallback_of_one_row_does_not_change_the_draws_of_another() -> None:
    settings = [Decoding(max_new_tokens=20), Decoding(max_new_tokens=20, temperature=2.0)]
    banned = {"suppress_tokens": [0]}
    inputs = inputs_of(0, 1)
    together = decode(*loaded(), inputs, FirstRowToken0(), settings, seeds=[0, 5], **banned)
    for row, how in enumerate(settings):
        (single,) = decode(*loaded(), inputs_of(row), Greedy(), [how], seeds=[(0, 5)[row]], **banned)
        assert together[row].tokens == single.tokens
