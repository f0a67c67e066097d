"""Speculative decoding and chunked prefill return the tokens of plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import __version__ as transformers_version

import families
import revisit
from methods import decoding_cases
from revisit import Chain, ReVisiT, RevisitError, Trace
from revisit.decoding.options import CHUNKS_SINCE
from revisit.embedded.scenes import render, scene
from revisit.models import DESCRIBE
from revisit.models import families as declared

METHOD = ReVisiT(alpha=1e-2, layers="all", weight=0.1)  # near enough to the model that some drafts are accepted
NEW = 16
STATEFUL = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "minicpmv4_6")  # their caches cannot drop rejected tokens
LOOKUP = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}


def one(family: str) -> Any:
    return families.inputs(family, ["describe the image in a few words, a few words"], [[families.image(2, (64, 28))]])


def decode(family: str, inputs: Any, method: Any = METHOD, **kwargs: Any) -> tuple[list[list[int]], Trace]:
    model, _ = families.build(family)
    trace = Trace()
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": families.VOCAB + 1, **kwargs}
    output = revisit.generate(model, **inputs, method=method, trace=trace, **options)
    return output[:, inputs["input_ids"].shape[1] :].tolist(), trace


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in STATEFUL])
def test_drafted_tokens_are_those_of_plain_decoding(family: str) -> None:
    model, _ = families.build(family)
    inputs = one(family)
    tokens, plain = decode(family, inputs)
    assert plain.summary()["applied"] > 0
    accepted = 0
    # The model is its own assistant: its drafting forwards must not reach the method's hooks.
    modes: list[dict[str, Any]] = [{"assistant_model": model}, LOOKUP]
    modes += [{"assistant_early_exit": 3}] if family != "gemma4" else []
    for mode in modes:
        got, trace = decode(family, inputs, **mode)
        assert got == tokens, mode
        assert trace.rows == plain.rows, mode
        accepted += trace.accepted
    assert accepted > 0


def test_the_embedded_model_needs_fewer_forwards_for_the_same_caption() -> None:
    model, processor = revisit.load("tiny")
    forwards: list[int] = []
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    accepted = 0
    for number in range(4):
        inputs = revisit.prepare(processor, [DESCRIBE], [[render(scene("unusual", 77, number))]])
        found = []
        for mode in ({}, {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2}):
            forwards.clear()
            trace = Trace()
            output = revisit.generate(model, **inputs, trace=trace, max_new_tokens=60, do_sample=False, **mode)
            found.append(output.tolist())
            assert len(forwards) == trace.summary()["steps"] - trace.accepted
        assert found[0] == found[1]
        accepted += trace.accepted
    handle.remove()
    assert accepted > 0


@pytest.mark.parametrize(
    "method",
    ["greedy", "plausible_only", "flb:decay=1.0", ReVisiT(select="random"), Chain(["plausible_only", METHOD])],
    ids=str,
)
def test_other_methods_without_state_speculate(method: Any) -> None:
    model, _ = families.build("llava")
    tokens, plain = decode("llava", one("llava"), method)
    got, trace = decode("llava", one("llava"), method, assistant_model=model)
    assert got == tokens
    assert trace.rows == plain.rows
    assert [link.rows for link in trace.links] == [link.rows for link in plain.links]


def test_recorded_steps_are_those_that_were_accepted() -> None:
    traces = []
    for mode in ({}, LOOKUP):
        trace = Trace(record=True)
        decode_with = families.build("llava_next")[0]
        revisit.generate(decode_with, **one("llava_next"), method=METHOD, trace=trace, max_new_tokens=NEW, **mode)
        traces.append([(record.step, record.token, record.vision_token) for record in trace.rows[0].records])
    assert traces[0] == traces[1]


@pytest.mark.parametrize(
    "name", [n for n, method in decoding_cases.METHODS.items() if not method.speculative] + ["opera"]
)
def test_methods_that_cannot_speculate_raise(name: str) -> None:
    method = decoding_cases.METHODS.get(name, name)
    with pytest.raises(RevisitError, match=f"{name} cannot decode speculatively"):
        decode("llava", one("llava"), method, **LOOKUP)
    with pytest.raises(RevisitError, match="prefill_chunk_size"):
        decode("llava", one("llava"), method, prefill_chunk_size=8)


def test_sampled_drafts_have_the_distribution_of_the_method() -> None:
    """Pearson's chi-square of the second token, which is drafted, given the first; 99.9 % quantile."""
    from scipy.stats import chi2

    model, _ = families.build("llava")
    inputs, method = one("llava"), ReVisiT(alpha=1e-3, weight=0.1)
    prompt = inputs["input_ids"].shape[1]
    torch.manual_seed(0)
    pairs, trace, draw = [], Trace(), {"do_sample": True, "temperature": 0.4}
    accepted = 0
    for _ in range(150):
        output = revisit.generate(
            model, **inputs, method=method, trace=trace, max_new_tokens=3, assistant_model=model, **draw
        )
        accepted += trace.accepted
        pairs.append(tuple(output[0, prompt : prompt + 2].tolist()))
    assert accepted > 25
    first = max({a for a, _ in pairs}, key=[a for a, _ in pairs].count)
    second = torch.tensor([b for a, b in pairs if a == first])
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], torch.tensor([[first]])], dim=1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    draw |= {"return_dict_in_generate": True, "output_scores": True}
    exact = revisit.generate(model, **longer, method=method, max_new_tokens=1, **draw)
    expected = exact.scores[0][0].softmax(-1) * len(second)
    seen = torch.bincount(second, minlength=len(expected)).float()
    common = expected >= 5
    cells = [*zip(seen[common].tolist(), expected[common].tolist(), strict=True)]
    cells.append((float(seen[~common].sum()), max(float(expected[~common].sum()), 1.0)))
    assert len(cells) > 2
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    assert statistic < chi2.ppf(0.999, len(cells) - 1)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_separate_assistant_gets_the_image_and_a_text_model_drafts_too(family: str) -> None:
    model, _ = families.build(family)
    inputs, twin = one(family), copy.deepcopy(model)
    tokens, _ = decode(family, inputs, "greedy")
    got, trace = decode(family, inputs, "greedy", assistant_model=twin)
    assert got == tokens
    assert trace.accepted == trace.drafted > 0  # the drafts of a copy are the model's own tokens
    config = LlamaConfig(**{**families.TEXT, "num_hidden_layers": 1, "eos_token_id": 2})
    assert decode(family, inputs, "greedy", assistant_model=LlamaForCausalLM(config).eval())[0] == tokens


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (2, LOOKUP, "batch_size"),
        (1, {**LOOKUP, "use_cache": False}, "use_cache"),
        (1, {**LOOKUP, "cache_implementation": "static"}, "Static"),
        (1, {**LOOKUP, "num_beams": 2}, "Beam search"),
        (1, {"prompt_lookup_num_tokens": 0}, "above 0"),
        (1, {"assistant_early_exit": 0}, "from 1 to 4, not 0"),
        (1, {"assistant_early_exit": 5}, "from 1 to 4, not 5"),
        (1, {"assistant_model": "tiny"}, "must be a loaded model, not a str"),
    ],
)
def test_calls_that_cannot_be_speculative_raise(rows: int, options: dict[str, Any], message: str) -> None:
    inputs = families.inputs("llava", ["hi"] * rows, [[families.image(1)]] * rows)
    with pytest.raises(RevisitError, match=message):
        decode("llava", inputs, **options)


