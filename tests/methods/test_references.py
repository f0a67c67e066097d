"""Each contrastive method against a plain re-computation: two full forwards at every step, no cache, no stacking.

The references run the model by itself on the clean and on the contrasted prompt with the tokens so far, so a branch
that is swapped, stale, shifted or fed the wrong tokens is seen at the step where it happens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_cases import FAMILIES, counted, decode, extended, image_tokens, single, text_alone
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import families
import revisit
from revisit import CODE, ICD, M3ID, PAI, RITUAL, SID, VCD, AvisC, Chain
from revisit.decoding.contrastive import contrast
from revisit.decoding.method import Method
from revisit.decoding.prompt_edits import around_image
from revisit.forward.attention import Watch, newest_column
from revisit.forward.states import Pass
from revisit.methods import as_method, avisc, code, icd, m3id, pai, ritual, vcd
from revisit.models import families as table

ROW = 1  # the prompt whose image is not square


def continued(family: str, inputs: dict[str, Any], tokens: Tensor) -> Tensor:
    """Return the model's logits after a prompt and some tokens, from one forward.  -> (V,)"""
    model, _ = families.build(family)
    with torch.no_grad():
        logits: Tensor = model(**extended(inputs, tokens), logits_to_keep=1).logits[0, -1]
    return logits


def check(
    family: str,
    method: Method,
    contrasted: Callable[[Any], dict[str, Any]],
    combine: Callable[[Tensor, Tensor, int], Tensor],
) -> None:
    """Check that every step's scores are combine(clean, contrasted, step), and that swapping the two would be noticed."""
    inputs = dict(single(family, ROW))
    output, _ = decode(family, inputs, method)
    other = contrasted(dict(inputs))
    start = inputs["input_ids"].shape[1]
    swapped_differs = False
    for step, scores in enumerate(output.scores):
        answer = output.sequences[:, start : start + step]
        clean, other_logits = continued(family, inputs, answer), continued(family, other, answer)
        torch.testing.assert_close(scores[0], combine(clean, other_logits, step), atol=2e-4, rtol=1e-4)
        swapped = combine(other_logits, clean, step)
        swapped_differs |= not torch.allclose(scores[0], swapped, atol=1e-2)
    assert swapped_differs


@pytest.mark.parametrize("family", FAMILIES)
def test_vcd_contrasts_with_the_noisy_image(family: str) -> None:
    from revisit.forward.pixels import content_seed

    def noisy(inputs: dict[str, Any]) -> dict[str, Any]:
        pixels = inputs["pixel_values"]
        parts = [pixels] if family == "qwen2_5_vl" else list(pixels.split(1))  # Qwen packs the patches of one image
        draws = [torch.Generator().manual_seed(content_seed(part, 3)) for part in parts]
        parts = [vcd.add_noise(part, 700, draw) for part, draw in zip(parts, draws, strict=True)]
        return {**inputs, "pixel_values": torch.cat(parts)}

    method = VCD(alpha=1.0, beta=0.1, noise_step=700, seed=3)
    check(family, method, noisy, lambda a, b, _: contrast(a, b, 1.0, 0.1))


