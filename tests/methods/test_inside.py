"""VISTA, MemVR and ONLY, which read or change hidden states, against plain re-computations without a KV cache."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import LENGTH, METHODS, batch, counted, decode, extended, new_tokens, single, text_alone
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

import families
import revisit
from revisit import ONLY, VISTA, MemVR, RevisitError
from revisit.decoding.method import Method
from revisit.methods import memvr, only, vista

PAIR = ("llava", "qwen2_5_vl")
ROW = 1  # the prompt whose image is not square


@contextlib.contextmanager
def hooked(*hooks: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check(family: str, method: Method, scores_of: Any) -> None:
    """Check that every step's scores, and their arg-max, equal those of the re-computation."""
    inputs = dict(single(family, ROW))
    output, _ = decode(family, inputs, method)
    plain, _ = decode(family, inputs, None)
    answer = new_tokens(output, inputs)  # (1, n)
    for step, scores in enumerate(output.scores):
        want = scores_of(inputs, answer[:, :step])
        torch.testing.assert_close(scores[0], want, atol=2e-4, rtol=1e-4)
        assert want.argmax() == answer[0, step]
    assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(output.scores, plain.scores, strict=True))


# -- VISTA ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PAIR)
def test_vista_steers_and_mixes_as_written(family: str) -> None:
    model, _ = families.build(family)
    blocks = model.model.language_model.layers

    def outputs(inputs: dict[str, Any]) -> Tensor:
        found: list[Tensor] = []
        watch = [b.register_forward_hook(lambda _m, _a, output: found.append(output[0, -1])) for b in blocks]
        with hooked(*watch), torch.no_grad():
            model(**inputs)
        return torch.stack(found)  # (layers, d)

    def scores_of(inputs: dict[str, Any], answer: Tensor) -> Tensor:
        direction = outputs(inputs) - outputs(text_alone(family, inputs))
        direction[0, 0] += 1

        def turned(v: Tensor, x: Tensor) -> Tensor:
            further = 1 + torch.maximum(torch.zeros(()), cosine_similarity(x, -v[None, None], dim=-1))[..., None]
            return normalize(normalize(x, dim=-1) + 0.17 * further * normalize(v, dim=-1), dim=-1) * x.norm(
                dim=-1, keepdim=True
            )

        hooks = [
            b.mlp.register_forward_hook(lambda _m, _a, x, v=v: turned(v, x))
            for b, v in zip(blocks, direction, strict=True)
        ]
        with hooked(*hooks), torch.no_grad():
            output = model(**extended(inputs, answer), output_hidden_states=True)
            late = torch.stack([model.lm_head(output.hidden_states[j][0, -1]) for j in (1, 3)]).mean(0)
        mixed: Tensor = 0.7 * output.logits[0, -1] + 0.3 * late
        return mixed

    check(family, VISTA.official(layers=(1, 3)), scores_of)


def test_vista_takes_rounding_for_no_direction() -> None:
    nearly = torch.tensor([[1.0, 1.0], [1.0, 1.0]]), torch.tensor([[1.0, 1.000001], [0.5, 1.0]])
    assert vista.added(*nearly).tolist() == [[0.0, 0.0], [0.5, 0.0]]


def test_vista_runs_the_prompt_three_times_and_each_token_once() -> None:
    first = families.build("llava")[0].model.language_model.layers[0]
    prompt = single("llava", ROW)["input_ids"].shape[1]
    text = text_alone("llava", single("llava", ROW))["input_ids"].shape[1]
    for method, prefills in ((VISTA(), [prompt, text, prompt]), (VISTA(strength=0), [prompt])):
        with counted(first) as lengths:
            decode("llava", single("llava", ROW), method)
        assert lengths == prefills + [1] * (LENGTH - 1)


