"""Attention hooks get the model's own attention and are removed completely."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor

import families
from revisit.errors import RevisitError
from revisit.forward.attention import Call, watching
from revisit.models.parts import ModelParts


def prompt(family: str) -> dict[str, Tensor]:
    return dict(families.inputs(family, ["what", "and this then"], [[families.image(1)], [families.image(2)]]))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl", "qwen3_vl", "gemma3", "glm4v", "smolvlm"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_hooks_get_the_models_own_attention(family: str, kernel: str) -> None:
    model, _ = families.build(family)
    inputs = prompt(family)
    seen: dict[int, Tensor] = {}
    model.set_attn_implementation(kernel)
    try:
        with (
            torch.no_grad(),
            watching(ModelParts.of(model), lambda c: seen.update({c.layer: c.last_attention()}), "a test"),
        ):
            through = model(**inputs).logits
        assert model.config.get_text_config()._attn_implementation == kernel
        model.set_attn_implementation("eager")
        with torch.no_grad():
            output = model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(through[:, -1], output.logits[:, -1], atol=1e-4, rtol=1e-4)  # padding may differ
    for layer, weights in enumerate(output.attentions):
        torch.testing.assert_close(seen[layer], weights[:, :, -1], atol=1e-5, rtol=1e-4)  # in every head


def test_hooks_ignore_other_threads_which_may_end_first() -> None:
    model, _ = families.build("llava")
    inputs, parts = prompt("llava"), ModelParts.of(model)
    mine: list[int] = []
    theirs: list[int] = []

    def elsewhere() -> None:
        with torch.no_grad(), watching(parts, lambda call: theirs.append(call.layer), "another test"):
            model(**inputs)

    with torch.no_grad(), watching(parts, lambda call: mine.append(call.layer), "a test"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert mine == []
        model(**inputs)
    assert mine == theirs == [0, 1, 2, 3]
    assert model.config.text_config._attn_implementation == "sdpa"


def test_an_unknown_kernel_raises_and_leaves_the_other_layers_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.build("llava")
    decoder = model.model.language_model
    config = copy.deepcopy(decoder.config)
    config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(decoder.layers[1].self_attn, "config", config)
    with (
        pytest.raises(RevisitError, match="load the model with attn_implementation='sdpa' or 'eager'"),
        watching(ModelParts.of(model), lambda call: None, "SID"),
    ):
        pass
    assert decoder.config._attn_implementation == "sdpa"


def test_columns_need_the_whole_prompt() -> None:
    key = torch.zeros(1, 1, 5, 2)
    call = Call(0, torch.zeros(1, 1, 1, 2), key, key, None, 1.0, None)
    mask = torch.tensor([[True, False, True]])
    assert call.columns(mask).tolist() == [[True, False, True, False, False]]
    with pytest.raises(RevisitError, match="sliding window"):
        call.columns(mask.repeat(1, 2))
