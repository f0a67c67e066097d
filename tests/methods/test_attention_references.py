"""MiddleLayers, VAF, SADT and FLB against slow versions of their released code, and against numbers that it gave.

The numbers were recorded by running the released functions on the same small tensors (MiddleLayers a0622a9, VAF 5466c94, SADT
e07a843, FLB d32c678). Positions that a release hard-codes for LLaVA-1.5 are found in the prompt here.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import LENGTH, batch, counted, decode, extended, single
from torch import Tensor
from transformers.modeling_utils import AttentionInterface

import families
import revisit
import vocabularies
from revisit import FLB, SADT, VAF, MiddleLayers, RevisitError
from revisit.forward.attention import Call
from revisit.methods import flb, middle_layers, sadt, vaf
from revisit.words import CATEGORIES, WORDS
from word_tokenizers import train

RELEASED = json.loads((Path(__file__).parents[1] / "data" / "released" / "formulas.json").read_text("utf-8"))
SAMPLES = Path(revisit.__file__).parent / "embedded" / "samples"
MODELS = ("llava", "qwen2_5_vl", "tiny")
LETTERS = tuple(sorted({*map(chr, range(33, 127)), *"éßāőƀɐΐѐ"} - {*map(chr, range(65, 91))}))  # words of random models


@functools.cache
def setting(name: str) -> tuple[Any, Any, list[dict[str, Any]]]:
    """A model, its processor, and two prompts."""
    if name == "tiny":
        model, processor = revisit.load("tiny", device_map="cpu")
        ask = "Please describe this image in detail."
        prompts = [
            revisit.prepare(processor, ask, str(SAMPLES / f"{p}.png"), device=model.device) for p in ("demo", "flat")
        ]
        return model, processor, [dict(prompt) for prompt in prompts]
    return *families.build(name), [dict(single(name, row)) for row in (0, 1)]


def generate(setup: tuple[Any, Any, Any], inputs: Any, method: Any, **options: Any) -> Any:
    model, processor, _ = setup
    given = {"max_new_tokens": 16, "do_sample": False, "output_logits": True, "output_scores": True, **options}
    return revisit.generate(
        model, **inputs, method=method, processor=processor, return_dict_in_generate=True, eos_token_id=None, **given
    )


Rule = Callable[[Any, Tensor, Tensor], None]  # (layer, scores (1, heads, q, n) before the mask, image columns (n,))


@contextmanager
def published(model: Any, inputs: Any, rule: Rule) -> Iterator[None]:
    """Compute all attention of the decoder in full, one row at a time, by a rule, within the context."""
    image = inputs["input_ids"][0] == model.config.image_token_id

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        q, n = scores.shape[-2:]
        rule(module.layer_idx, scores, torch.nn.functional.pad(image, (0, n - len(image))))
        scores = scores.masked_fill(torch.ones(q, n).triu(n - q + 1).bool(), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("published", attend)
    text = model.get_decoder().config
    kernel, text._attn_implementation = text._attn_implementation, "published"
    try:
        yield
    finally:
        text._attn_implementation = kernel
        AttentionInterface._global_mapping.pop("published")


def middle_rule(layer: int, scores: Tensor, image: Tensor) -> None:
    if layer in (1, 2):
        last = scores[:, :, -1, image]
        scores[:, :, -1, image] = last + 0.8 * last.abs().mean(dim=1, keepdim=True)


def pai_rule(layer: int, scores: Tensor, image: Tensor) -> None:
    if layer >= 2:
        scores[:, :, -1, image] += 0.4 * scores[:, :, -1, image].abs()


def vaf_rule(layer: int, scores: Tensor, image: Tensor) -> None:
    if layer not in (1, 2):
        return
    first, last = image.nonzero().flatten()[[0, -1]].tolist()
    after = scores[:, :, last + 1 :] if scores.shape[2] > last + 1 else scores
    after[..., image] *= 1.8
    after[..., :first] *= 0.6


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (MiddleLayers(alpha=0.8, layers=(1, 2)), middle_rule),
        (VAF(enhance=1.8, suppress=0.6, layers=(1, 2)), vaf_rule),
        (revisit.PAI(alpha=0.4, gamma=None), pai_rule),
    ],
    ids=["middle_layers", "vaf", "pai"],
)
def test_attention_is_changed_as_published(name: str, method: Any, rule: Rule) -> None:
    setup = setting(name)
    for inputs in setup[2]:
        got = generate(setup, inputs, method)
        with published(setup[0], inputs, rule):
            want = generate(setup, inputs, "greedy")
        plain = generate(setup, inputs, "greedy")
        assert torch.equal(got.sequences, want.sequences)
        for mine, other in zip(got.logits, want.logits, strict=True):
            torch.testing.assert_close(mine, other, atol=2e-4, rtol=1e-4)
        assert not torch.allclose(got.logits[0], plain.logits[0], atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_first_logits_are_added_as_published(name: str) -> None:
    setup = setting(name)
    for inputs in setup[2]:
        output = generate(setup, inputs, FLB(gamma=0.6, decay=0.3))
        first = output.logits[0]
        for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
            weight = 0.6 * (1 - math.exp(-0.3 * step))
            want = (logits + weight * first).masked_fill(logits < logits.max() + math.log(0.1), -torch.inf)
            torch.testing.assert_close(scores, want)
        assert torch.equal(output.scores[-1].argmax(-1), output.sequences[:, -1])


def consistent(word: str, token: str, groups: dict[str, list[str]]) -> bool:
    """Return whether a decoded token agrees with a word: one contains the other, in any form of the word."""
    clean = lambda text: re.sub("[^a-z0-9 ]+", "", text.lower().replace("▁", " ").replace("Ġ", " ")).strip()  # noqa: E731
    same = groups.get(WORDS.get(word, ""), [])
    forms = {clean(form) for one in (word, *same) for form in (one, sadt.plural(one))} - {""}
    text = clean(token)
    return bool(text) and any(text in form or form in text for form in forms)


def ahead(setup: tuple[Any, Any, Any], inputs: Any, answer: Tensor, **options: Any) -> Any:
    """Run the model on the prompt and some tokens, in one full forward."""
    with torch.no_grad():
        return setup[0](**extended(inputs, answer[None]), **options)


def is_whole(text: str, start: int, end: int) -> bool:
    """Return whether text[start:end] is a whole word: no letter, digit or underscore continues one at its edges."""
    in_word = lambda pair: len(pair) == 2 and all(c.isalnum() or c == "_" for c in pair)  # noqa: E731
    return not in_word(text[max(start - 1, 0) : start + 1] if start else "") and not in_word(text[end - 1 : end + 1])


def word_begun(
    setup: tuple[Any, Any, Any], inputs: Any, answer: Tensor, words: dict[str, str], count: int
) -> str | None:
    """Return the listed word that greedy decoding writes next, from whole forwards; None if it does not begin one here."""
    decode = lambda tokens: setup[1].tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False).lower()  # noqa: E731
    before, tokens = decode(answer), answer
    for number in range(count):
        token = ahead(setup, inputs, tokens).logits[0, -1].argmax()[None]
        first = setup[1].tokenizer.decode(token.tolist()).strip().lower()
        if not number and not (first and any(word.startswith(first) for word in words)):
            return None
        tokens = torch.cat([tokens, token])
    text = decode(tokens)
    start = len(text) - len(text[len(before) :].lstrip())
    end = 0  # of the last word, from the left: "hot dog" is no dog
    for place in range(start + 1):
        fits = (word for word in sorted(words, key=len, reverse=True) if text.startswith(word, place))
        word = next((word for word in fits if place >= end and is_whole(text, place, place + len(word))), None)
        end = place + len(word) if word else end
    return words[word] if word else None


def sadt_scores(
    setup: tuple[Any, Any, Any], inputs: Any, answer: Tensor, words: dict[str, str], settings: SADT, count: int
) -> tuple[Tensor, bool]:
    """Return the next scores, from full forwards with all attention weights and hidden states.  -> (V,), flagged"""
    model, processor, _ = setup
    tokenizer, ids = processor.tokenizer, inputs["input_ids"]
    output = ahead(setup, inputs, answer, output_attentions=True, output_hidden_states=True)
    logits = output.logits[0, -1]
    head = model.get_output_embeddings()
    columns = (ids[0] == model.config.image_token_id).nonzero().flatten()
    word = word_begun(setup, inputs, answer, words, count)
    if word is None:
        return logits, False
    groups: dict[str, list[str]] = {}
    for other, category in WORDS.items():
        groups.setdefault(category, []).append(other)
    attention = np.stack([layer[0, :, -1, columns].numpy().mean(0) for layer in output.attentions])
    right = 0
    for layer in settings.layers:
        for patch in np.argsort(attention[int(layer)])[::-1][: settings.patches]:
            token = int(head(output.hidden_states[int(layer)][0, columns[patch]]).argmax())
            right += consistent(word, tokenizer.decode([token]), groups)
    if right:
        return logits, False
    best = int(np.argsort(attention[[int(layer) for layer in settings.layers]].sum(0))[::-1][0])
    assert settings.evidence is not None
    patch = head(output.hidden_states[settings.evidence][0, columns[best]])
    return (1 - settings.alpha) * patch + settings.alpha * logits, True


@pytest.mark.parametrize("name", MODELS)
def test_flagged_words_are_replaced_by_the_most_attended_patch(name: str) -> None:
    setup = setting(name)
    words: tuple[str, ...] = tuple(w for w, c in WORDS.items() if c != "person") if name == "tiny" else LETTERS
    depth = len(setup[0].get_decoder().layers)
    options: dict[str, Any] = {} if name == "tiny" else {"words": words}
    method = SADT(alpha=0.25, layers=(depth - 2, depth - 1), patches=2, evidence=depth - 1, **options)
    flagged, listed = 0, {form: word for word in words for form in (sadt.plural(word), word)}
    setup[0].set_attn_implementation("eager")
    try:
        for inputs in setup[2]:
            output = generate(setup, inputs, method, max_new_tokens=24)
            answer = output.sequences[0, inputs["input_ids"].shape[1] :]
            for step, scores in enumerate(output.scores):
                want, did = sadt_scores(setup, inputs, answer[:step], listed, method, 5 if name == "tiny" else 3)
                torch.testing.assert_close(scores[0], want, atol=2e-4, rtol=1e-4)
                flagged += did
    finally:
        setup[0].set_attn_implementation("sdpa")
    assert flagged > 0


# -- numbers that the released functions gave -----------------------------------------------------------------------


def wave(*shape: int, f: float = 1.0) -> Tensor:
    return torch.sin(f * torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)).view(*shape)


def call(q: int, columns: int, ramp: float) -> Call:
    """Make an attention call with two heads of width 2: a prompt if q = columns, else its newest token."""
    heads = lambda x: (2 * x).view(1, -1, 2, 2).transpose(1, 2)  # noqa: E731
    value = wave(1, columns, 4, f=1.3) + ramp * torch.arange(columns, dtype=torch.float64).view(1, -1, 1) / 2
    return Call(0, heads(wave(1, q, 4)), heads(wave(1, columns, 4, f=0.7)), heads(value), None, 0.5**0.5, None)


def attended(made: Call, scores: Tensor) -> Tensor:
    """(q, heads · d)"""
    q = scores.shape[2]
    output = torch.zeros(1, q, 2, 2, dtype=torch.float64)
    made.attend(scores)(output)
    return output[0].flatten(1)


def test_middle_layers_gives_the_released_numbers() -> None:
    made = call(6, 6, 0.0)
    image = torch.tensor([[False, True, True, True, False, False]])
    scores = made.scores(0)
    scores[:, :, -1:] = middle_layers.guide(scores[:, :, -1:], image, 0.5)
    assert attended(made, scores).flatten().tolist() == pytest.approx(RELEASED["middle_layers"], abs=2e-6)


def test_vaf_gives_the_released_numbers() -> None:
    place = torch.arange(35 + 576 + 3)
    image, before = ((place >= 35) & (place < 611))[None], (place < 35)[None]
    made, after = call(614, 614, 0.01), torch.tensor([[False, True, True, True]])
    prompt = attended(made, vaf.amplify(made.scores(-4), image, before, after, 1.15, 0.95))
    want = [3.054353, 3.061028, 3.046504, 3.044095, 3.137149, 3.149912, 3.082439, 3.074481]
    want += [3.131042, 3.142364, 3.151364, 3.147121, 3.080766, 3.082126, 3.146487, 3.148182]
    assert prompt.flatten().tolist() == pytest.approx(want, abs=5e-6)
    # a later token: the released function appends its own key and value to those of the prompt
    own = call(1, 1, 0.0)
    made.query = own.query
    made.key, made.value = torch.cat([made.key, own.key], 2), torch.cat([made.value, own.value], 2)
    image, before = (torch.nn.functional.pad(columns, (0, 1)) for columns in (image, before))
    token = attended(made, vaf.amplify(made.scores(), image, before, torch.tensor([[True]]), 1.15, 0.95))
    assert token.flatten().tolist() == pytest.approx([3.14149, 3.149069, 3.102772, 3.102897], abs=5e-6)


def test_first_logit_boosting_gives_the_released_numbers() -> None:
    logits = {0: [2.0, 1.0, 0.5, -3.0], 1: [1.0, 1.5, 0.0, -2.0], 2: [0.0, 3.0, 1.0, 0.8], 30: [1.0, 2.0, 3.0, 0.9]}
    want = {
        0: [2.0, 1.0, 0.5, -math.inf],
        1: [1.029262, 1.514631, 0.007316, -math.inf],
        2: [-math.inf, 3.028549, 1.014274, 0.714354],
        30: [1.466122, 2.233061, 3.11653, 0.200817],
    }
    for step, values in logits.items():
        got = flb.boost(torch.tensor(values), torch.tensor(logits[0]), step, 0.3, 0.05, 0.1)
        assert got.tolist() == pytest.approx(want[step], abs=2e-6)


# results of the released code: frequency, word, most attended patch, logits of that patch if the word is flagged
SADT_FOUND = [
    (0.5, "dog", 0, [-2.6463, 3.2342, -3.2016, 2.5548, -1.4178, 0.0088, 1.4019, -2.5436]),
    (0.5, "cat", 0, None),
    (0.8, "dog", 3, None),
    (0.8, "cat", 4, None),
    (1.1, "dog", 4, [3.4279, -3.6378, 3.1498, -2.0575, 0.5704, 1.0261, -2.4258, 3.36]),
    (1.1, "cat", 3, None),
    (1.9, "dog", 2, None),
    (2.6, "cat", 0, None),
]


@pytest.mark.parametrize(("frequency", "word", "patch", "evidence"), SADT_FOUND)
def test_sadt_flags_what_the_release_flags(frequency: float, word: str, patch: int, evidence: Any) -> None:
    texts, tokens, heads = ["pad", "a", "dog", "cat", "kitten", "wall", "pup", "table"], 6, 2
    forms = {"dog": ["dog", "dogs", "pup", "pups"], "cat": ["cat", "cats", "kitten", "kittens"]}
    favorite, step = texts.index(word), {"dog": 1, "cat": 3}[word]
    head = 2 * wave(8, 3, f=0.9)
    agrees = torch.zeros(1, 8, dtype=torch.bool)
    agrees[0, sadt.agreeing(texts, forms[word])] = True
    # states 1 and 2 are read, state 3 is the evidence; vision tokens are at positions 1 to 6
    store = torch.stack([wave(8, 3, f=0.31 + 0.17 * layer)[1:7] for layer in (1, 2, 3)])[None]
    capture: Any = SimpleNamespace(
        rows_per_item=1,
        layers=(1, 2, 3),
        store=store,
        index=lambda _: (None, torch.arange(1, 7)[None]),
        inside=lambda: torch.ones(1, tokens, dtype=torch.bool),
    )
    objects: Any = SimpleNamespace(agrees=agrees, begins=torch.zeros(8, dtype=torch.bool))
    lm_head: Any = SimpleNamespace(all_logits=lambda states: states @ head.T)
    reader = sadt.Reader(lm_head, capture, (1, 2), 3, 2, objects)
    attention = {
        layer: (2 * wave(1, heads, 8 + step, f=frequency + 0.11 * step + 0.07 * layer)).softmax(-1).mean(1)
        for layer in (1, 2)
    }
    logits = torch.nn.functional.one_hot(torch.tensor([favorite]), 8).double()
    scores, flagged = reader.fuse(logits, attention, 0.0, torch.tensor([0]))
    assert flagged.tolist() == [evidence is not None]
    assert int((attention[1] + attention[2])[0, 1:7].argmax()) == patch
    assert scores[0].tolist() == pytest.approx(logits[0].tolist() if evidence is None else evidence, abs=1e-4)


# -- words ----------------------------------------------------------------------------------------------------------


def test_plurals() -> None:
    words = "dog bus bench knife mouse sheep puppy boy box brush"
    many = "dogs buses benches knives mice sheep puppies boys boxes brushes"
    assert " ".join(map(sadt.plural, words.split())) == many


def test_tokens_that_agree_are_part_of_a_form_or_contain_one() -> None:
    texts = ["", "og", "dog", "dogs", "hotdog", "cat", "d", "dg"]
    assert sadt.agreeing(texts, ["dog", "dogs"]) == [1, 2, 3, 4, 6]


def test_many_patches_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    method = SADT(words=LETTERS, layers=(2, 3), patches=16)
    whole, _ = decode("qwen2_5_vl", single("qwen2_5_vl", 1), method)
    monkeypatch.setattr(sadt, "LOGITS", 3 * families.VOCAB)
    with counted(families.build("qwen2_5_vl")[0].lm_head) as read:
        sliced, _ = decode("qwen2_5_vl", single("qwen2_5_vl", 1), method)
    assert max(read) == 3
    torch.testing.assert_close(sliced.scores, whole.scores)


def followed(objects: sadt.ObjectWords, tokens: list[int]) -> dict[int, str]:
    """Return the words that SADT judges where a model writes these tokens, by position."""
    words = {}
    for place, token in enumerate(tokens):
        if objects.begins[token]:
            ends = (objects.begun(tokens[:place], tokens[place : end + 1]) for end in range(place, len(tokens)))
            word = next((word for word, more in ends if not more), None)
            words |= {} if word is None else {place: word}
    return words


def word_tokenizer(kind: str) -> Any:
    if kind == "tiny":
        return setting("tiny")[1].tokenizer
    if kind == "letters":
        return families.tokenizer()
    return train(kind) if kind in ("metaspace", "bytes") else vocabularies.load(kind)


TEXT = "A dog near hot dogs; the toaster on a backpack, back to the proven cats' oven. İ dining table, 猫!"
OBJECT_WORDS = ["dog", "hot dogs", "toaster", "backpack", "cats", "oven", "dining table"]


@pytest.mark.parametrize("kind", ["metaspace", "letters", *vocabularies.names()])
def test_only_whole_words_are_judged(kind: str) -> None:
    """Tokenizers like LLaMA's and Qwen's, one of single bytes, and one of whole words."""
    tokenizer = word_tokenizer(kind)
    words = tuple(word for word in WORDS if WORDS[word] != "person")
    objects = sadt.ObjectWords.of(tokenizer, words, len(tokenizer) + 3)
    text = TEXT if kind != "tiny" else TEXT.replace("İ", "").replace("猫", "")
    tokens = tokenizer.encode(text + " ", add_special_tokens=False)
    assert list(followed(objects, tokens).values()) == OBJECT_WORDS


def test_bytes_of_other_scripts_agree_with_nothing() -> None:
    """Byte 0x8E is written as a letter whose lower case has an ASCII i."""
    tokenizer = word_tokenizer("letters")
    objects = sadt.ObjectWords.of(tokenizer, ("skis",), len(tokenizer))
    byte = tokenizer.convert_tokens_to_ids("İ")
    assert "i" in "İ".lower()
    assert not objects.agrees[:, byte].any()
    assert objects.agrees[0, tokenizer.convert_tokens_to_ids("i")]


def test_the_released_program_uses_categories() -> None:
    assert SADT.official().words == "categories"
    recorded = json.loads((Path(__file__).parents[1] / "data" / "released" / "sadt.json").read_text("utf-8"))
    assert {word: sorted(sadt.forms(word, released=True)) for word in recorded} == recorded
    assert sadt.normal("\u0130x") == "ix"  # lower-cased first
    assert len([name for name in CATEGORIES if WORDS[name] != sadt.PEOPLE]) == 79


# -- errors and cost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MiddleLayers(layers=(9,)), "MiddleLayers: layer 9 does not exist: .* numbered 0 to 3"),
        (lambda: VAF(layers=(0, 4)), "VAF: layer 4 does not exist: .* numbered 0 to 3"),
        (lambda: SADT(layers=(7,)), "SADT: layer 7 does not exist: .* numbered 0 to 3"),
        (lambda: SADT(evidence=6), r"SADT: hidden state 6 does not exist: .* 0 \(embedding\) to 4"),
        (lambda: SADT(words=["a" * 2000]), "words"),
        (lambda: SADT(words=[f"w{n}" for n in range(2000)]), "words"),
        (lambda: SADT(words=[]), "SADT: words must be"),
        (lambda: FLB(beta=2), "FLB: beta must be"),
    ],
)
def test_wrong_settings_raise(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(RevisitError, match=message):
        decode("llava", single("llava", 0), make())


@pytest.mark.parametrize("method", [MiddleLayers(), VAF(), SADT(words=("ǿ",)), FLB()], ids=lambda m: m.name)
def test_one_forward_a_token(method: Any) -> None:
    model, _ = families.build("qwen2_5_vl")
    with counted(model) as rows:
        decode("qwen2_5_vl", batch("qwen2_5_vl"), method)
    assert rows == [2] * LENGTH


def test_sadt_reads_patches_only_where_an_object_word_begins() -> None:
    model, _ = families.build("qwen2_5_vl")
    with counted(model.lm_head) as read:
        _, trace = decode("qwen2_5_vl", single("qwen2_5_vl", 1), SADT(words=LETTERS, layers=(2, 3), patches=3))
    more = [count for count in read if count != 1]
    assert set(more) <= {2 * 3}  # two layers, three patches
    assert 0 < trace.summary()["applied"] <= len(more) < LENGTH
    with counted(model.lm_head) as read:
        decode("qwen2_5_vl", single("qwen2_5_vl", 1), SADT(words=("ǿ",)))
    assert read == [1] * LENGTH


@pytest.mark.parametrize("method", [VAF(), FLB(), SADT(words=LETTERS)], ids=lambda m: m.name)
def test_tokens_are_the_same_without_a_cache(method: Any) -> None:
    want, _ = decode("qwen2_5_vl", batch("qwen2_5_vl"), method)
    got, _ = decode("qwen2_5_vl", batch("qwen2_5_vl"), method, use_cache=False)
    assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize(
    "method", [MiddleLayers(alpha=2.0), VAF(enhance=3.0), SADT(words=LETTERS)], ids=lambda m: m.name
)
def test_several_images_and_a_chain(method: Any) -> None:
    pictures = [[families.image(1), families.image(2)]]
    inputs = families.inputs("qwen2_5_vl", ["compare them"], pictures)
    got, trace = decode("qwen2_5_vl", inputs, method, max_new_tokens=12)
    plain, _ = decode("qwen2_5_vl", inputs, None, max_new_tokens=12)
    assert not torch.allclose(got.logits[-1], plain.logits[-1], atol=1e-3)
    assert trace.rows[0].vision_tokens == int(
        (inputs["input_ids"] == families.build("qwen2_5_vl")[0].config.image_token_id).sum()
    )
    if method.name == "sadt":
        with pytest.raises(RevisitError, match="looks ahead, which needs"):
            decode("qwen2_5_vl", batch("qwen2_5_vl"), revisit.Chain([method, revisit.VCD()]))
        return
    sequences = []
    for mode in ("stacked", "sequential"):
        chain = revisit.Chain([method, revisit.VCD(mode=mode)])
        output, trace = decode("qwen2_5_vl", batch("qwen2_5_vl"), chain)
        assert [link.method["name"] for link in trace.links] == [method.name, "vcd"]
        sequences.append(output.sequences)
    assert torch.equal(*sequences)
