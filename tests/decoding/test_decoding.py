"""ReVisiT through transformers' generate(): every family, every mode, and cleanup."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, TextStreamer

import families
import revisit
from revisit import ReVisiT, RevisitError, Trace
from revisit.forward.states import Capture
from revisit.models.families import resolve_layers
from revisit.models.parts import ModelParts, vision_mask
from revisit.models.prompts import prepare

METHOD = ReVisiT(alpha=1e-2, layers="all")
PROMPTS = ["hi", "what is it?", "describe the image in detail", "a"]
SIZES = [(40, 32), (28, 60), (64, 28), (30, 30)]
NEW = 6


def batch(family: str, rows: list[int]) -> Any:
    return families.inputs(family, [PROMPTS[i] for i in rows], [[families.image(i, SIZES[i])] for i in rows])


def decode(family: str, inputs: Any, method: Any = METHOD, **kwargs: Any) -> list[list[int]]:
    model, _ = families.build(family)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **kwargs}
    out = revisit.generate(model, **inputs, method=method, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_row_in_a_batch_equals_the_row_alone(family: str) -> None:
    trace = Trace()
    together = decode(family, batch(family, [0, 1, 2, 3]), trace=trace)
    assert trace.summary()["applied"] > 0
    assert together == [decode(family, batch(family, [i]))[0] for i in range(4)]


def deepstack_layers(model: Any) -> range:
    """Return the hidden states to which the model adds image features."""
    vision = getattr(model.config, "vision_config", None)
    return range(1, 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()))


def test_captured_states_are_what_the_next_layer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.build("qwen3_vl")
    inputs = batch("qwen3_vl", [1, 2])
    parts = ModelParts.of(model)
    (layer,) = (layer for layer in deepstack_layers(model) if layer == 1)
    read: list[torch.Tensor] = []
    forward = parts.layers[layer].forward

    def spy(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(hidden_states.clone())
        return forward(hidden_states, *args, **kwargs)

    monkeypatch.setattr(parts.layers[layer], "forward", spy)
    with ExitStack() as stack, torch.no_grad():
        mask = vision_mask(inputs["input_ids"], parts.vision_ids)
        capture = Capture(parts, mask, (layer, parts.depth), 1, stack)
        plain = model(**inputs, output_hidden_states=True).hidden_states[layer]
    for row, item in enumerate(capture.items):
        torch.testing.assert_close(item.by_layer[layer], read[0][row, mask[row]])
        assert not torch.allclose(item.by_layer[layer], plain[row, mask[row]])


@pytest.mark.parametrize("family", families.FAMILIES)
def test_captured_states_are_the_models_hidden_states(family: str) -> None:
    model, _ = families.build(family)
    inputs = batch(family, [1, 2])
    trace = Trace(record=True)
    parts = ModelParts.of(model)
    layers = resolve_layers(tuple(range(parts.depth + 1)), parts.depth, parts.tied)
    seen: dict[str, Any] = {}

    class Spy(ReVisiT):
        def begin(self, prompt: Any, passes: Any) -> Any:
            for missing in (-1, parts.depth + 1):
                with pytest.raises(RevisitError, match="does not exist"):
                    passes.capture((missing,))
            capture = passes.capture(layers)

            def step(input_ids: Any, logits: Any) -> Any:
                capture.head(passes.raw)
                seen["items"] = capture.items
                return logits

            return step

    revisit.generate(model, **inputs, method=Spy(), trace=trace, max_new_tokens=1, do_sample=False)
    out = model.generate(
        **inputs, max_new_tokens=1, do_sample=False, output_hidden_states=True, return_dict_in_generate=True
    )
    vision_ids = torch.tensor(parts.vision_ids)
    for row, item in enumerate(seen["items"]):
        positions = torch.isin(inputs["input_ids"][row], vision_ids).nonzero().squeeze(-1)
        assert item.positions.tolist() == positions.tolist()
        for layer in layers:
            if layer in deepstack_layers(model):
                continue  # transformers reports them without the features that the next layer reads
            expected = out.hidden_states[0][layer][row, positions]
            torch.testing.assert_close(item.by_layer[layer], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_sampling_beams_streaming_and_both_entry_points(family: str) -> None:
    model, processor = families.build(family)
    inputs = batch(family, [0])
    length = inputs["input_ids"].shape[1]
    torch.manual_seed(1)
    ours = revisit.generate(model, **inputs, method=METHOD, max_new_tokens=NEW, do_sample=True, top_p=0.9, top_k=20)
    torch.manual_seed(1)
    theirs = model.generate(**inputs, custom_generate=METHOD, max_new_tokens=NEW, do_sample=True, top_p=0.9, top_k=20)
    assert ours.tolist() == theirs.tolist()

    class Keep(TextStreamer):
        tokens: list[int]
        ended = False

        def put(self, value: torch.Tensor) -> None:
            self.__dict__.setdefault("tokens", []).extend(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    for entry in ("method", "custom_generate"):
        streamer = Keep(processor.tokenizer)
        call = revisit.generate if entry == "method" else type(model).generate
        out = call(model, **inputs, **{entry: METHOD}, streamer=streamer, max_new_tokens=NEW, do_sample=False)
        assert streamer.tokens == out[0].tolist()
        assert streamer.ended

    if family == "llama4":
        return  # transformers itself does not repeat the image's features for the beams
    beams = revisit.generate(model, **batch(family, [0, 1]), method=METHOD, max_new_tokens=NEW, num_beams=3)
    alone = revisit.generate(model, **inputs, method=METHOD, max_new_tokens=NEW, num_beams=3)
    short, long = alone[0, length:].tolist(), beams[0, batch(family, [0, 1])["input_ids"].shape[1] :].tolist()
    assert [t for t in short if t] == [t for t in long if t]


class Restrict(LogitsProcessor):
    """Plain decoding restricted to the plausible set, written independently."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        p = scores.softmax(-1)
        return scores.masked_fill(p < METHOD.alpha * p.amax(-1, keepdim=True), -torch.inf)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_weight_zero_is_plain_decoding_on_the_plausible_set(family: str) -> None:
    model, _ = families.build(family)
    inputs = batch(family, [0, 3])
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True}
    torch.manual_seed(5)
    zero = revisit.generate(
        model, **inputs, method=ReVisiT(alpha=METHOD.alpha, weight=0), output_scores=True, **options
    )
    torch.manual_seed(5)
    plain = model.generate(**inputs, logits_processor=LogitsProcessorList([Restrict()]), output_scores=True, **options)
    assert zero.sequences.tolist() == plain.sequences.tolist()
    for a, b in zip(zero.scores, plain.scores, strict=True):
        torch.testing.assert_close(a.softmax(-1), b.softmax(-1), atol=1e-5, rtol=1e-4)