# -- MemVR ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PAIR)
def test_memvr_acts_in_the_first_uncertain_layer(family: str) -> None:
    """The prompt is one forward and every later token another, each with its own layer and its own mean sizes."""
    model, _ = families.build(family)
    text = model.model.language_model
    layers, threshold, ratio = (1, 2, 3), 0.93, 0.4
    used: list[int | None] = []

    def scores_of(inputs: dict[str, Any], answer: Tensor) -> Tensor:
        start = inputs["input_ids"].shape[1]
        image = inputs["input_ids"][0] == model.config.image_token_id
        chosen: list[int | None] = []  # the layer of each forward so far
        for count in range(answer.shape[1] + 1):  # as many forwards as there were
            spans = [slice(0, start), *(slice(start + n, start + n + 1) for n in range(count))]
            state: dict[str, Any] = {"vision": None}
            chosen.append(None)

            def read(_module: Any, args: Any, number: int, state: dict[str, Any] = state) -> None:
                x = args[0]
                if number == 0:
                    state["vision"] = x[0, :start][image]
                if number in layers and chosen[-1] is None:
                    best = model.lm_head(text.norm(x[0, -1])).topk(10).values.softmax(-1)
                    if float(-(best * best.log()).sum() / math.log(10)) > threshold:
                        chosen[-1] = number

            def look(_module: Any, args: Any, output: Tensor, number: int, state: dict[str, Any] = state) -> Tensor:
                output = output.clone()
                for span, layer in zip(spans, chosen, strict=True):  # noqa: B023
                    if layer == number:
                        own, found = output[:, span], args[0][:, span] @ state["vision"].T @ state["vision"]
                        output[:, span] = (1 - ratio) * own + ratio * found * own.abs().mean() / found.abs().mean()
                return output

            hooks = []
            for number, block in enumerate(text.layers):
                hooks.append(block.register_forward_pre_hook(lambda m, a, n=number: read(m, a, n)))
                hooks.append(block.mlp.register_forward_hook(lambda m, a, o, n=number: look(m, a, o, n)))
            with hooked(*hooks), torch.no_grad():
                logits: Tensor = model(**extended(inputs, answer[:, :count])).logits[0, -1]
        used[:] = chosen
        return logits

    check(family, MemVR(layers=layers, threshold=threshold, ratio=ratio), scores_of)
    assert len(set(used)) > 1


