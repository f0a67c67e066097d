"""A floor in requests: streams, JSON answers, several turns and images, through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import revisit
from revisit.embedded.scenes import render, scene
from revisit.models.names import names_of
from revisit.serve.decoder import Decoder
from servers import data_uri, serving

FLOOR = 0.5


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving(decoder=Decoder(*revisit.load("tiny"))) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def user(text: str, *numbers: int) -> dict[str, Any]:
    """Return a message with these scenes."""
    images = (data_uri(render(scene("unusual", 31, number))) for number in numbers)
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def ask(client: openai.OpenAI, *messages: Any, floor: float = FLOOR, method: str = "greedy", **fields: Any) -> Any:
    decoding = {"method": method, "settings": {"floor": floor}}
    options = {"model": "tiny", "max_tokens": 48, "extra_body": {"decoding": decoding}, **fields}
    return client.chat.completions.create(messages=messages, **options)


def supported(*numbers: int) -> dict[str, float]:
    """Return the support of the names by these scenes in one prompt."""
    images = [render(scene("unusual", 31, number)) for number in numbers]
    answer = revisit.ask("tiny", images, "Describe the image.", method=f"greedy:floor={FLOOR}", max_new_tokens=1)
    return answer.trace.rows[0].support


@pytest.mark.parametrize("method", ["greedy", "revisit"])
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, method: str) -> None:
    message = user("Describe the image.", 0)
    free, whole = (
        ask(client, message, method=method, floor=floor).choices[0].message.content for floor in (0.0, FLOOR)
    )
    chunks = ask(client, message, method=method, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    low = {name for name, value in supported(0).items() if value < FLOOR}
    assert low & set(names_of(()).find(free))
    assert not low & set(names_of(()).find(whole))


@pytest.mark.parametrize("floor", [1.0, FLOOR], ids=["none is left", "one is left"])
def test_a_schema_wins_over_the_floor_and_that_is_counted(client: openai.OpenAI, floor: float) -> None:
    pytest.importorskip("llguidance")
    ranked = sorted(supported(0), key=supported(0).__getitem__)
    offered = [*ranked[:3], ranked[-1]]
    schema = {"type": "object", "properties": {"seen": {"enum": offered}}, "required": ["seen"]}
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}}
    answer = ask(client, user("What is there?", 0), floor=floor, response_format=form)
    seen = json.loads(answer.choices[0].message.content)["seen"]
    assert seen in offered
    # A name whose letters were begun must be finished.
    assert (supported(0)[seen] >= floor) != bool(answer.decoding.get("overruled"))


def test_an_image_of_any_turn_supports_a_name(client: openai.OpenAI) -> None:
    both, first, second = supported(0, 1), supported(0), supported(1)
    assert {name for name in both if second[name] >= FLOOR > first[name]}
    turns = [user("Describe the image.", 0), {"role": "assistant", "content": "A scene."}, user("And this?", 1)]
    later = [*turns[:2], user("Describe the image again.")]
    for messages in (turns, later):
        answer = ask(client, *messages)
        named = set(names_of(()).find(answer.choices[0].message.content))
        assert named
        assert not any(max(first[name], second[name], both[name]) < FLOOR for name in named)