def test_it_acts_before_other_processors() -> None:
    """A repetition penalty applies to the refined scores; a user's processor finds excluded tokens far below them."""
    model, _ = families.build("llava")
    seen: list[torch.Tensor] = []

    class Look(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(scores.clone())
            return scores

    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    inputs = batch("llava", [2])
    plain = revisit.generate(model, **inputs, method=METHOD, output_scores=True, **options)
    decode("llava", inputs, repetition_penalty=5.0, logits_processor=LogitsProcessorList([Look()]))
    refined = plain.scores[0][0]
    penalised = torch.where(torch.isin(torch.arange(len(refined)), inputs["input_ids"][0]), refined * 5, refined)
    left = refined.isfinite()
    torch.testing.assert_close(seen[0][0][left], penalised[left])
    assert seen[0][0][~left].max() < penalised.max() - 20


def test_num_return_sequences_and_scores() -> None:
    model, _ = families.build("qwen2_5_vl")
    inputs, trace = batch("qwen2_5_vl", [0, 1]), Trace()
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    out = revisit.generate(model, **inputs, method=METHOD, trace=trace, **options)
    assert out.sequences.shape[0] == 6
    assert len(trace.rows) == 6
    for scores in out.scores:
        assert torch.isneginf(scores).any()


def test_several_images_images_after_text_and_rows_without_image() -> None:
    model, processor = families.build("llava")
    images = [families.image(i) for i in range(3)]
    two = processor(text=["a <image> b <image> c"], images=[images[:2]], return_tensors="pt")
    trace = Trace(record=True)
    revisit.generate(model, **two, method=METHOD, trace=trace, max_new_tokens=3, do_sample=False)
    assert trace.rows[0].vision_tokens == 32
    mixed = processor(text=["<image> hello", "just words"], images=[[images[2]]], padding=True, return_tensors="pt")
    trace = Trace(record=True)
    out = revisit.generate(model, **mixed, method=METHOD, trace=trace, max_new_tokens=4, do_sample=False)
    assert [row.vision_tokens for row in trace.rows] == [16, 0]
    assert trace.rows[1].applied == 0
    assert [len(row.records) for row in trace.rows] == [row.step_count for row in trace.rows]
    assert all(record.base == record.final and record.vision is None for record in trace.rows[1].records)
    assert trace.summary()["rows_without_image"] == 1
    words = processor(text=["just words"], return_tensors="pt")
    plain = model.generate(**words, max_new_tokens=4, do_sample=False)
    length = words["input_ids"].shape[1]
    got = [t for t in out[1, mixed["input_ids"].shape[1] :].tolist() if t]
    assert got == [t for t in plain[0, length:].tolist() if t]


def test_video_tokens_are_vision_tokens() -> None:
    model, _ = families.build("qwen2_5_vl")
    pad, start, end = (families.token_id(f"<|{name}|>") for name in ("video_pad", "vision_start", "vision_end"))
    ids = torch.tensor([[start, *[pad] * 8, end, 80, 90]])  # two pairs of frames of 4 × 4 patches, merged 2 × 2
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == pad).int() * 2,
        "pixel_values_videos": torch.randn(32, 3 * 2 * 7 * 7, generator=generator),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
    }
    trace = Trace()
    out = revisit.generate(model, **inputs, method=METHOD, trace=trace, max_new_tokens=3, do_sample=False)
    assert out.shape[1] > ids.shape[1]
    assert trace.rows[0].vision_tokens == 8
    assert trace.rows[0].applied > 0


