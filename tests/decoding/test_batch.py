"""One batch, split: rows equal single answers, each by its own settings, seed and end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from revisit import methods
from revisit.decoding.batch import Decoded, decode_batch, decode_prompts
from revisit.decoding.settings import Decoding
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.methods.greedy import Greedy
from revisit.models.loading import load
from revisit.models.prompts import prepare

PROMPTS = ["Please describe this image in detail.", "Is there a dog in the image?", "What is in the picture?"]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return load("tiny")


@pytest.fixture(scope="module")
def images() -> list[list[Any]]:
    return [[render(scene("unusual", 3, number))] for number in range(3)]


def alone(loaded: tuple[Any, Any], prompt: str, pictures: list[Any], how: Decoding, seed: int = 0) -> Decoded:
    return decode_prompts(*loaded, [prompt], [pictures], methods.get("revisit"), how, [seed])[0]


def test_rows_with_their_own_settings_equal_single_answers(loaded: tuple[Any, Any], images: list[list[Any]]) -> None:
    settings = [
        Decoding(max_new_tokens=30),
        Decoding(max_new_tokens=12, temperature=0.8, top_p=0.9),
        Decoding(max_new_tokens=20, temperature=1.5, top_k=20),
    ]
    seeds = [1, 2, 3]
    inputs = prepare(loaded[1], PROMPTS, images)
    found = decode_batch(*loaded, inputs, methods.get("revisit"), settings, seeds)
    for row, how in enumerate(settings):
        single = alone(loaded, PROMPTS[row], images[row], how, seeds[row])
        assert (found[row].text, found[row].tokens, found[row].finish) == (single.text, single.tokens, single.finish)
        assert found[row].counters() == single.counters()
        assert len(found[row].tokens) <= how.max_new_tokens


def test_settings_of_a_method_may_have_names_of_generate(loaded: tuple[Any, Any], images: list[list[Any]]) -> None:
    """DeCo's top_p and top_k choose its candidates; those of the call are for sampling."""
    inputs = prepare(loaded[1], PROMPTS[:1], images[:1])
    how = Decoding(max_new_tokens=2, temperature=0.8, top_p=0.9, top_k=20)
    assert len(decode_batch(*loaded, inputs, methods.get("deco"), [how])[0].tokens) == 2
    with pytest.raises(RevisitError, match="alpha is a setting of the method, not an argument of generate"):
        decode_batch(*loaded, inputs, methods.get("deco"), [how], alpha=0.5)


def test_why_an_answer_ended(loaded: tuple[Any, Any], images: list[list[Any]]) -> None:
    short = alone(loaded, PROMPTS[0], images[0], Decoding(max_new_tokens=3))
    assert (short.finish, len(short.tokens)) == ("length", 3)
    whole = alone(loaded, PROMPTS[0], images[0], Decoding(max_new_tokens=200))
    assert whole.finish == "stop"
    assert whole.tokens[-1] in loaded[0].generation_config.eos_token_id
    exact = alone(loaded, PROMPTS[0], images[0], Decoding(max_new_tokens=len(whole.tokens)))
    assert (exact.finish, exact.tokens) == ("stop", whole.tokens)


def test_a_listener_hears_every_token_once_and_ends_its_row(loaded: tuple[Any, Any], images: list[list[Any]]) -> None:
    heard: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def listen(row: int, token: int) -> bool:
        heard[row].append(token)
        return row == 0 and len(heard[0]) == 4

    inputs = prepare(loaded[1], PROMPTS, images)
    found = decode_batch(*loaded, inputs, Greedy(), [Decoding(max_new_tokens=40)] * 3, on_token=listen)
    assert [list(answer.tokens) for answer in found] == [heard[0], heard[1], heard[2]]
    assert (len(heard[0]), found[0].finish) == (4, "stop")
    assert found[0].traces[0].step_count == 4
    heard = {0: [], 1: [], 2: []}
    beamed = [Decoding(max_new_tokens=8, num_beams=2)] * 3
    found = decode_batch(*loaded, inputs, Greedy(), beamed, on_token=listen)  # at the end, when they are known
    assert [list(answer.tokens) for answer in found] == [heard[0], heard[1], heard[2]]
    assert len(heard[0]) == 4


def test_prompts_without_a_picture_are_decoded_plainly(loaded: tuple[Any, Any], images: list[list[Any]]) -> None:
    mixed = decode_prompts(
        *loaded, PROMPTS, [images[0], [], images[2]], methods.get("revisit"), Decoding(max_new_tokens=10)
    )
    assert [answer.counters()["vision_tokens"] > 0 for answer in mixed] == [True, False, True]
    assert mixed[1].counters()["applied"] == 0
    (plain,) = decode_prompts(*loaded, [PROMPTS[1]], [[]], Greedy(), Decoding(max_new_tokens=10))
    assert mixed[1].tokens == plain.tokens


def test_beams_add_up_and_greedy_rows_are_left_alone(loaded: tuple[Any, Any], images: list[list[Any]]) -> None:
    (beamed,) = decode_prompts(
        *loaded, [PROMPTS[0]], [images[0]], methods.get("revisit"), Decoding(max_new_tokens=8, num_beams=3)
    )
    assert len(beamed.traces) == 3
    assert beamed.counters()["vision_tokens"] == beamed.traces[0].vision_tokens > 0
    scores = torch.randn(2, 50)
    from revisit.decoding.batch import RowSampling

    kept = RowSampling([Decoding(), Decoding(temperature=1.0)], [0, 0])(torch.zeros(2, 1, dtype=torch.long), scores)
    assert torch.equal(kept[0], scores[0])
    assert int(kept[1].isfinite().sum()) == 1
