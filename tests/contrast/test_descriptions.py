"""Descriptions are written once per picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import families
import revisit
from revisit import CODE
from revisit.contrast.descriptions import forget
from revisit.methods.prompts import around_image, starts_with_bos

PICTURES = [families.picture(seed) for seed in (1, 2)]


def forwards(family: str, method: CODE, prompts: list[str], pictures: list[object]) -> int:
    model, processor = families.build(family)
    count = 0

    def tally(*_: object) -> None:
        nonlocal count
        count += 1

    inputs = families.inputs(family, prompts, [[picture] for picture in pictures])
    hook = model.register_forward_hook(tally)
    settings = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": families.VOCAB + 1}
    revisit.generate(model, **inputs, method=method, processor=processor, **settings)
    hook.remove()
    return count


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_picture_is_described_once(family: str) -> None:
    model, _ = families.build(family)
    method = CODE(description_tokens=3, mode="stacked")
    forget(model)
    plain = 3  # two prompts and one step of both
    assert forwards(family, method, ["a", "b"], PICTURES) == plain + 3
    assert forwards(family, method, ["another question"], PICTURES[1:]) == plain  # known from the batch
    assert forwards(family, method, ["and"], [families.picture(3)]) == plain + 3
    forget(model)
    assert forwards(family, method, ["a"], PICTURES[:1]) == plain + 3


def test_request_in_the_chat_format() -> None:
    _, processor = families.build("qwen2_5_vl")
    template = "{% for m in messages %}U:{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    template += "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %} A:"
    processor.chat_template = template
    try:
        head, tail = around_image(processor, "say")
    finally:
        processor.chat_template = None
    assert processor.tokenizer.decode(head) == "U:"
    assert processor.tokenizer.decode(tail) == "say A:"


def test_bos_is_only_added_where_it_is_written() -> None:
    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 7]}

    processor: Any = SimpleNamespace(tokenizer=Tokenizer())
    assert starts_with_bos(processor) == (1,)
    assert starts_with_bos(families.build("llava")[1]) == ()  # this tokenizer writes none