def test_static_cache_no_cache_and_reused_cache_give_the_same_tokens() -> None:
    model, _ = families.build("llava")
    inputs = batch("llava", [0])
    expected = decode("llava", inputs)
    assert decode("llava", inputs, cache_implementation="static") == expected
    assert decode("llava", inputs, use_cache=False) == expected
    first = revisit.generate(
        model, **inputs, method=METHOD, max_new_tokens=2, do_sample=False, return_dict_in_generate=True
    )
    again = {**inputs, "input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    fresh = decode("llava", again)
    again.pop("pixel_values")
    assert decode("llava", again, past_key_values=first.past_key_values) == fresh


@pytest.mark.parametrize("method", [METHOD, revisit.VCD()], ids=["revisit", "vcd"])
def test_a_cache_filled_without_the_method_raises(method: Any) -> None:
    model, _ = families.build("llava")
    first = model.generate(**batch("llava", [0]), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    filled = {"input_ids": first.sequences, "past_key_values": first.past_key_values}
    with pytest.raises(RevisitError, match="start from an empty cache"):
        revisit.generate(model, **filled, method=method, max_new_tokens=2)


def test_inputs_embeds_need_and_use_a_mask() -> None:
    model, _ = families.build("llava")
    inputs = batch("llava", [1])
    captured: dict[str, torch.Tensor] = {}
    decoder = model.get_decoder()

    def grab(_module: Any, _args: Any, kwargs: Any) -> None:
        captured.setdefault("embeds", kwargs["inputs_embeds"].clone())

    handle = decoder.register_forward_pre_hook(grab, with_kwargs=True)
    expected = decode("llava", inputs)[0]
    handle.remove()
    embeds = captured["embeds"]
    options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "method": METHOD}
    with pytest.raises(RevisitError, match="vision_mask"):
        revisit.generate(model, inputs_embeds=embeds, **options)
    mask = inputs["input_ids"] == model.config.image_token_id
    assert revisit.generate(model, inputs_embeds=embeds, vision_mask=mask, **options)[0].tolist() == expected
    for wrong in (mask[:, 1:], torch.cat([mask, mask])):
        with pytest.raises(RevisitError, match="vision_mask must have the shape of the prompts"):
            revisit.generate(model, inputs_embeds=embeds, vision_mask=wrong, **options)


def test_unsupported_calls_raise() -> None:
    model, processor = families.build("llava")
    inputs = batch("llava", [0])
    words = processor(text=["no picture here"], return_tensors="pt")
    with pytest.raises(RevisitError, match="no image in the prompt"):
        revisit.generate(model, **words, method=METHOD, max_new_tokens=2)
    with pytest.raises(RevisitError, match="no pixels"):
        revisit.generate(model, input_ids=inputs["input_ids"], method=METHOD, max_new_tokens=2)
    with pytest.raises(RevisitError, match="Layer 9 does not exist"):
        revisit.generate(model, **inputs, method=ReVisiT(layers=(1, 9)), max_new_tokens=2)
    with pytest.raises(RevisitError, match="must be a decoding method"):
        revisit.generate(model, **inputs, method=3, max_new_tokens=2)
    with pytest.raises(RevisitError, match="Do not call a decoding method directly"):
        METHOD(model, inputs["input_ids"], generation_config=model.generation_config)


def test_models_without_vision_tokens_in_their_sequence_raise() -> None:
    import transformers

    text = transformers.LlamaForCausalLM(transformers.LlamaConfig(**families.TEXT))
    with pytest.raises(RevisitError, match="text-only"):
        text.generate(torch.tensor([[1, 5, 6]]), custom_generate=METHOD, max_new_tokens=2)
    sizes = ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")
    layers = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    config = transformers.BartConfig(vocab_size=64, **dict.fromkeys(sizes, 16), **dict.fromkeys(layers, 1))
    bart = transformers.BartForConditionalGeneration(config)
    with pytest.raises(RevisitError, match="encoder–decoder"):
        bart.generate(torch.tensor([[1, 5, 6]]), custom_generate=METHOD, max_new_tokens=2)


def test_hooks_are_removed_after_the_prefill() -> None:
    model, _ = families.build("llava")
    counts = []

    class Count(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            counts.append(hooks(model))
            return scores

    before = hooks(model)
    decode("llava", batch("llava", [0]), logits_processor=LogitsProcessorList([Count()]))
    assert counts == [before] * NEW


def test_two_threads_with_two_models() -> None:
    jobs = [("llava", [0]), ("internvl", [1])]
    expected = {family: decode(family, batch(family, rows)) for family, rows in jobs}
    results: dict[str, list[Any]] = {family: [] for family, _ in jobs}

    def work(family: str, rows: list[int]) -> None:
        for _ in range(3):
            results[family].append(decode(family, batch(family, rows)))

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family, _ in jobs:
        assert results[family] == [expected[family]] * 3


def test_counters_and_record() -> None:
    model, _ = families.build("llava")
    inputs = batch("llava", [0, 2])
    trace = Trace(record=True)
    out = revisit.generate(
        model,
        **inputs,
        method=METHOD,
        trace=trace,
        max_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for number, row in enumerate(trace.rows):
        assert row.step_count == len(row.records) == len(row.plausible_tokens)
        changed = 0
        for record in row.records:
            p = out.logits[record.step - 1][number].softmax(-1)
            kept = p >= METHOD.alpha * p.max()
            assert record.plausible_tokens == int(kept.sum())
            assert record.base[0] == pytest.approx(float(p[record.ids[0]] / p[kept].sum()), rel=1e-4)
            assert record.token == record.ids[0]  # greedy takes the best final candidate
            product = torch.tensor(record.base) * torch.tensor(record.vision)
            shown = torch.tensor(record.final)
            torch.testing.assert_close(shown / shown[0], product / product[0], atol=1e-5, rtol=1e-3)
            assert record.divergences[trace.layers.index(record.layer), record.vision_token] == record.divergences.min()
            changed += record.ids[0] != int(p.argmax())
            assert record.changed == (record.ids[0] != int(p.argmax()))
            assert 0 <= record.vision_token < row.vision_tokens
        assert row.changed == changed
        assert row.applied == sum(record.vision is not None for record in row.records)


def test_random_selection_is_seeded_and_does_not_depend_on_other_rows() -> None:
    method = ReVisiT(alpha=1e-2, select="random", seed=7)
    together = decode("llava", batch("llava", [0, 1]), method)
    assert together == [decode("llava", batch("llava", [i]), method)[0] for i in (0, 1)]
    assert decode("llava", batch("llava", [0, 1]), method) == together
    assert decode("llava", batch("llava", [0, 1]), ReVisiT(alpha=1e-2, select="random", seed=8)) != together


@pytest.mark.parametrize("transform", ["softcap", "scale"])
def test_vision_logits_follow_the_models_own_scaling(transform: str) -> None:
    """Vision logits are capped or scaled like the model's own."""
    from revisit.models.head import calibrated

    head = torch.nn.Linear(8, 40, bias=False).requires_grad_(False)
    state = torch.randn(8, generator=torch.Generator().manual_seed(0)) * 5
    plain = head(state)
    cap = torch.tanh(plain / 3.0) * 3.0
    logits = cap if transform == "softcap" else plain * 0.25
    declared = (
        SimpleNamespace(final_logit_softcapping=3.0) if transform == "softcap" else SimpleNamespace(logit_scale=0.25)
    )
    made = calibrated(head, declared, state, logits, "a test head")
    ids = torch.arange(40)
    torch.testing.assert_close(made.logits(state[None], ids)[0], logits)
    with pytest.raises(RevisitError, match="not its LM head"):
        calibrated(head, declared, state, plain.flip(0), "a test head")


@pytest.mark.parametrize(
    ("depth", "tied", "spec", "expected"),
    [
        (28, False, "all", tuple(range(0, 29, 2))),
        (36, True, "all", tuple(range(2, 37, 2))),
        (5, False, "all", (0, 2, 4, 5)),
        (2, True, "all", (1, 2)),
        (32, False, "last", (32,)),
        (32, False, "low", (*range(0, 16, 2), 32)),
        (64, False, "low", (*range(0, 20, 2), 64)),
        (64, False, "high", (*range(44, 64, 2), 64)),
        (6, False, "high", (3, 5, 6)),
        (6, False, (6, 0, 3), (0, 3, 6)),
    ],
)
def test_layer_sets(depth: int, tied: bool, spec: Any, expected: tuple[int, ...]) -> None:
    assert resolve_layers(spec, depth, tied) == expected


def test_steps_after_a_row_has_ended_are_not_counted() -> None:
    class Second(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= start + 2, False])

    model, _ = families.build("llava")
    inputs = batch("llava", [0, 1])
    start = inputs["input_ids"].shape[1]
    trace = Trace(record=True)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": families.VOCAB + 1, "pad_token_id": 0}
    revisit.generate(model, **inputs, method=METHOD, trace=trace, stopping_criteria=[Second()], **options)
    assert [row.step_count for row in trace.rows] == [2, 5]
    assert [len(row.records) for row in trace.rows] == [2, 5]


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # of older versions of transformers
@pytest.mark.parametrize("name", ["revisit", "deco", "dola"])
def test_an_offloaded_head(name: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, processor = revisit.load("tiny")
    inputs = dict(prepare(processor, ["Describe this image."], [[families.image(0, (96, 96))]]))
    method = revisit.methods.get(name)
    want = revisit.generate(model, **inputs, method=method, max_new_tokens=5, do_sample=False)
    tied = ModelParts.of(model).tied
    away = accelerate.cpu_offload(revisit.load("tiny")[0])
    assert ModelParts.of(away).tied == tied
    assert torch.equal(revisit.generate(away, **inputs, method=method, max_new_tokens=5, do_sample=False), want)


class Broken(revisit.Method):
    """Returns NaN for one token of the second row, or -inf for all, from its third token on."""

    empty: bool = False

    name = "broken"

    def begin(self, prompt: Any, passes: Any) -> Any:
        def step(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            scores = logits.clone()
            if input_ids.shape[1] >= prompt.ids.shape[1] + 2:
                scores[1, slice(None) if self.empty else 3] = -torch.inf if self.empty else torch.nan
            return scores

        return step


@pytest.mark.parametrize("method", [Broken(), Broken(empty=True), revisit.Chain(["vcd", Broken()])], ids=str)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.2}], ids=str)
def test_a_method_that_returns_nan_or_leaves_no_token_raises(method: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RevisitError, match="'broken' returned NaN, or -inf for every token, for row 1 of the batch"):
        decode("llava", batch("llava", [0, 1]), method, **options)


def test_nan_in_an_ended_row_or_from_the_model_itself_raises_nothing() -> None:
    class Second(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.tensor([False, True])

    assert (
        len(decode("llava", batch("llava", [0, 1]), Broken(), stopping_criteria=[Second()], pad_token_id=0)[0]) == NEW
    )
    model, _ = families.build("llava")
    hook = model.lm_head.register_forward_hook(
        lambda _module, _args, logits: logits.index_fill(0, torch.tensor(1), torch.nan)
    )
    try:
        assert len(decode("llava", batch("llava", [0, 1]), "plausible_only")) == 2
    finally:
        hook.remove()
