"""Vision states are stored once for all rows that share them, and captured even from compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

import families
import revisit
from revisit import ReVisiT, RevisitError
from revisit.explain.prefill import force
from revisit.forward import states
from revisit.forward.states import Capture
from revisit.models.parts import ModelParts

METHOD = ReVisiT(alpha=1e-3, layers="all")
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def two_images() -> Any:
    return families.inputs("llava", ["hi", "what is it?"], [[families.image(0)], [families.image(1)]])


def test_states_are_stored_once_for_all_rows_of_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Capture] = []
    make = Capture.__init__

    def spy(self: Capture, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        seen.append(self)

    monkeypatch.setattr(Capture, "__init__", spy)
    model, _ = families.build("llava")
    revisit.generate(model, **two_images(), method=METHOD, num_beams=4, **OPTIONS)
    (capture,) = seen
    assert capture.store is not None
    assert len(capture.items) == 2  # two items, eight rows
    states, lengths = capture.padded()
    assert states.untyped_storage().data_ptr() == capture.store.untyped_storage().data_ptr()
    assert states.untyped_storage().nbytes() == 4 * states.numel()  # no position of the prompt beyond these
    assert lengths == [states.shape[1]] * 2
    for number, item in enumerate(capture.items):
        assert torch.equal(torch.cat(list(item.by_layer.values())), states[number])
        assert {x.untyped_storage().data_ptr() for x in item.by_layer.values()} == {states.untyped_storage().data_ptr()}


def test_compiled_code_runs_eagerly_during_the_prefill() -> None:
    """Code that was compiled before the hooks were installed would bypass them."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    run = torch.compile(lambda x: module(x), backend="eager")
    run(torch.ones(1, 2))
    calls: list[int] = []
    handle = module[0].register_forward_hook(lambda *_: calls.append(1))
    run(torch.ones(1, 2))
    unseen = len(calls)
    states.FORCE_EAGER.__enter__()
    run(torch.ones(1, 2))
    assert len(calls) == unseen + 1
    states.FORCE_EAGER.__enter__()  # a second decode in another thread begins before the first has its prefill
    states.FORCE_EAGER.__exit__()
    run(torch.ones(1, 2))
    assert len(calls) == unseen + 2
    states.FORCE_EAGER.__exit__()
    assert torch._dynamo.eval_frame._stance.stance == "default"
    handle.remove()


@pytest.mark.parametrize("method", ["revisit", "dola", "deco", "vista", "memvr", "pai", "vaf", "only", "sid"])
def test_a_model_that_was_compiled_before_decodes_the_same(method: str) -> None:
    """With a static cache, transformers compiles models on GPUs without being asked."""
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["what is it?"], [[families.image(0)]])
    options: dict[str, Any] = {**OPTIONS, "cache_implementation": "static"}
    expected = revisit.generate(model, **inputs, method=method, **options).tolist()
    compiling = CompileConfig(backend="eager", fullgraph=False, mode=None)
    compiling._compile_all_devices = True
    revisit.generate(model, **inputs, method="greedy", **options, compile_config=compiling)
    options["compile_config"] = compiling
    assert revisit.generate(model, **inputs, method=method, **options).tolist() == expected


@pytest.mark.parametrize("layers", ["last", "all"])
def test_a_model_that_bypasses_its_modules_raises(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.build("llava")
    parts = ModelParts.of(model)
    module, named = (parts.decoder, "its decoder") if layers == "last" else (parts.layers[0], "decoder layer 0")

    def without_hooks(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    monkeypatch.setattr(type(module), "__call__", without_hooks)
    with pytest.raises(RevisitError, match=f"{named} as a module.*hooks .* not reached"):
        revisit.generate(model, **two_images(), method=ReVisiT(layers=layers), **OPTIONS)


def test_a_decoder_that_returns_only_the_last_position_raises() -> None:
    model, _ = families.build("llava")

    def last_position(_module: Any, _args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, -1:]
        return output

    handle = ModelParts.of(model).decoder.register_forward_hook(last_position)
    try:
        with pytest.raises(RevisitError, match="so the states of the vision tokens were not computed") as caught:
            revisit.generate(model, **two_images(), method=ReVisiT(layers="last"), **OPTIONS)
    finally:
        handle.remove()
    assert "already holds the image" not in str(caught.value)


@pytest.mark.skipif("gemma4" not in families.FAMILIES, reason="its processor needs torchvision here")
def test_layers_that_reuse_keys_and_values_run_for_every_position() -> None:
    """Gemma 4 computes its last layers for the positions in `logits_to_keep` alone, unless all hidden states are requested."""
    model, _ = families.build("gemma4")
    inputs = families.inputs("gemma4", ["hi"], [[families.image(0)]])
    with torch.no_grad():
        expected = model(**inputs, output_hidden_states=True).hidden_states[-1][0]  # (positions, d)
    prompt = inputs["input_ids"][0].tolist()
    (forced,) = force(model, inputs, [prompt[-3:]], (ModelParts.of(model).depth,))
    vision = inputs["input_ids"][0] == model.config.image_token_id
    (captured,) = forced.vision.values()
    torch.testing.assert_close(captured, expected[vision], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(forced.text[0], expected[-1], atol=1e-5, rtol=1e-5)
    assert len(forced.text) == 3
