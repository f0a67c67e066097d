"""Second prompts on the vocabularies of the models that the papers used, and with every plain word in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import vocabularies
from revisit.decoding.prompt_edits import around_image
from revisit.methods import code, icd
from revisit.models import families

HUMAN = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
QUESTION = "Is there a dog in the image?"
SENTENCE = icd.ICD().sentence
# model_type, what the chat format writes for (system message, opened user's turn, its end); none of them has a default system message
FORMATS = {
    "LLaVA-1.5": ("llava", "{} ", "USER: ", " ASSISTANT:"),
    "LLaVA-NeXT on Vicuna": ("llava_next", "{} ", "USER: ", " ASSISTANT:"),
    "LLaVA-NeXT on Mistral": ("llava_next", "<<SYS>>\n{}\n<</SYS>>\n\n", "[INST] ", " [/INST]"),
    "ViP-LLaVA": ("vipllava", "{}", "###Human: ", "###Assistant:"),
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}SYSTEM{% else %}USER{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %}END{% endif %}{% endfor %}"
)


def chat(vocabulary: str, name: str) -> tuple[Any, families.Family]:
    """Return what prompt edits read of a processor, and the family."""
    model_type, system, user, end = FORMATS[name]
    template = (
        TEMPLATE.replace("SYSTEM", system.format("{{ m.content[0].text }}")).replace("USER", user).replace("END", end)
    )
    tokenizer = vocabularies.load(vocabulary)

    def apply(messages: Any, **named: Any) -> Any:
        return tokenizer.apply_chat_template(messages, chat_template=template, **named)

    processor = SimpleNamespace(
        tokenizer=tokenizer, image_token="<image>", chat_template=template, apply_chat_template=apply
    )
    return processor, families.of(model_type)


def tokens(vocabulary: str, before: str, after: str) -> tuple[list[int], list[int]]:
    """Return the token ids before and after an image, encoded piece by piece as LLaVA's programs do."""
    tokenizer = vocabularies.load(vocabulary)
    return tokenizer(before)["input_ids"], tokenizer(after, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("vocabulary", vocabularies.names())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("system", [None, HUMAN])
def test_code_sends_its_whole_request(name: str, vocabulary: str, system: str | None) -> None:
    processor, family = chat(vocabulary, name)
    _, message, user, end = FORMATS[name]
    head, tail = around_image(processor, code.REQUEST, system, family=family)
    before = (message.format(system) if system else "") + user
    assert (list(head), list(tail)) == tokens(vocabulary, before, f"\n{code.REQUEST}{end}")


@pytest.mark.parametrize("vocabulary", vocabularies.names())
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("system", [None, HUMAN])
def test_icd_replaces_the_system_message(name: str, vocabulary: str, system: str | None) -> None:
    processor, family = chat(vocabulary, name)
    _, message, user, end = FORMATS[name]
    image = processor.tokenizer.convert_tokens_to_ids("<image>")

    def prompt(words: str | None) -> list[int]:
        before, after = tokens(vocabulary, (message.format(words) if words else "") + user, f"\n{QUESTION}{end}")
        return [*before, image, image, *after]

    opened, turn = (torch.tensor(ids) for ids in icd.system_turn(processor, SENTENCE, family))
    sentence = torch.tensor(processor.tokenizer(SENTENCE, add_special_tokens=False)["input_ids"])
    decoded = torch.tensor(prompt(system))
    assert sent(icd.with_beginning(decoded, sentence, opened, turn, 1), decoded) == prompt(SENTENCE)


def sent(edit: Tensor, ids: Tensor) -> list[int]:
    """Return the token ids of an edited prompt."""
    return torch.where(edit >= 0, ids[edit.clamp_min(0)], -1 - edit).tolist()  # type: ignore[no-any-return]