@pytest.mark.parametrize("family", FAMILIES)
def test_m3id_and_pai_contrast_with_the_text_alone(family: str) -> None:
    alone = functools.partial(text_alone, family)
    weighted = lambda a, b, step: m3id.contrast_text(a, b, m3id.weight(step + 1, 0.3), 0.1)  # noqa: E731
    check(family, M3ID(decay=0.3, start=1), alone, weighted)
    check(family, PAI.guidance(gamma=1.5), alone, lambda a, b, _: pai.guide(a, b, 1.5, 0.1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", ["image", "system"])
def test_icd_contrasts_with_the_disturbed_prompt(family: str, place: str) -> None:
    """After the image; or, in a prompt without a chat format, at the beginning."""
    _, processor = families.build(family)

    def disturbed(inputs: dict[str, Any]) -> dict[str, Any]:
        sentence = "You are confused." + " " * (place == "system")
        words = torch.tensor([processor.tokenizer(sentence, add_special_tokens=False)["input_ids"]])
        after = int(image_tokens(family, inputs["input_ids"]).nonzero()[-1, 1]) + 1
        at = after if place == "image" else int(inputs["input_ids"][0, 0] == processor.tokenizer.bos_token_id)
        for name, new in (("input_ids", words), ("attention_mask", words * 0 + 1), ("mm_token_type_ids", words * 0)):
            if name in inputs:
                old = inputs[name]
                inputs[name] = torch.cat([old[:, :at], new.to(old.dtype), old[:, at:]], dim=1)
        return inputs

    method = ICD(sentence="You are confused.", place=place)
    check(family, method, disturbed, lambda a, b, _: contrast(a, b, 1.0, 0.1))


def as_turns(system: str) -> str:
    """Return a chat template like LLaVA-1.5's, with `system` as its default system message."""
    return (
        "{% if messages[0].role != 'system' %}" + system + " {% endif %}"
        "{% for turn in messages %}{% if turn.role == 'system' %}{{ turn.content[0].text }} {% else %}"
        "{{ turn.role | upper }}: {% for part in turn.content %}{% if part.type == 'image' %}<image>\n{% else %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %} ASSISTANT:"
    )


def test_icd_replaces_the_system_message() -> None:
    """The released program for LLaVA builds both prompts from one conversation, with another system message in the second."""
    model, processor = families.build("llava")
    processor = copy.copy(processor)
    processor.chat_template = as_turns("A curious user asks an assistant.")
    preprompt, question = "You are a confused objects detector.", "Is there a dog?"
    picture = families.image(3, (40, 32))

    def prompt(system: str) -> dict[str, Any]:
        text = f"{system} USER: <image>\n{question} ASSISTANT:"
        return dict(processor(text=[text], images=[[picture]], return_tensors="pt", padding=True))

    method = ICD(sentence=preprompt)
    clean, disturbed = prompt("A curious user asks an assistant."), prompt(preprompt)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options |= {"output_scores": True, "return_dict_in_generate": True}
    out = revisit.generate(model, **clean, method=method, processor=processor, **options)
    start = clean["input_ids"].shape[1]
    for step, scores in enumerate(out.scores):
        answer = out.sequences[:, start : start + step]
        own, other = continued("llava", clean, answer), continued("llava", disturbed, answer)
        cutoff = own.max() + torch.tensor(0.1).log()
        want = (2 * own - other).masked_fill(own < cutoff, -torch.inf)
        kept = want.isfinite() & scores[0].isfinite()  # the loop forbids the end of the text
        torch.testing.assert_close(scores[0][kept], want[kept], atol=2e-4, rtol=1e-4)


def test_icd_keeps_its_sentence_apart_from_the_question() -> None:
    """Where the chat format has a line break behind the image the sentence needs none of its own; Qwen's has none."""
    _, processor = families.build("llava")
    processor = copy.copy(processor)
    processor.chat_template = as_turns("x")
    assert icd.space_after_image(processor, table.of("qwen2_5_vl"))
    processor.chat_template = as_turns("x").replace("<image>\n", "<image>")
    assert not icd.space_after_image(processor, table.of("qwen2_5_vl"))


@pytest.mark.parametrize("sample", [False, True])
def test_sid_version_of_icd_cuts_only_when_sampling(sample: bool) -> None:
    options = {
        "max_new_tokens": 1,
        "do_sample": sample,
        "output_scores": True,
        "return_dict_in_generate": True,
        "top_k": 0,
    }
    model, processor = families.build("llava")
    inputs = families.inputs("llava", ["abc"], [[families.image(1)]])
    for method, cuts in ((ICD.sid(), sample), (ICD.sid(constraint="always"), True), (ICD.sid(beta=0), False)):
        scores = revisit.generate(model, **inputs, method=method, processor=processor, **options).scores[0]
        assert bool(scores.isinf().any()) == cuts


def test_presets_of_icd_and_avisc() -> None:
    """AvisC: the parsers of the LLaVA programs; the AMBER script; the POPE script."""
    assert ICD() == ICD.official()
    assert (ICD.official().place, ICD.official().alpha, ICD.official().beta) == ("system", 1.0, 0.1)
    assert (ICD.questions().place, ICD.questions().alpha) == ("image", 0.5)
    assert (AvisC().alpha, AvisC().gamma, AvisC().sigma, AvisC().beta) == (1.0, 0.5, 0.99, 0.1)
    assert (AvisC.official().alpha, AvisC.official().sigma) == (2.5, 1.0)
    assert (AvisC.pope().alpha, AvisC.pope().sigma) == (1.0, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_ritual_adds_the_transformed_image(family: str) -> None:
    def flipped(inputs: dict[str, Any]) -> dict[str, Any]:
        if family == "qwen2_5_vl":  # the processor, not our own unpacking, shows what a flipped image looks like
            from PIL import ImageOps

            text, seed, size = "describe all of it now please", 2, (56, 28)
            picture = ImageOps.mirror(families.image(seed, size))
            return dict(families.inputs(family, [text], [[picture]]))
        return {**inputs, "pixel_values": inputs["pixel_values"].flip(-1)}

    check(family, RITUAL(transform="flip"), flipped, lambda a, b, _: ritual.combine(a, b, 3.0, 0.1))


@pytest.mark.parametrize("family", FAMILIES)
def test_code_contrasts_with_the_description(family: str) -> None:

    model, processor = families.build(family)
    code._DESCRIPTIONS.clear()
    image_token = model.config.image_token_id

    def described(inputs: dict[str, Any]) -> dict[str, Any]:
        text = families.PLACEHOLDER[family].rstrip("\n") + "\nList what you see."
        asked = processor(text=[text], images=[[families.image(2, (56, 28))]], return_tensors="pt")
        output = model.generate(**asked, max_new_tokens=4, do_sample=False, eos_token_id=families.VOCAB + 1)
        words = output[0, asked["input_ids"].shape[1] :]
        ids = inputs["input_ids"][0]
        at = int((ids == image_token).nonzero()[0])
        new = torch.cat([ids[:at], words, ids[at:][ids[at:] != image_token]])[None]
        return {"input_ids": new, "attention_mask": torch.ones_like(new)}

    method = CODE(description_tokens=4, request="List what you see.")
    check(family, method, described, lambda a, b, _: code.contrast_description(a, b, 0.7))


def eager_attentions(family: str, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the model's own attention weights, (heads, T, T) for each layer."""
    model, _ = families.build(family)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    return tuple(layer[0] for layer in output.attentions)


def sid_logits(family: str, inputs: dict[str, Any], tokens: Tensor, layer: int, keep: int) -> list[Tensor]:
    """Return the logits of SID's contrasted run, step by step with a cache and an explicit mask.  -> steps × (V,)"""
    model, _ = families.build(family)
    image = inputs["input_ids"][0] == model.config.image_token_id
    columns, length = image.nonzero().squeeze(-1), len(image)
    blocks = model.model.language_model.layers
    attention: list[Tensor] = []

    def mask(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        queries, total = (args[0] if args else kwargs["hidden_states"]).shape[1], attention[-1].shape[-1]
        newest = attention[-1][0].mean(0)[-1]
        hidden = torch.zeros(total, dtype=torch.bool)
        hidden[columns] = True
        hidden[columns[newest[columns].argsort(stable=True)[:keep]]] = False
        blocked = ~torch.ones(queries, total, dtype=torch.bool).tril(total - queries) | hidden
        own = torch.ones(queries, total, dtype=torch.bool).triu(total - queries).tril(total - queries)
        blocked &= ~(
            own & blocked.all(-1, keepdim=True)
        )  # an image that begins the prompt: its first token sees itself
        kwargs["attention_mask"] = torch.zeros(queries, total).masked_fill(blocked, -1e30)[None, None]
        return args, kwargs

    model.set_attn_implementation("eager")
    watch = blocks[layer - 1].self_attn.register_forward_hook(lambda _m, _a, output: attention.append(output[1]))
    hooks = [watch, *(block.register_forward_pre_hook(mask, with_kwargs=True) for block in blocks[layer:])]
    try:
        with torch.no_grad():
            output = model(**inputs, use_cache=True)
            steps = [output.logits[0, -1]]
            for step, token in enumerate(tokens):
                more: dict[str, Any] = {"attention_mask": torch.ones(1, length + step + 1, dtype=torch.long)}
                if family == "qwen2_5_vl":
                    place = length + step + model.model.rope_deltas.flatten()[0]
                    more["position_ids"] = place.long().view(1, 1, 1).expand(3, 1, 1)
                output = model(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True, **more)
                steps.append(output.logits[0, -1])
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation("sdpa")
    return steps


@pytest.mark.parametrize("family", FAMILIES)
def test_sid_masks_all_but_the_least_attended(family: str) -> None:
    """At every step and for every query: a hidden vision token does not even attend to itself."""
    inputs = dict(single(family, ROW))
    output, _ = decode(family, inputs, SID(layer=1, keep=2))
    answer = output.sequences[0, inputs["input_ids"].shape[1] :]
    steps = sid_logits(family, inputs, answer[:-1], 1, 2)
    for scores, clean, induced in zip(output.scores, output.logits, steps, strict=True):
        torch.testing.assert_close(scores[0], contrast(clean[0], induced, 0.5, 0.1), atol=2e-4, rtol=1e-4)
        assert not torch.allclose(scores[0], contrast(induced, clean[0], 0.5, 0.1), atol=1e-2)


@pytest.mark.parametrize("name", ["sid", "pai", "avisc"])
def test_attention_methods_do_the_same_with_every_kernel(name: str) -> None:
    method = {"sid": SID(), "pai": PAI(alpha=0.5), "avisc": AvisC()}[name]
    model, _ = families.build("qwen2_5_vl")
    fused, _ = decode("qwen2_5_vl", single("qwen2_5_vl", 0), method)
    model.set_attn_implementation("eager")
    try:
        eager, _ = decode("qwen2_5_vl", single("qwen2_5_vl", 0), method)
        assert model.config.text_config._attn_implementation == "eager"
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(fused.sequences, eager.sequences)
    for mine, other in zip(fused.scores, eager.scores, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_avisc_blanks_all_but_the_over_attended(family: str) -> None:
    model, _ = families.build(family)
    inputs = dict(single(family, ROW))
    columns = (inputs["input_ids"][0] == model.config.image_token_id).nonzero().squeeze(-1)
    attention = torch.stack([layer.mean(0)[-1, columns] for layer in eager_attentions(family, inputs)])
    blind = avisc.blind_tokens(attention, 0.5, 0.5)
    assert 0 < int(blind.sum()) < len(blind)

    def blank(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        states = args[0].clone()
        states[:, columns[~blind]] = 0
        return (states, *args[1:]), kwargs

    hook = model.model.language_model.layers[0].register_forward_pre_hook(blank, with_kwargs=True)
    with torch.no_grad():
        other = model(**inputs).logits[0, -1]
    hook.remove()
    clean = continued(family, inputs, torch.zeros(1, 0, dtype=torch.long))
    got = decode(family, inputs, AvisC(sigma=0.5))[0].scores[0][0]
    torch.testing.assert_close(got, contrast(clean, other, 1.0, 0.1), atol=2e-4, rtol=1e-4)
    assert not torch.allclose(got, contrast(other, clean, 1.0, 0.1), atol=1e-2)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_wholly_blanked_image_does_not_leak(family: str) -> None:
    """With no token over-attended, the blind runs of two images are equal, whatever layers add image features."""
    model, _ = families.build(family)
    blind = []
    for seed in (1, 2):
        inputs = families.inputs(family, ["what is it?"], [[families.image(seed, (56, 28))]])
        with torch.no_grad():
            clean = model(**inputs, logits_to_keep=1).logits[:, -1].float()
        options = {"max_new_tokens": 1, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        scores = revisit.generate(model, **inputs, method=AvisC(sigma=1e9, alpha=1.0, beta=0.0), **options).scores[0]
        blind.append(2 * clean - scores)
    torch.testing.assert_close(blind[0], blind[1], atol=1e-4, rtol=1e-4)


def test_the_newest_visible_column() -> None:
    seen = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    assert newest_column(seen).flatten().tolist() == [1, 3, 3, 0]


class LargestIntegers(TorchDispatchMode):
    """Record the size of the largest integer tensor that is made inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.dtype in (torch.int32, torch.int64):
            self.numbers = max(self.numbers, made.numel())
        return made


def test_hiding_columns_makes_no_integer_tensor_of_all_queries_and_columns() -> None:
    q = n = 40
    states, second = torch.zeros(2, 1, n, 4), Pass(slice(1, 2))
    hidden = torch.zeros(1, n).bool()
    hidden[0, :5] = True
    with LargestIntegers() as largest:
        seen = Watch({}, lambda _: None, None, second).masked(None, hidden, states, states)
    assert largest.numbers < q * n
    causal = torch.ones(q, n).tril().bool()
    assert torch.equal(seen[0, 0], causal)
    expected = causal & ~hidden
    expected[range(5), range(5)] = True  # a query that would see nothing sees itself
    assert torch.equal(seen[1, 0], expected)


@pytest.mark.parametrize("first", ["avisc", "pai", "revisit", "sid", "dola"])
def test_descriptions_do_not_depend_on_other_methods_of_a_chain(first: str) -> None:
    """Whatever comes before CODE in a chain, and the cached description is used again."""
    family = "llava"
    model, _ = families.build(family)
    inputs = dict(single(family, ROW))
    alone = CODE(description_tokens=8)
    code._DESCRIPTIONS.clear()
    decode(family, inputs, alone)
    (expected,) = code._DESCRIPTIONS[model].values()
    code._DESCRIPTIONS.clear()
    chain = Chain([as_method(first), alone])
    outputs = [decode(family, inputs, chain)[0] for _ in range(2)]
    (described,) = code._DESCRIPTIONS[model].values()
    assert described == expected
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for before, after in zip(outputs[0].scores, outputs[1].scores, strict=True):
        torch.testing.assert_close(before, after, atol=0, rtol=0)


# -- descriptions of CODE -------------------------------------------------------------------------------------------------

IMAGES = [families.image(seed) for seed in (1, 2)]


def forwards(family: str, method: CODE, prompts: list[str], images: list[object]) -> int:
    inputs = families.inputs(family, prompts, [[image] for image in images])
    with counted(families.build(family)[0]) as rows:
        decode(family, inputs, method, max_new_tokens=2)
    return len(rows)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_an_image_is_described_once(family: str) -> None:
    method = CODE(description_tokens=3, mode="stacked")
    code._DESCRIPTIONS.clear()
    plain = 3  # two prompts and one step of both
    assert forwards(family, method, ["a", "b"], IMAGES) == plain + 3
    assert forwards(family, method, ["another question"], IMAGES[1:]) == plain  # known from the batch
    assert forwards(family, method, ["and"], [families.image(3)]) == plain + 3
    code._DESCRIPTIONS.clear()
    assert forwards(family, method, ["a"], IMAGES[:1]) == plain + 3


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
        head, tail = around_image(processor, table.of("qwen2_5_vl"), "say")
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
    assert code.starts_with_bos(processor) == (1,)
    assert code.starts_with_bos(families.build("llava")[1]) == ()  # this tokenizer writes none
