"""Every method on every main family: modes, batches, branches, counters and cleanup."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_cases import (
    CONTRASTIVE,
    FAMILIES,
    LENGTH,
    METHODS,
    VOCABULARY,
    assert_close,
    batch,
    counted,
    decode,
    new_tokens,
    single,
)

import families
import revisit
from revisit import M3ID, SID, VCD, Chain, DeCo, DoLa, ReVisiT, RevisitError, Trace
from revisit.decoding.method import Method
from revisit.forward import passes
from revisit.methods import code


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", METHODS)
def test_a_row_of_a_batch_equals_its_single_run(family: str, name: str) -> None:
    both, trace = decode(family, batch(family), METHODS[name])
    for row in (0, 1):
        alone, own = decode(family, single(family, row), METHODS[name])
        assert torch.equal(new_tokens(both, batch(family))[row], new_tokens(alone, single(family, row))[0])
        assert_close(both.scores, alone.scores, slice(row, row + 1))
        assert trace.rows[row].plausible_tokens == own.rows[0].plausible_tokens


UNSUPPORTED = {  # part of the error message -> families for which some methods raise it
    "needs the attention of every decoder layer, and only 1 of the 4": families.RECURRENT,
    "is unknown: use another method": ("gemma4", "kimi_k25", "lfm2_vl", "minicpmv4_6", "molmo2"),
    "needs the tokens that open and close an image": ("minicpmv4_6",),
}


@pytest.mark.parametrize("family", [family for family in families.FAMILIES if family not in FAMILIES])
def test_every_other_family_decodes_with_every_method(family: str) -> None:
    for name, method in METHODS.items():
        try:
            both, trace = decode(family, batch(family), method, max_new_tokens=2)
        except RevisitError as error:
            assert any(family in known and why in str(error) for why, known in UNSUPPORTED.items()), (name, error)  # noqa: PT017
            continue
        alone, _ = decode(family, single(family, 1), method, max_new_tokens=2)
        assert trace.summary()["steps"] == 4, name
        assert_close(both.scores, alone.scores, slice(1, 2))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CONTRASTIVE)
@pytest.mark.parametrize("how", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampling", "beams"])
def test_one_forward_for_both_branches_equals_one_each(family: str, name: str, how: dict[str, Any]) -> None:
    model, _ = families.build(family)
    with counted(model) as together:
        stacked, trace = decode(family, batch(family), CONTRASTIVE[name], **how)
    with counted(model) as rows:
        sequential, _ = decode(family, batch(family), CONTRASTIVE[name].replace(mode="sequential"), **how)
    count, later = 2 * how.get("num_beams", 1), LENGTH - 1
    assert together[-later:] == [2 * count] * later  # after the prompt: one forward a step, twice the rows
    assert rows[-2 * later :] == [count] * (2 * later)
    assert torch.equal(stacked.sequences, sequential.sequences)
    assert_close(stacked.scores, sequential.scores)
    summary = trace.summary()
    assert summary["steps"] == LENGTH * count
    assert summary["applied"] > 0
    assert summary["changed"] > 0 or name in ("code", "sid", "pai", "icd", "m3id")  # mild ones need not move the top


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "name", ["dola", "deco", "plausible_only", "chain", "flb", "middle_layers", "vaf", "sadt", "vista", "only"]
)
@pytest.mark.parametrize("how", [{"do_sample": True}, {"num_beams": 3}], ids=["sampling", "beams"])
def test_other_methods_sample_and_search(family: str, name: str, how: dict[str, Any]) -> None:
    output, trace = decode(family, batch(family), METHODS[name], **how)
    summary = trace.summary()
    assert summary["steps"] == LENGTH * 2 * how.get("num_beams", 1)
    assert summary["applied"] > summary["steps"] // 2 or name == "sadt"  # which acts at object words only
    if how.get("num_beams"):  # beams are compared with each other, so every row must be a distribution
        torch.testing.assert_close(output.scores[0].logsumexp(-1), torch.zeros(6), atol=1e-4, rtol=0)


def test_beams_without_a_cache() -> None:
    want, _ = decode("llava", batch("llava"), VCD(), num_beams=2)
    got, _ = decode("llava", batch("llava"), VCD(), num_beams=2, use_cache=False)
    assert torch.equal(got.sequences, want.sequences)


def test_a_stream_shows_the_clean_rows() -> None:
    streamed: list[int] = []
    streamer = SimpleNamespace(put=lambda ids: streamed.extend(ids.flatten().tolist()), end=lambda: streamed.append(-1))
    output, _ = decode("qwen2_5_vl", single("qwen2_5_vl", 0), M3ID(), streamer=streamer)
    assert streamed == [*output.sequences[0].tolist(), -1]


def test_return_sequences_are_rows_of_their_own() -> None:
    how = {"do_sample": True, "num_return_sequences": 2}
    for name in ("vcd", "m3id", "sid"):
        pair, trace = decode("qwen2_5_vl", batch("qwen2_5_vl"), CONTRASTIVE[name], **how)
        other, _ = decode("qwen2_5_vl", batch("qwen2_5_vl"), CONTRASTIVE[name].replace(mode="sequential"), **how)
        assert len(pair.sequences) == 4
        assert len({tuple(row) for row in pair.sequences.tolist()}) == 4
        assert torch.equal(pair.sequences, other.sequences)
        assert trace.summary()["steps"] == 4 * LENGTH


@pytest.mark.parametrize("name", METHODS)
def test_records_are_distributions_over_the_set(name: str) -> None:
    _, trace = decode("qwen2_5_vl", batch("qwen2_5_vl"), METHODS[name])
    for row in trace.rows:
        assert len(row.records) == LENGTH
        for record in row.records:
            assert record.token is not None
            assert record.final == sorted(record.final, reverse=True) or len(record.ids) == trace.candidates
            if record.plausible_tokens <= trace.candidates:
                for column in (record.base, record.final, record.vision or [1.0]):
                    assert sum(column) == pytest.approx(1.0, abs=1e-4)


# -- where nothing changes in theory ----------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "method",
    [
        VCD(alpha=0.0, beta=1e-30),
        M3ID(decay=0.0, beta=0.0),
        SID(keep=1.0, beta=0.0),
        DeCo(alpha=0.0, top_p=1.0, top_k=families.VOCAB, layers=(1,)),
        Chain([VCD(alpha=0.0, beta=0.0), M3ID(decay=0.0, beta=0.0)]),
    ],
    ids=["vcd", "m3id", "sid", "deco", "chain"],
)
def test_reduces_to_the_model(family: str, method: Any) -> None:
    output, _ = decode(family, batch(family), method)
    plain, _ = decode(family, batch(family), None)
    assert torch.equal(output.sequences, plain.sequences)
    assert_close(output.scores, plain.logits)


# -- chains ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_passes_scores_on_in_order(family: str) -> None:
    alone, _ = decode(family, batch(family), ReVisiT())
    after_nothing, _ = decode(family, batch(family), Chain([VCD(alpha=0.0, beta=0.0), ReVisiT()]))
    assert_close(after_nothing.scores, alone.scores)
    chained, trace = decode(family, batch(family), Chain([VCD(), ReVisiT()]))
    vcd, _ = decode(family, batch(family), VCD())
    first = chained.scores[0].isfinite()
    assert bool((first <= vcd.scores[0].isfinite()).all())  # ReVisiT chooses among what VCD left
    assert [link.method["name"] for link in trace.links] == ["vcd", "revisit"]
    assert all(link.summary()["applied"] > 0 for link in trace.links)
    other_way, _ = decode(family, batch(family), Chain([ReVisiT(), VCD()]))
    assert not torch.allclose(other_way.scores[0], chained.scores[0])


def test_a_chain_of_contrasts_shares_one_batch() -> None:
    model, _ = families.build("qwen2_5_vl")
    with counted(model) as rows:
        output, _ = decode("qwen2_5_vl", batch("qwen2_5_vl"), Chain([VCD(), M3ID(start=1)]))
    assert rows == [2, 2, 2] + [6] * (LENGTH - 1)
    in_turn = Chain([VCD(mode="sequential"), M3ID(start=1)])
    assert_close(output.scores, decode("qwen2_5_vl", batch("qwen2_5_vl"), in_turn)[0].scores)


# -- other caches, other prompts, and what is left behind ----------------------------------------------------------


@pytest.mark.parametrize("name", ["vcd", "m3id", "sid", "avisc", "pai"])
@pytest.mark.parametrize("how", [{"use_cache": False}, {"cache_implementation": "static"}], ids=["none", "static"])
def test_other_caches_run_one_branch_after_the_other(name: str, how: dict[str, Any]) -> None:
    if CONTRASTIVE[name].needs_cache and "use_cache" in how:
        pytest.skip("it raises an error")
    want, _ = decode("llava", batch("llava"), CONTRASTIVE[name])
    got, _ = decode("llava", batch("llava"), CONTRASTIVE[name], **how)
    assert torch.equal(got.sequences, want.sequences)
    assert_close(got.scores, want.scores)


@pytest.mark.parametrize("name", METHODS)
def test_without_a_cache_scores_are_equal_or_the_cache_is_needed(name: str) -> None:
    for method in (METHODS[name], *([Chain(["greedy", METHODS[name]])] if name != "chain" else [])):
        if method.needs_cache:
            with pytest.raises(RevisitError, match="leave out use_cache=False"):
                decode("internvl", batch("internvl"), method, use_cache=False)
        else:
            want, _ = decode("internvl", batch("internvl"), method)
            got, _ = decode("internvl", batch("internvl"), method, use_cache=False)
            assert torch.equal(got.sequences, want.sequences)
            assert_close(got.scores, want.scores)


@pytest.mark.parametrize(
    "name", ["sid", "avisc", "pai", "vista", "memvr", "only", "middle_layers", "vaf", "sadt", "flb"]
)
@pytest.mark.parametrize("padded", [True, False])
def test_empty_places_of_a_static_cache_do_not_count(name: str, padded: bool) -> None:
    inputs = batch("internvl") if padded else single("internvl", 0)  # without padding there is no mask in the prefill
    want, _ = decode("internvl", inputs, METHODS[name])
    got, _ = decode("internvl", inputs, METHODS[name], cache_implementation="static")
    assert torch.equal(got.sequences, want.sequences)
    assert_close(got.scores, want.scores)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_the_cache_is_returned_as_by_plain_decoding(name: str) -> None:
    output, _ = decode("qwen2_5_vl", batch("qwen2_5_vl"), CONTRASTIVE[name])
    prompt = batch("qwen2_5_vl")["input_ids"].shape[1]
    for layer in output.past_key_values.layers:
        assert layer.keys.shape[:1] + layer.keys.shape[2:3] == (2, prompt + LENGTH - 1)


def installed(model: Any) -> list[Any]:
    """Return the hooks of the model; transformers has some of its own on vision towers."""
    return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [*METHODS, "revisit"])
def test_an_exception_leaves_the_model_as_it_was(family: str, name: str) -> None:
    model, _ = families.build(family)
    method = METHODS.get(name) or ReVisiT()
    before, _ = decode(family, batch(family), None)
    hooks = installed(model)

    def trouble(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > batch(family)["input_ids"].shape[1] + 1:
            raise KeyError("on purpose")
        return scores

    with pytest.raises(KeyError, match="on purpose"):
        decode(family, batch(family), method, logits_processor=[trouble])
    assert installed(model) == hooks
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    after, _ = decode(family, batch(family), None)
    assert torch.equal(before.sequences, after.sequences)
    if family == "qwen2_5_vl":
        plain = model.model.rope_deltas.clone()
        decode(family, batch(family), method)
        assert torch.equal(model.model.rope_deltas, plain)


@pytest.mark.parametrize("name", METHODS)
def test_a_row_without_an_image_is_decoded_plainly(name: str) -> None:
    """A text without an image beside one with an image, whose row alone is changed."""
    mixed = families.inputs("llava", ["what is it", "say something"], [[families.image(1)], []])
    output, trace = decode("llava", mixed, METHODS[name])
    alone, _ = decode("llava", single("llava", 0), METHODS[name])
    assert torch.equal(new_tokens(output, mixed)[0], new_tokens(alone, single("llava", 0))[0])
    if name in CONTRASTIVE:
        plain, _ = decode("llava", mixed, None)
        assert torch.equal(output.sequences[1], plain.sequences[1])
        assert trace.rows[1].applied == 0


def test_text_without_an_image_raises() -> None:
    model, processor = families.build("llava")
    text = processor.tokenizer(["no picture here"], return_tensors="pt")
    for method in CONTRASTIVE.values():
        with pytest.raises(RevisitError, match="There is no image in the prompt"):
            revisit.generate(model, **text, method=method, processor=processor, max_new_tokens=2)
    trace = Trace()
    revisit.generate(model, **text, method=DoLa(), trace=trace, max_new_tokens=2)  # needs none
    assert trace.summary()["applied"] == 2


def test_pixels_are_needed_to_change_them() -> None:
    model, _ = families.build("llava")
    inputs = dict(single("llava", 0))
    pixels = inputs.pop("pixel_values")
    encoded = {"image": model.model.get_image_features(pixel_values=pixels, return_dict=True, vision_feature_layer=-2)}
    with pytest.raises(RevisitError, match="changes the pixels of the image"):
        revisit.generate(model, **inputs, mm_encoder_outputs=encoded, method=VCD(), max_new_tokens=2)


@pytest.mark.parametrize("name", [name for name in revisit.methods.names() if name not in ("greedy", "chain")])
def test_every_method_is_described(name: str) -> None:
    cls = revisit.methods.find(name)
    assert cls.name == name
    assert cls.summary
    assert cls.cost
    assert cls.source
    assert isinstance(cls.official(), cls)  # type: ignore[attr-defined]
    assert (
        revisit.methods.get(name, **{k: str(v) for k, v in cls().settings().items() if isinstance(v, float)}) == cls()
    )


@pytest.mark.parametrize("name", ["revisit", "vcd", "plausible_only", "dola"])
@pytest.mark.parametrize("sample", [False, True])
def test_a_banned_plausible_set_falls_back_to_the_model(name: str, sample: bool) -> None:
    """If the only plausible token is banned, the step is decoded plainly and does not return token 0."""
    strict: dict[str, Method] = {
        "revisit": revisit.ReVisiT(alpha=1.0),
        "vcd": VCD(beta=1.0),
        "plausible_only": revisit.PlausibleOnly(alpha=1.0),
        "dola": DoLa(relative_top=1.0),
    }
    inputs = single("qwen2_5_vl", 0)
    free, _ = decode("qwen2_5_vl", inputs, strict[name])
    banned = int(new_tokens(free, inputs)[0, 0])
    how = {"do_sample": True, "top_k": 5} if sample else {}
    got, _ = decode("qwen2_5_vl", inputs, strict[name], suppress_tokens=[banned], **how)
    plain, _ = decode("qwen2_5_vl", inputs, None, suppress_tokens=[banned], **how)
    assert banned not in new_tokens(got, inputs)
    assert int(new_tokens(got, inputs)[0, 0]) == int(new_tokens(plain, inputs)[0, 0]) != 0
    torch.testing.assert_close(got.scores[0], plain.scores[0])


def test_pai_changes_the_second_token_on() -> None:
    with_, without = (decode("llava", single("llava", 0), revisit.PAI(alpha=a, gamma=1.5))[0] for a in (5.0, 0.0))
    torch.testing.assert_close(with_.scores[0], without.scores[0])
    assert not torch.allclose(with_.logits[1], without.logits[1], atol=1e-3)


def test_two_methods_with_early_exits_raise() -> None:
    with pytest.raises(RevisitError, match="Only one method of a chain can read early layers"):
        decode("llava", single("llava", 0), Chain([DoLa(), DeCo(layers=(1, 2))]))


@pytest.mark.parametrize("method", [revisit.PAI(gamma=1.5), SID()], ids=["pai", "sid"])
def test_calls_that_outgrow_a_sliding_window_raise(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = single("gemma3", 0)
    assert decode("gemma3", inputs, method)[0].scores
    most = inputs["input_ids"].shape[1] + LENGTH
    monkeypatch.setattr(families.build("gemma3")[0].config.text_config, "sliding_window", most - 1)
    with pytest.raises(RevisitError, match=f"see only the last {most - 1} tokens, fewer than the {most}"):
        decode("gemma3", inputs, method)


@pytest.mark.parametrize("name", ["pai", "sid", "avisc", "middle_layers", "vaf", "only", "sadt", "opera"])
def test_a_model_without_the_attention_interface_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "watching", lambda *_: nullcontext())  # no hook is ever called
    method = {**METHODS, "opera": revisit.OPERA(beams=2)}[name]
    with pytest.raises(RevisitError, match="computes its attention without transformers' attention interface"):
        decode("llava", single("llava", 0), method, num_beams=method.own_beams)


def test_descriptions_are_decoded_plainly_and_cached_by_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's own penalty does not apply to descriptions, and those with another end token are not reused."""
    model, _ = families.build("llava")
    inputs, method = single("llava", 0), CONTRASTIVE["code"]
    code._DESCRIPTIONS.clear()
    want, _ = decode("llava", inputs, method)
    code._DESCRIPTIONS.clear()
    monkeypatch.setattr(model.generation_config, "repetition_penalty", 3.0)
    got, _ = decode("llava", inputs, method, repetition_penalty=1.0)
    assert_close(got.scores, want.scores)
    assert len(code._DESCRIPTIONS[model]) == 1
    decode("llava", inputs, method, eos_token_id=VOCABULARY + 1)
    assert len(code._DESCRIPTIONS[model]) == 2
