"""Descriptions are generated once per image."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import families
import revisit
from revisit import CODE
from revisit.decoding.prompt_edits import around_image, starts_with_bos
from revisit.methods import code

PICTURES = [families.image(seed) for seed in (1, 2)]


def forwards(family: str, method: CODE, prompts: list[str], images: list[object]) -> int:
    model, processor = families.build(family)
    count = 0

    def tally(*_: object) -> None:
        nonlocal count
        count += 1

    inputs = families.inputs(family, prompts, [[image] for image in images])
    hook = model.register_forward_hook(tally)
    settings = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": families.VOCAB + 1}
    revisit.generate(model, **inputs, method=method, processor=processor, **settings)
    hook.remove()
    return count


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_an_image_is_described_once(family: str) -> None:
    method = CODE(description_tokens=3, mode="stacked")
    code._DESCRIPTIONS.clear()
    plain = 3  # two prompts and one step of both
    assert forwards(family, method, ["a", "b"], PICTURES) == plain + 3
    assert forwards(family, method, ["another question"], PICTURES[1:]) == plain  # known from the batch
    assert forwards(family, method, ["and"], [families.image(3)]) == plain + 3
    code._DESCRIPTIONS.clear()
    assert forwards(family, method, ["a"], PICTURES[:1]) == plain + 3


def test_old_descriptions_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MOST", 2)
    code._DESCRIPTIONS.clear()
    for number in (1, 2, 3):
        forwards("llava", CODE(description_tokens=3), ["a"], [families.image(number)])
    assert len(code._DESCRIPTIONS[families.build("llava")[0]]) == 2


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


def test_bos_is_only_added_if_the_tokenizer_adds_it() -> None:
    class Tokenizer:
        bos_token_id = 1

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 7]}

    processor: Any = SimpleNamespace(tokenizer=Tokenizer())
    assert starts_with_bos(processor) == (1,)
    assert starts_with_bos(families.build("llava")[1]) == ()  # this tokenizer writes none