def test_memvr_measures_the_logits_that_the_model_would_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aya Vision declares a scaling of its logits that its forward pass does not use."""
    model, _ = families.build("aya_vision")
    text, measured, states = model.model.language_model, [], []
    uncertainty = memvr.uncertainty
    monkeypatch.setattr(memvr, "uncertainty", lambda logits: measured.append(logits) or uncertainty(logits))
    decode("aya_vision", single("aya_vision", ROW), MemVR(layers=(1,), threshold=1.0))
    with hooked(text.layers[1].register_forward_pre_hook(lambda _m, args: states.append(args[0]))), torch.no_grad():
        model(**single("aya_vision", ROW))
        want = model.lm_head(text.norm(states[0][:, -1]))
    torch.testing.assert_close(measured[0], want, atol=1e-4, rtol=1e-4)


def test_memvr_without_uncertainty_equals_the_model() -> None:
    model, _ = families.build("qwen2_5_vl")
    plain, _ = decode("qwen2_5_vl", batch("qwen2_5_vl"), None)
    decode(
        "qwen2_5_vl", batch("qwen2_5_vl"), MemVR()
    )  # the first call of a model may run one token to calibrate its head
    with counted(model) as calls:
        sure, trace = decode("qwen2_5_vl", batch("qwen2_5_vl"), MemVR(threshold=1.0))
    assert len(calls) == LENGTH
    assert torch.equal(sure.sequences, plain.sequences)
    assert trace.summary()["applied"] == 0
    _, doubtful = decode("qwen2_5_vl", batch("qwen2_5_vl"), MemVR(threshold=0.0))
    assert doubtful.summary()["applied"] == 2 * LENGTH


# -- ONLY -----------------------------------------------------------------------------------------------------------------


def only_logits(family: str, inputs: dict[str, Any], answer: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's logits, and those of the shortcut from layer 0 by its whole attention matrix."""
    model, _ = families.build(family)
    text = model.model.language_model
    first, last = text.layers[0], text.layers[-1]
    image = torch.cat([inputs["input_ids"][0] == model.config.image_token_id, torch.zeros(answer.shape[1]).bool()])
    words = ~image
    words[0] = False
    read: list[Tensor] = []
    model.set_attn_implementation("eager")
    watch = first.register_forward_pre_hook(lambda _m, args: read.append(args[0]))
    try:
        with hooked(watch), torch.no_grad():
            output = model(**extended(inputs, answer), output_attentions=True, output_hidden_states=True)
    finally:
        model.set_attn_implementation("sdpa")
    weights = output.attentions[0][0, :, -1].clone()  # (heads, n)
    spreads = []
    for columns in (words, image):
        own = weights[:, columns]
        own[own > own.mean(-1, keepdim=True) + own.std(-1, keepdim=True)] = 0
        weights[:, columns] = own
        p = own / own.sum(-1, keepdim=True)
        spreads.append(-(p * (p + 1e-6).log()).sum(-1))
    ratio = spreads[0] / spreads[1]
    weights[ratio < ratio.mean()] = 0
    with torch.no_grad():
        values = first.self_attn.v_proj(first.input_layernorm(read[0]))[0].unflatten(-1, (2, 8))  # (n, key heads, d)
        mixed = torch.stack([weights[head] @ values[:, head // 2] for head in range(4)]).flatten()
        state = last.input_layernorm(first.self_attn.o_proj(mixed)) + 0.2 * output.hidden_states[-2][0, -1]
        state = state + last.mlp(last.post_attention_layernorm(state))
        other: Tensor = model.lm_head(text.norm(state) + 0.5 * output.hidden_states[-1][0, -1])
    return output.logits[0, -1], other


@pytest.mark.parametrize("family", PAIR)
@pytest.mark.parametrize("gamma", [0.0, 2.0], ids=["contrasted", "added"])
def test_only_takes_the_shortcut_from_one_layers_attention(family: str, gamma: float) -> None:
    def scores_of(inputs: dict[str, Any], answer: Tensor) -> Tensor:
        logits, other = only_logits(family, inputs, answer)
        mixed = logits + 3 * other if gamma else 2 * logits - other
        return mixed.masked_fill(logits < logits.max() + math.log(0.1), -torch.inf)

    check(family, ONLY(gamma=gamma), scores_of)


def test_only_takes_one_forward_a_token_and_a_head_row_more() -> None:
    model, _ = families.build("llava")
    with counted(model) as forwards, counted(model.lm_head) as rows:
        decode("llava", batch("llava"), ONLY())
    assert len(forwards) == LENGTH
    assert rows == [2, 2] * LENGTH


# -- numbers of the released code, for inputs that are waves: the sine of 1.7·n + phase at the n-th place --------------------


RELEASED = json.loads((Path(__file__).parents[1] / "data" / "released" / "formulas.json").read_text("utf-8"))


def wave(*shape: int, phase: float = 0.0) -> Tensor:
    return torch.sin(torch.arange(math.prod(shape), dtype=torch.float32) * 1.7 + phase).view(*shape)


def test_vista_steers_as_the_released_layer() -> None:
    """Which rounds what it returns to half precision."""
    direction = wave(3, 4, phase=0.9) - wave(3, 4)
    direction[0, 0] += 1
    torch.testing.assert_close(direction, torch.tensor(RELEASED["vista"]["direction"]))
    states = 2 * wave(1, 5, 4, phase=0.3)
    got = torch.cat([vista.steer(states, row[None], 0.17) for row in direction])
    torch.testing.assert_close(got, torch.tensor(RELEASED["vista"]["steered"]), atol=1e-3, rtol=1e-3)


def test_memvr_mixes_as_the_released_network() -> None:
    x, plain = wave(1, 3, 6, phase=2.0), torch.tensor(RELEASED["memvr"]["plain"])[None]
    got = memvr.retraced(x, plain, wave(1, 5, 6, phase=1.5), torch.ones(1, 3), 0.12)
    torch.testing.assert_close(got, torch.tensor(RELEASED["memvr"]["output"])[None], atol=1e-5, rtol=1e-5)
    assert float(memvr.uncertainty(2 * wave(40))) == pytest.approx(RELEASED["memvr"]["entropy"], abs=1e-6)


def test_only_edits_attention_as_the_released_layer() -> None:
    """With the image at columns 35 to 610, where the released code has it."""
    columns = 35 + 576 + 6
    weights = (3 * wave(1, 4, columns) + wave(1, 4, columns, phase=2.0) ** 3).softmax(-1)
    image = torch.zeros(1, columns).bool()
    image[:, 35:611] = True
    text = ~image
    text[:, 0] = False
    got = only.textual(weights, text, image)[0]
    torch.testing.assert_close(got.sum(-1), torch.tensor(RELEASED["only"]["sums"]), atol=1e-5, rtol=1e-5)
    assert (got == 0).sum(-1).tolist() == RELEASED["only"]["zeros"]
    assert (got == 0).all(-1).nonzero().flatten().tolist() == RELEASED["only"]["removed"]


# -- all three --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vista", "memvr", "only"])
def test_mixed_batches_several_images_and_chains(name: str) -> None:
    _, processor = families.build("llava")
    texts = ["<image>what is it", "no image here"]
    inputs = dict(processor(text=texts, images=[[families.image(1)]], padding=True, return_tensors="pt"))
    method = {"vista": VISTA(), "memvr": MemVR(threshold=0.0), "only": ONLY()}[name]
    mixed, _ = decode("llava", inputs, method)
    plain, _ = decode("llava", inputs, None)
    torch.testing.assert_close(mixed.scores[0][1], plain.scores[0][1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(mixed.scores[0][0], plain.scores[0][0], atol=1e-3)
    two = dict(families.inputs("llava", ["compare"], [[families.image(1), families.image(2)]]))
    assert decode("llava", two, method)[0].sequences.shape[1] == two["input_ids"].shape[1] + LENGTH
    chain = revisit.Chain([method, revisit.VCD(), revisit.ReVisiT()])
    both, _ = decode("llava", batch("llava"), chain)
    alone, _ = decode("llava", single("llava", ROW), chain)
    torch.testing.assert_close(both.scores[-1][ROW], alone.scores[-1][0], atol=1e-4, rtol=1e-4)


def test_vistas_own_prefills_are_not_taken_for_the_prompts() -> None:
    """ReVisiT and SADT keep vision states of the steered prefill, wherever VISTA is in the chain."""
    vista = VISTA(share=0)
    for other in (revisit.ReVisiT(), METHODS["sadt"]):
        first, _ = decode("llava", single("llava", 0), revisit.Chain([vista, other]))
        last, _ = decode("llava", single("llava", 0), revisit.Chain([other, vista]))
        torch.testing.assert_close(first.scores[0], last.scores[0])


def test_vista_adds_no_token_that_a_method_before_it_has_cut() -> None:
    cut, _ = decode("llava", single("llava", ROW), revisit.VCD())
    late, _ = decode("llava", single("llava", ROW), revisit.Chain([revisit.VCD(), VISTA(strength=0, share=1)]))
    assert torch.equal(late.scores[0].isfinite(), cut.scores[0].isfinite())


@pytest.mark.parametrize("method", [VISTA(layers=(9,)), MemVR(layers=(9,)), ONLY(layer=9)], ids=lambda m: m.name)
def test_missing_layers_raise(method: Method) -> None:
    with pytest.raises(RevisitError, match="layer 9 does not exist"):
        decode("llava", single("llava", 0), method)
    with pytest.raises(RevisitError, match="do nothing; set one of them"):
        VISTA(strength=0, share=0)