def test_an_assistant_with_another_vocabulary_raises() -> None:
    tiny, _ = revisit.load("tiny")
    with pytest.raises(RevisitError, match="vocabulary"):
        decode("llava", one("llava"), assistant_model=tiny)


needs_chunks = pytest.mark.skipif(
    Version(transformers_version) < Version(CHUNKS_SINCE), reason="transformers loses the image between chunks"
)


@needs_chunks
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_prompt_in_chunks_decodes_as_in_one_forward(family: str) -> None:
    inputs = families.inputs(family, ["hi", "what is it?"], [[families.image(1)], [families.image(2, (64, 28))]])
    if declared.of(family).attends_ahead:
        with pytest.raises(RevisitError, match="attend to later ones"):
            decode(family, inputs, prefill_chunk_size=5)
        return
    if family == "ovis2":
        with pytest.raises(RevisitError, match="cannot prefill"):
            decode(family, inputs, prefill_chunk_size=5)
        return
    tokens, plain = decode(family, inputs)
    for size in (5, 1000):
        got, trace = decode(family, inputs, prefill_chunk_size=size)
        assert got == tokens
        assert trace.rows == plain.rows


@needs_chunks
def test_a_captured_image_spans_chunks() -> None:
    found = []
    for size in (None, 3):
        trace = Trace(record=True)
        model, _ = families.build("llava")
        options = {"method": METHOD, "trace": trace, "max_new_tokens": 2, "do_sample": False}
        revisit.generate(model, **one("llava"), prefill_chunk_size=size, **options)
        found.append([record.divergences for record in trace.rows[0].records])
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)
