"""`revisit.check`: the words that an image supports, from one forward pass."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import families
import revisit
from revisit.embedded.samples import sample
from revisit.errors import RevisitError
from revisit.explain.check import THRESHOLD, check_many, settings_of
from revisit.explain.checkable import WORD, is_content, is_object
from revisit.explain.support import encode_text, first_tokens, read_texts
from revisit.models import DESCRIBE
from revisit.models.parts import ModelParts
from revisit.models.prompts import chat_text, prepare

TEXT = "The image shows a surfboard, a zebra and a pizza."


@pytest.fixture(scope="module")
def pair() -> Any:
    return revisit.load("tiny")


def test_words_have_positions_patches_and_support(pair: Any) -> None:
    shown = sample("demo")
    text = f"The image shows a {shown.nouns[0]} and a {'zebra' if 'zebra' not in shown.nouns else 'pizza'}."
    found = revisit.check(pair, shown.path, text)
    present, absent = found.checked
    assert all(found.text[word.start : word.end] == word.text for word in found.words)
    assert present.support > 10 * absent.support
    assert (present.patch_row - 1, present.patch_col - 1) == divmod(present.vision_token, 8)
    assert present.image == 1
    assert not [word for word in found.words if word.text in ("The", "and") and word.checkable]


def test_support_by_definition(pair: Any) -> None:
    """Support is the mean of the five largest probabilities over the whole vocabulary."""
    model, processor = pair
    shown = sample("demo")
    word = shown.nouns[0]
    found = revisit.check(pair, shown.path, f"A {word}.")
    inputs = prepare(processor, DESCRIBE, shown.path)
    mask = inputs["input_ids"][0] == model.config.image_token_id
    token = processor.tokenizer.encode(f"a {word}", add_special_tokens=False)[-1]
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
        layer = getattr(model.generation_config, "check", {}).get("layer", len(states) - 1)
        chance = model.lm_head(states[layer][0, mask]).softmax(-1)[:, token]
    assert found.words[1].support == pytest.approx(float(chance.topk(5).values.mean()), rel=1e-4)
    assert found.words[1].vision_token == int(chance.argmax())


def test_one_forward_pass_and_one_vision_pass_for_a_batch(pair: Any) -> None:
    modules = (pair[0], pair[0].model.vision_tower)
    with ExitStack() as stack:
        calls = [stack.enter_context(patch.object(module, "forward", wraps=module.forward)) for module in modules]
        list(check_many(pair, [sample("demo").path] * 3, [TEXT, "A dog.", "Two cats on a bed."]))
    assert [call.call_count for call in calls] == [1, 1]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl", "smolvlm", "llava_next"])
def test_a_batch_gives_the_checks_of_each_text_alone(family: str) -> None:
    pair = families.build(family)
    images = [families.image(1, (40, 32)), families.image(2, (64, 48)), families.image(3, (40, 40))]
    texts = ["A dog on a couch.", "Cat", "Two birds and a very long table in the room."]
    together: Any = check_many(pair, images, texts, words="content")
    for image, text, one in zip(images, texts, together, strict=True):
        alone = revisit.check(pair, image, text, words="content")
        for a, b in zip(alone.words, one.words, strict=True):
            assert (a.text, a.start, a.vision_token, a.patch_row) == (b.text, b.start, b.vision_token, b.patch_row)
            assert a.support == pytest.approx(b.support, rel=1e-3)


def test_the_check_of_an_answer_equals_that_of_its_text(pair: Any) -> None:
    answer = revisit.ask(pair, sample("demo").path, max_new_tokens=40)
    checked, again = answer.check(), revisit.check(pair, sample("demo").path, answer.text)
    assert checked.text == answer.text
    assert [word.text for word in checked.words] == [word.text for word in again.words]
    for own, other in zip(checked.words, again.words, strict=True):
        assert own.support == pytest.approx(other.support, rel=1e-3, abs=1e-6)
    assert answer.check(threshold=0.0).flagged() == []
    assert answer.check(threshold=1.0).threshold == 1.0
    assert checked.threshold < 1


def test_capital_letters_do_not_reduce_support(pair: Any) -> None:
    noun = sample("demo").nouns[0]
    lower, upper = (
        revisit.check(pair, sample("demo").path, text).words[at].support
        for text, at in ((f"A {noun} here.", 1), (f"{noun.capitalize()} here.", 0))
    )
    assert upper == pytest.approx(lower)
    tokenizer = pair[1].tokenizer
    assert len(first_tokens(tokenizer, "Dog", tokenizer.encode("Dog", add_special_tokens=False)[0])) == 2


def test_words_consist_of_their_tokens(pair: Any) -> None:
    text = "Ein Bär, a t-shirt and 3 zebras!"
    inputs, prompt = prepare(pair[1], DESCRIBE, sample("demo").path), chat_text(pair[1], DESCRIBE)
    (read,) = read_texts(*pair, inputs, [prompt], [[sample("demo").image()]], [text], [0])
    assert [text[a:b] for a, b, _ in read.words] == ["Ein", "Bär", "a", "t-shirt", "and", "3", "zebras"]
    assert [n for *_, own in read.words for n in own] == sorted(n for *_, own in read.words for n in own)
    assert pair[1].tokenizer.decode(read.tokens).strip() == text


def test_objects_and_content_words() -> None:
    words = WORD.findall("A hot dog, two Teddy bears, 3 x t-shirts and a 犬.")
    assert words == ["A", "hot dog", "two", "Teddy bears", "3", "x", "t-shirts", "and", "a", "犬"]
    assert list(filter(is_object, words)) == ["hot dog", "Teddy bears"]
    assert list(filter(is_content, words)) == ["hot dog", "Teddy bears", "t-shirts", "犬"]


def test_a_text_in_another_language_has_no_checked_word(pair: Any) -> None:
    found = revisit.check(pair, sample("demo").path, "Ein Hund liegt im Gras.")
    assert found.checked == []
    assert "No word was checked" in found.notes[-1]


def test_save_and_display(pair: Any, tmp_path: Path) -> None:
    found = revisit.check(pair, sample("demo").path, TEXT + " <b>", threshold=0.5)
    assert json.loads(json.dumps(found.to_dict()))["flagged"] == [word.text for word in found.flagged()]
    page = found.save(tmp_path / "page.html").read_text("utf-8")
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "<rect" not in page  # no word has enough support for a patch
    assert "http" not in page.replace("http-equiv", "")
    assert found._repr_html_() in page
    assert found.flagged()
    assert found.least_support == min(word.support for word in found.checked)


def test_without_a_recommendation_the_last_layer_is_read() -> None:
    model, processor = families.llava()
    found = revisit.check((model, processor), families.image(1, (40, 40)), "A dog.")
    assert "no recommended threshold" in found.notes[0]
    assert settings_of(model)[:2] == (ModelParts.of(model).depth, THRESHOLD)
    assert all(math.isfinite(word.support) and 0 <= word.support <= 1 for word in found.words)


@pytest.mark.skipif("gemma4" not in families.FAMILIES, reason="its processor needs torchvision in this transformers")
def test_support_uses_the_models_own_logit_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = families.build("gemma4")
    monkeypatch.setattr(model.config.get_text_config(), "final_logit_softcapping", 0.5)
    image = families.image(1, (40, 40))
    found = revisit.check((model, processor), image, "A dog.", words="content")
    inputs = prepare(processor, DESCRIBE, image)
    mask = torch.isin(inputs["input_ids"][0], torch.tensor(ModelParts.of(model).vision_ids))
    tokens, _ = encode_text(processor, chat_text(processor, DESCRIBE), "A dog.")
    with torch.no_grad():
        chance = model(**inputs).logits[0, mask].softmax(-1)
    firsts = first_tokens(processor.tokenizer, "dog", tokens[2])
    assert found.words[1].support == pytest.approx(
        max(float(chance[:, token].topk(min(5, len(chance))).values.mean()) for token in firsts), rel=1e-4
    )


def test_a_model_without_vision_tokens_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = families.llava()
    monkeypatch.setattr("revisit.models.families.VISION_TOKEN_IDS", ())  # as if its configuration declared none
    with pytest.raises(RevisitError, match="keeps no vision tokens"):
        revisit.check(pair, families.image(1, (40, 40)), "A dog.")


@pytest.mark.parametrize("entry", [5, {"layer": 99}, {"layer": "x"}, {"threshold": 3}, {"auroc": 2}])
def test_the_recommendation_of_a_model_is_validated(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.llava()
    monkeypatch.setattr(model.generation_config, "check", {"layer": 1, "threshold": 0.2, "auroc": 0.59}, raising=False)
    layer, threshold, (note,) = settings_of(model)
    assert (layer, threshold) == (1, 0.2)
    assert "0.59" in note  # too low to be trusted
    monkeypatch.setattr(model.generation_config, "check", entry)
    with pytest.raises(RevisitError, match=r"generation_config\.json"):
        settings_of(model)
