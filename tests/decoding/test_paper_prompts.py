"""Second prompts on the vocabularies of the models that the papers used, and with every plain word in them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import released_llava
import revisit
import vocabularies
import word_tokenizers
from revisit import Method, RevisitError
from revisit.decoding.contrastive import contrast
from revisit.decoding.prompt_edits import around_image, image_edges, image_span, without_image
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


def plain_words(vocabulary: str) -> Tensor:
    """Return the ids of all tokens that texts are divided into."""
    tokenizer = vocabularies.load(vocabulary)
    return torch.tensor(
        sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids) - families.special_ids(tokenizer))
    )


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
    head, tail = around_image(processor, family, code.REQUEST, system)
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

    opened, turn = (torch.tensor(ids) for ids in icd.system_turn(processor, family, SENTENCE))
    sentence = torch.tensor(processor.tokenizer(SENTENCE, add_special_tokens=False)["input_ids"])
    decoded = torch.tensor(prompt(system))
    assert sent(icd.with_beginning(decoded, sentence, opened, turn, 1), decoded) == prompt(SENTENCE)


RECORDED = json.loads((Path(__file__).parents[1] / "data" / "released" / "prompts.json").read_text("utf-8"))


@pytest.mark.skipif("llama" not in vocabularies.names(), reason="LLaMA's vocabulary is not beside the clone")
@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['method']}-{row['format']}")
def test_second_prompts_are_those_of_the_released_programs(row: dict[str, Any]) -> None:
    """LLaVA-1.5 and LLaVA-NeXT on Vicuna; the programs write -200 for the image."""
    processor, family = chat("llama", "LLaVA-1.5")
    if row["method"] == "icd":
        (head, turn), (_, tail) = (
            icd.system_turn(processor, family, SENTENCE),
            around_image(processor, family, QUESTION),
        )
        assert [*head, *turn, -200, *tail] == row["tokens"]
        return
    system = HUMAN if row["format"] == "llava_v1" else HUMAN.replace("human", "user")
    head, tail = around_image(processor, family, code.REQUEST, system)
    assert [*head, -200, *tail] == row["tokens"]


def sent(edit: Tensor, ids: Tensor) -> list[int]:
    """Return the token ids of an edited prompt."""
    return torch.where(edit >= 0, ids[edit.clamp_min(0)], -1 - edit).tolist()  # type: ignore[no-any-return]


# -- every plain word of a vocabulary ------------------------------------------------------------------------------------

EDGED = {family.image_edges: family for family in families.FAMILIES.values() if family.image_edges is not None}


@pytest.mark.parametrize("vocabulary", vocabularies.names())
@pytest.mark.parametrize("family", EDGED.values(), ids=lambda family: family.model_type)
def test_no_word_beside_an_image_is_part_of_it(family: families.Family, vocabulary: str) -> None:
    """Between two images with nothing else, a word that also stands within images, such as a line break, cannot be told from them."""
    tokenizer = vocabularies.load(vocabulary)
    edges, image = families.edges(tokenizer, family), tokenizer.convert_tokens_to_ids("<image>")
    assert bool(edges.marks) == bool(family.image_edges)
    mark = sorted(edges.marks)[:1]
    block = torch.tensor(
        [*mark, image, *(t for word in sorted(edges.words) for t in (*mark, word, *mark)), image, *mark]
    )
    words = plain_words(vocabulary)
    sides = words[:, None].expand(-1, 2)
    rows = torch.cat([sides, block.expand(len(words), -1), sides], -1)  # a word twice, the image, the word twice
    rows = torch.nn.functional.pad(rows, (1, 1), value=1).flatten()
    inside = torch.zeros(len(words), len(block) + 6, dtype=torch.bool)
    inside[:, 3:-3] = True
    vision = rows == image
    assert torch.equal(image_span(rows, vision, edges), inside.flatten())
    assert torch.equal(without_image(rows, vision, edges), (~inside).flatten().nonzero().squeeze(-1))
    assert len(icd.after_image(rows[-len(block) - 6 :], vision[-len(block) - 6 :], edges, words)) == len(
        block
    ) + 6 + len(words)


@pytest.mark.parametrize("vocabulary", vocabularies.names())
@pytest.mark.parametrize("family", EDGED.values(), ids=lambda family: family.model_type)
def test_no_word_of_a_request_is_an_image(family: families.Family, vocabulary: str) -> None:
    processor, _ = chat(vocabulary, "LLaVA-1.5")
    text = processor.tokenizer.decode(plain_words(vocabulary), clean_up_tokenization_spaces=False).replace("<", "")
    head, tail = around_image(processor, family, text, f"{text}.")
    assert (list(head), list(tail)) == tokens(vocabulary, f"{text}. USER: ", f"\n{text} ASSISTANT:")
    opened, user = icd.system_turn(processor, family, f"{text}.")
    assert [*opened, *user] == list(head)


# -- prompts that cannot be made -----------------------------------------------------------------------------------------


def test_marks_that_are_text_raise() -> None:
    processor, family = chat("marked", "LLaVA-1.5")
    with pytest.raises(RevisitError, match="contains a token that marks an image"):
        around_image(processor, family, "What is <image>?")
    processor.image_token = "image"
    with pytest.raises(RevisitError, match="no special token 'image'"):
        around_image(processor, family, "What is in the image?")
    unmarked = SimpleNamespace(tokenizer=word_tokenizers.train("bytes"))
    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen2_vl"))
    run: Any = SimpleNamespace(model=model, processor=unmarked, method=icd.ICD.sid())
    with pytest.raises(RevisitError, match="does not mark them as special"):
        image_edges(run)


# -- 32 tokens for each of three questions, decoded by hand from the authors' prompts --------------------------------------

QUESTIONS = (QUESTION, "Please describe this image in detail.", "What color is the table?")


def answer(
    before: list[int], after: list[int], new: int, other: dict[str, Tensor] | None = None, combine: Any = None
) -> list[int]:
    """Decode greedily with a KV cache, contrasted with another prompt."""
    model = released_llava.build()
    outputs = [model(**given, use_cache=True) for given in (released_llava.inputs(before, after, 1), other) if given]
    made: list[int] = []
    while len(made) < new:
        logits = [output.logits[:, -1] for output in outputs]
        made.append(int((combine(*logits) if combine else logits[0]).argmax()))
        step = torch.tensor([made[-1:]])
        outputs = [model(input_ids=step, past_key_values=output.past_key_values) for output in outputs]
    return made


@pytest.mark.parametrize("vocabulary", ["llama" if "llama" in vocabularies.names() else "marked"])
@pytest.mark.parametrize("question", QUESTIONS)
@torch.no_grad()
def test_tokens_of_code_and_icd_equal_those_by_the_prompts_of_the_authors(question: str, vocabulary: str) -> None:
    processor, _ = chat(vocabulary, "LLaVA-1.5")
    before, after = tokens(vocabulary, f"{HUMAN} USER: ", f"\n{question} ASSISTANT:")

    def decoded(method: Method) -> list[int]:
        inputs = released_llava.inputs(before, after, 1)
        ids = revisit.generate(released_llava.build(), **inputs, method=method, processor=processor, max_new_tokens=32)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]

    disturbed = released_llava.inputs(*tokens(vocabulary, f"{SENTENCE} USER: ", f"\n{question} ASSISTANT:"), 1)
    want = answer(before, after, 32, disturbed, lambda l, other: contrast(l, other, 1.0, 0.1))
    assert decoded(icd.ICD.official()) == want

    description = answer(*tokens(vocabulary, f"{HUMAN} USER: ", f"\n{code.REQUEST} ASSISTANT:"), 16)
    described = torch.tensor([[*before, 1, *description, *after]])  # with BOS, as the tokenizer writes it
    text = {"input_ids": described, "attention_mask": torch.ones_like(described)}
    want = answer(before, after, 32, text, lambda l, other: code.contrast_description(l, other, 0.7))
    assert decoded(code.CODE.official(system=HUMAN, description_tokens=16)) == want
