"""Logits processors of a user's own, around every method: each is called once per step, and what it allows comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

import revisit
from revisit.decoding.method import METHODS
from revisit.embedded.samples import sample
from revisit.models.outputs import generated_text
from revisit.models.prompts import prepare

ANSWERS = ("Yes, there is a dog.", "No.")  # the second row ends early
SETTINGS = {"revisit": {"alpha": 1e-3}, "chain": {"methods": ("vcd", "revisit")}}
LOOPS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_p": 0.9, "top_k": 20, "temperature": 0.8},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "top_p": 0.9},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


class Forced(LogitsProcessor):
    """Force the answers by counting calls, and keep the shape of every call."""

    def __init__(self, tokenizer: Any, answers: tuple[str, ...]) -> None:
        self.tokens = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in answers]
        self.steps = max(map(len, self.tokens))
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        for row in range(len(scores)):
            tokens = self.tokens[row * len(self.tokens) // len(scores)]
            token = tokens[min(len(self.calls), len(tokens) - 1)]
            forced[row, token] = scores[row, token]
        self.calls.append((*input_ids.shape, len(scores)))
        return forced


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return revisit.load("tiny")


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", sorted({*METHODS.built_in} - {"tcd"}))  # for videos, which `tiny` does not read
def test_a_forced_sentence_comes_out_and_each_step_is_one_call(pair: Any, name: str, loop: str) -> None:
    (model, processor), options = pair, LOOPS[loop]
    used = METHODS.get(name, **SETTINGS.get(name, {}))
    if (loop == "drafts" and not used.speculative) or (name == "opera" and "do_sample" in options):
        pytest.skip("the method refuses it")
    count = 1 if loop == "drafts" else 2
    images = [sample("usual").image(), sample("demo").image()][:count]
    inputs = prepare(processor, ["Is there a dog in the image?", "Please describe it."][:count], images)
    forced = Forced(processor.tokenizer, ANSWERS[:count])
    torch.manual_seed(0)
    output = revisit.generate(
        model,
        **inputs,
        **{"do_sample": False, **options},
        method=used,
        processor=processor,
        logits_processor=LogitsProcessorList([forced]),
        max_new_tokens=forced.steps,
    )
    assert generated_text(processor, output, inputs) == list(ANSWERS[:count])
    rows, prompt = count * options.get("num_beams", used.own_beams), inputs["input_ids"].shape[1]
    assert forced.calls == [(rows, prompt + step, rows) for step in range(forced.steps)]


class Users(LogitsProcessor):
    """A user's processor: another one under a name that is not transformers'."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.inner(input_ids, scores)


def scores(pair: Any, method: Any, processors: list[LogitsProcessor], **options: Any) -> Any:
    model, processor = pair
    inputs = prepare(processor, "Please describe this image in detail.", sample("usual").image())
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True, **options}
    torch.manual_seed(3)
    output = revisit.generate(
        model, **inputs, method=method, logits_processor=LogitsProcessorList(processors), **settings
    )
    return torch.stack(output.scores)


@pytest.mark.parametrize("inner", [TopKLogitsWarper(3), TopPLogitsWarper(0.8), lambda ids, scores: scores])
@pytest.mark.parametrize("name", ["revisit", "vcd", "pai"])
def test_a_users_warper_acts_on_what_the_method_leaves(pair: Any, name: str, inner: Any) -> None:
    options = {"do_sample": True, "top_p": 0.95, "temperature": 1.3, "top_k": 0}
    used = METHODS.get(name, **SETTINGS.get(name, {}))
    own = [inner] if isinstance(inner, LogitsProcessor) else []
    torch.testing.assert_close(
        scores(pair, used, [Users(inner)], **options), scores(pair, used, own, **options), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_a_row_without_any_token_of_the_method_has_the_models_scores(pair: Any, beams: int) -> None:
    unlikely = scores(pair, "greedy", [], do_sample=False)[0, 0].argsort()[:40]

    def only(input_ids: Tensor, values: Tensor) -> Tensor:
        return torch.full_like(values, -torch.inf).index_copy(1, unlikely, values[:, unlikely])

    options = {"do_sample": False, "num_beams": beams, "repetition_penalty": 1.2}
    plain = scores(pair, "greedy", [Users(only)], **options)
    strict = revisit.ReVisiT(alpha=0.9)
    torch.testing.assert_close(scores(pair, strict, [Users(only)], **options), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["memvr", "vista", "pai", "vaf", "revisit"])
@pytest.mark.parametrize("inner", ["greedy", "pai"])
def test_a_users_processor_may_run_the_model(pair: Any, name: str, inner: str) -> None:
    """A call within a method's call is as without it, and so is the method's call."""
    model, processor = pair
    other = prepare(processor, ["Is there a dog?"] * 2, [[sample("usual").image()]] * 2)
    wanted = revisit.generate(model, **other, method=inner, max_new_tokens=6)
    within = []

    def asks(input_ids: Tensor, values: Tensor) -> Tensor:
        if len(within) < 2:
            within.append(revisit.generate(model, **other, method=inner, max_new_tokens=6))
        return values

    options = {"do_sample": False, "max_new_tokens": 6}
    torch.testing.assert_close(scores(pair, name, [Users(asks)], **options), scores(pair, name, [], **options))
    assert all(torch.equal(found, wanted) for found in within)
