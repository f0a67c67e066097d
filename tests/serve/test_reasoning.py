"""Thoughts are sent separately from answers, through the official client."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, ClassVar

import openai
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import families
from revisit.serve import decoder as decoder_module
from revisit.serve.decoder import Decoder
from revisit.serve.requests import reasoning_options
from revisit.serve.schema import ChatBody
from servers import messages, serving

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)


class Scripted(LogitsProcessor):
    """Choose the tokens of a script, one per step; < and > open and close a thought, E ends the answer."""

    script = ""
    ids: ClassVar[dict[str, int]] = {}

    def __init__(self) -> None:
        self.start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.start = input_ids.shape[1] if self.start is None else self.start
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self.ids[self.script[input_ids.shape[1] - self.start]]] = 0.0
        return chosen


@pytest.fixture(scope="module")
def thinking_client() -> Iterator[openai.OpenAI]:
    """Serve a model that writes `Scripted.script`, with a template that can open a thought."""
    model, processor = families.build("llava")
    processor = copy.deepcopy(processor)
    processor.tokenizer.add_tokens(["<think>", "</think>"])
    processor.chat_template = TEMPLATE
    made = Decoder(model, processor)
    assert made.thoughts is not None
    letters = {letter: processor.tokenizer.convert_tokens_to_ids(letter) for letter in "abxy1"}
    Scripted.ids = {**letters, "<": made.thoughts.open, ">": made.thoughts.close, "E": min(made.end)}
    with serving(decoder=made) as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def ask(thinking_client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> Any:
    decode = decoder_module.decode

    def scripted(*args: Any, processors: list[LogitsProcessor], **kwargs: Any) -> Any:
        return decode(*args, processors=[*processors, Scripted()], **kwargs)

    def ask(script: str, **fields: Any) -> Any:
        monkeypatch.setattr(decoder_module, "decode", scripted)
        monkeypatch.setattr(Scripted, "script", script)
        return thinking_client.chat.completions.create(
            **{"model": "tiny", "messages": messages(1), "max_tokens": len(script), **fields}
        )

    return ask


@pytest.mark.parametrize(
    ("script", "effort", "thought", "text", "thought_tokens", "unclosed"),
    [
        ("<xy>abE", None, "xy", "ab", 2, None),
        ("xy>abE", "high", "xy", "ab", 2, None),
        ("abE", "none", None, "ab", None, None),
        ("xyxy", "low", "xyxy", "", 4, 1),
        ("<x>a<y>bE", None, "xy", "ab", 2, None),
    ],
    ids=["generated", "opened by the prompt", "turned off", "unclosed", "reopened"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_thoughts_are_separate_from_answers(
    ask: Any,
    script: str,
    effort: str | None,
    thought: str | None,
    text: str,
    thought_tokens: int | None,
    unclosed: int | None,
    stream: bool,
) -> None:
    fields: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if not stream:
        answer = ask(script, **fields)
        message, usage, decoding = answer.choices[0].message, answer.usage, answer.decoding
        found = message.content, getattr(message, "reasoning_content", None)
        assert answer.choices[0].finish_reason == ("stop" if script.endswith("E") else "length")
    else:
        chunks = list(ask(script, **fields, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        found = "".join(delta.content or "" for delta in deltas), thoughts or None
        usage, decoding = chunks[-1].usage, chunks[-1].decoding
    assert found == (text, thought)
    assert usage.completion_tokens == len(script)
    details = usage.completion_tokens_details
    assert (None if details is None else details.reasoning_tokens) == thought_tokens
    assert decoding.get("unclosed") == unclosed


def test_log_probabilities_and_checks_are_of_the_answer(ask: Any) -> None:
    answer = ask("<xy>abE", logprobs=True, extra_body={"check": {"words": "content"}})
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["a", "b"]
    assert [(word["text"], word["start"]) for word in answer.check["words"]] == [("ab", 0)]


def test_a_json_answer_follows_a_thought_that_the_prompt_opened(ask: Any) -> None:
    pytest.importorskip("llguidance")
    one: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"const": 1}}}
    message = ask("xy>1E", reasoning_effort="high", response_format=one).choices[0].message
    assert (message.content, message.reasoning_content) == ("1", "xy")
    with pytest.raises(openai.BadRequestError, match="JSON schema"):  # the script ignores which tokens are allowed
        ask("xy>aE", reasoning_effort="high", response_format=one)


def test_efforts_that_do_not_exist_get_status_400(ask: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        ask("E", reasoning_effort="maximal")
    with pytest.raises(openai.BadRequestError, match="no budget for thoughts") as caught:
        ask("E", extra_body={"thinking_budget": 5})
    assert caught.value.param == "thinking_budget"


def test_options_of_the_chat_template() -> None:
    chat = ChatBody(model="m", messages=[{"role": "user", "content": "?"}], reasoning_effort="low", thinking_budget=5)  # type: ignore[list-item]
    template = "{{ reasoning_effort }} {{ thinking_budget }}"
    assert reasoning_options(chat, template) == {"reasoning_effort": "low", "thinking_budget": 5}


def test_a_method_in_one_phase_counts_the_steps_outside(ask: Any) -> None:
    chosen = {"decoding": {"method": "revisit", "settings": {"phase": "answer"}}}
    answer = ask("<xy>abE", extra_body=chosen)
    assert answer.decoding["outside"] == 3  # x, y and the token that closes the thought
