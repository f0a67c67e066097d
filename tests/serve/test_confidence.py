"""Log-probabilities and JSON answers, through the official client."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
import torch

import families
from revisit.models.prompts import encode
from revisit.serve.decoder import Decoder
from servers import messages

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["cat", "dog"]}, "seen": {"type": "boolean"}},
    "required": ["animal", "seen"],
    "additionalProperties": False,
}


def ask(client: openai.OpenAI, image: int | None = 1, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": messages(image), "max_tokens": 6, **fields})


def test_log_probabilities_of_plain_decoding_are_the_models(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3, extra_body={"decoding": {"method": "greedy"}})
    model, processor = families.build("llava")
    inputs = encode(processor, ["USER: <image>\nWhat is this? ASSISTANT:"], [[families.image(1)]])
    output = model.generate(
        **inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    new = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    content = answer.choices[0].logprobs.content
    for token, logits, entry in zip(new, output.logits, content, strict=True):
        wanted = logits[0].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(wanted[token]), abs=1e-4)
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx(
            wanted.topk(3).values.tolist(), abs=1e-4
        )
        assert bytes(entry.bytes).decode() == entry.token


def test_log_probabilities_are_those_of_the_method(client: openai.OpenAI) -> None:
    """After ReVisiT, only plausible tokens are left, and their probabilities add up to 1."""
    answer = ask(client, logprobs=True, top_logprobs=20, extra_body={"decoding": {"settings": {"alpha": 0.5}}})
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert sum(math.exp(other.logprob) for other in entry.top_logprobs) <= 1 + 1e-5
    few = [entry for entry in answer.choices[0].logprobs.content if len(entry.top_logprobs) < 20]
    assert few
    assert sum(math.exp(other.logprob) for other in few[0].top_logprobs) == pytest.approx(1, abs=1e-4)


def test_streamed_log_probabilities_equal_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2, temperature=1.0, seed=3).choices[0].logprobs.content
    chunks = ask(client, logprobs=True, top_logprobs=2, temperature=1.0, seed=3, stream=True)
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"top_logprobs": 3}, 'needs "logprobs": true'),
        ({"logprobs": True, "top_logprobs": 21}, "less than or equal to 20"),
        ({"logprobs": True, "extra_body": {"decoding": {"method": "opera"}}}, "beam search"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_wrong_requests_get_status_400(client: openai.OpenAI, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert sentence in caught.value.body["message"]  # type: ignore[index]


def test_a_server_without_llguidance_names_the_extra(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("revisit.errors.find_spec", lambda name: None)
    with pytest.raises(openai.BadRequestError, match="pip install 'llguidance"):
        ask(client, response_format={"type": "json_object"})


@pytest.mark.parametrize("method", ["greedy", "revisit", "vcd"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_answers_follow_the_schema(client: openai.OpenAI, method: str, stream: bool) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA, "strict": True}}
    fields: Any = {"response_format": form, "max_tokens": 40, "temperature": 1.0, "seed": 5, "stream": stream}
    answer = ask(client, **fields, extra_body={"decoding": {"method": method}})
    if stream:
        chunks = [chunk.choices[0] for chunk in answer if chunk.choices]
        text, reason = "".join(choice.delta.content or "" for choice in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    jsonschema.validate(json.loads(text), SCHEMA)
    assert reason == "stop"


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"properties": {"a": {"type": "boolean"}}}, '{"a": true}', '{"a": true, "b": 1}'),
        ({"properties": {"a": {"type": "boolean"}}, "additionalProperties": True}, '{"a": true, "b": 1}', "{]"),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}}, '{"b": null}', '{"b": 1}'),
        (
            {"properties": {"properties": {"properties": {"a": {}}}}},
            '{"properties": {"a": 1}}',
            '{"properties": {"b": 1}}',
        ),
        ({"$defs": {"x": {"properties": {"a": {}}}}, "items": {"$ref": "#/$defs/x"}}, '[{"a": 1}]', '[{"b": 1}]'),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, '{"a": 1, "b": 2}', "{]"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]}, '{"a": 1, "b": 2}', "{]"),
        ({"const": {"properties": {"a": 1}}}, '{"properties": {"a": 1}}', "{]"),
        ({"type": "object"}, '{"any": 1}', "{]"),
    ],
)
def test_objects_have_the_keys_that_their_schema_lists(schema: dict[str, Any], allowed: str, forbidden: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    from revisit.serve.processors import grammar

    before, tokenizer = json.dumps(schema), llguidance.LLTokenizer("byte")
    for text, valid in ((allowed.replace(" ", ""), True), (forbidden.replace(" ", ""), False)):
        matcher = llguidance.LLMatcher(tokenizer, grammar(schema), log_level=0)
        assert (matcher.validate_tokens([*text.encode()]) == len(text)) == valid
    assert json.dumps(schema) == before


def test_recursive_schemas_are_followed(client: openai.OpenAI) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    pytest.importorskip("llguidance")
    schema: Any = {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}
    form: Any = {"type": "json_schema", "json_schema": {"name": "nested", "schema": schema}}
    choice = ask(client, response_format=form, max_tokens=40, temperature=1.0, seed=1).choices[0]
    assert choice.message.content.startswith("[")
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_rows_with_and_without_a_schema_share_a_batch() -> None:
    pytest.importorskip("llguidance")
    from revisit.serve.processors import Grammar, JsonAnswers, grammar

    decoder = Decoder(*families.build("llava"))
    rows = [Grammar(grammar(SCHEMA), decoder.grammar_tokenizer).allowed, lambda vocabulary: None]
    scores = torch.zeros(2, 512)
    found = JsonAnswers(rows)(torch.zeros(2, 3, dtype=torch.long), scores)
    assert bool((found[1] == 0).all())
    texts = {decoder.processor.tokenizer.decode([int(token)]) for token in (found[0] == 0).nonzero()}
    assert texts
    assert all('{"animal": '.startswith(text) for text in texts)
    assert bool((scores == 0).all())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"type": "array", "minItems": 10**9},
        {"type": "array", "maxItems": 1e9},
        {"enum": ["x" * 30_000]},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_unusable_schemas_get_status_400(client: openai.OpenAI, schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, response_format=form)
    assert caught.value.param == "response_format"
