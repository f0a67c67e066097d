"""`revisit.generate`, `model.generate(custom_generate=method)` and the folder for the Hub behave alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import families
import revisit
from revisit import OPERA, ReVisiT, RevisitError
from revisit.models.prompts import prepare

METHOD = ReVisiT(alpha=1e-2)
HUB = Path(__file__).parents[2] / "hub"  # the `custom_generate` folder


def ours(model: Any, method: Any, **kwargs: Any) -> Any:
    return revisit.generate(model, method=method, **kwargs)


def theirs(model: Any, method: Any, **kwargs: Any) -> Any:
    return model.generate(custom_generate=method, **kwargs)


ENTRY_POINTS = pytest.mark.parametrize("generate", [ours, theirs])
Generate = Callable[..., Any]


def inputs(family: str = "llava", rows: int = 1) -> dict[str, Any]:
    return dict(families.inputs(family, ["what is it?"] * rows, [[families.image(n)] for n in range(rows)]))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl"])
def test_a_method_that_needs_beams_gets_them(family: str) -> None:
    model, _ = families.build(family)
    method, options = OPERA(beams=3), {"max_new_tokens": 4, "do_sample": False}
    requested = ours(model, method, **inputs(family, 2), num_beams=3, **options)
    assert torch.equal(ours(model, method, **inputs(family, 2), **options), requested)
    assert torch.equal(theirs(model, method, **inputs(family, 2), **options), requested)


@ENTRY_POINTS
def test_beams_cannot_be_added_to_a_prepared_cache(generate: Generate) -> None:
    model, _ = families.build("llava")
    with pytest.raises(RevisitError, match="num_beams=2"):
        generate(model, OPERA(beams=2), **inputs(), max_new_tokens=2, cache_implementation="static")


@ENTRY_POINTS
def test_pixels_in_half_precision_fit_a_model_in_float32(generate: Generate) -> None:
    model, _ = families.build("llava")
    given, options = inputs(), {"max_new_tokens": 4, "do_sample": False}
    given["pixel_values"] = given["pixel_values"].bfloat16()
    widened = {**given, "pixel_values": given["pixel_values"].float()}
    assert torch.equal(generate(model, METHOD, **given, **options), ours(model, METHOD, **widened, **options))


@ENTRY_POINTS
def test_stop_strings(generate: Generate) -> None:
    model, processor = revisit.load("tiny")
    image = families.image(0, (96, 96))
    given = dict(prepare(processor, ["Please describe this image in detail."], [[image]], device=model.device))
    options: dict[str, Any] = {**given, "max_new_tokens": 24, "do_sample": False}
    start, tokenizer = given["input_ids"].shape[1], processor.tokenizer
    whole = tokenizer.decode(generate(model, METHOD, **options)[0, start:], skip_special_tokens=True)
    word = whole.split()[2]
    for more in ({}, {"tokenizer": tokenizer}, {"processor": processor}):
        stopped = generate(model, METHOD, **options, stop_strings=[word], **more)[0, start:]
        text = tokenizer.decode(stopped, skip_special_tokens=True)
        assert whole.startswith(text)
        assert text.endswith(word)
        assert len(text) < len(whole)


def test_stop_strings_need_a_processor() -> None:
    model, _ = families.build("llava")
    with pytest.raises(RevisitError, match="pass processor="):
        ours(model, METHOD, **inputs(), stop_strings=["a"], max_new_tokens=2)


@ENTRY_POINTS
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"num_beams": 65}, "num_beams"),
        ({"do_sample": True, "temperature": 1e-320}, "temperature"),
        ({"sequence_bias": [[[families.VOCAB + 5], 1.0]]}, "transformers cannot generate"),
        ({"trace": True}, "trace must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_raise_one_sentence(generate: Generate, options: dict[str, Any], word: str) -> None:
    model, _ = families.build("llava")
    with pytest.raises(RevisitError, match=word) as raised:
        generate(model, METHOD, **inputs(), max_new_tokens=2, **options)
    assert "\n" not in str(raised.value)


@ENTRY_POINTS
def test_images_of_another_prompt_raise_one_sentence(generate: Generate) -> None:
    model, _ = families.build("llava")
    wrong = {**inputs(), "pixel_values": inputs(rows=2)["pixel_values"]}
    with pytest.raises(RevisitError, match="image tokens do not match"):
        generate(model, METHOD, **wrong, max_new_tokens=2)


@pytest.mark.parametrize(("method", "same"), [("revisit:alpha=1e-3", ReVisiT(alpha=1e-3)), ("greedy", "greedy")])
def test_the_hub_folder_decodes_like_the_library(method: str, same: ReVisiT | str) -> None:
    model, _ = families.build("llava")
    options = {"max_new_tokens": 8, "do_sample": False}
    loaded = model.generate(**inputs(), custom_generate=str(HUB), trust_remote_code=True, method=method, **options)
    assert loaded.tolist() == ours(model, same, **inputs(), **options).tolist()


def test_the_hub_folder_decodes_prompts_without_an_image_plainly() -> None:
    """As chats in `transformers serve` that begin without an image."""
    model, processor = families.build("llava")
    text = processor(text=["USER: Hello! ASSISTANT:"], return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False}
    with pytest.warns(UserWarning, match="without an image is decoded without revisit"):
        answer = model.generate(**text, custom_generate=str(HUB), trust_remote_code=True, **options)
    assert answer.tolist() == model.generate(**text, **options).tolist()
