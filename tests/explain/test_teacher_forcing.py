"""Teacher forcing reproduces the distributions of decoding, with and without the image."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import families
from revisit.explain.prefill import force
from revisit.forward.states import forced_inputs
from revisit.models.parts import ModelParts
from revisit.paper.study import without_vision

FAMILIES = ["llava", "qwen2_5_vl", "internvl", "gemma3"]


def prompt_inputs(family: str) -> dict[str, Any]:
    return dict(families.inputs(family, ["what is it?"], [[families.image(1, (40, 32))]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_logits_equal_those_of_decoding(family: str) -> None:
    model, _ = families.build(family)
    parts = ModelParts.of(model)
    inputs = prompt_inputs(family)
    suppressed = list(parts.vision_ids)  # a random model would write image tokens now and then
    out = model.generate(
        **inputs,
        suppress_tokens=suppressed,
        max_new_tokens=7,
        min_new_tokens=7,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    forced = force(model, prompt_inputs(family), [tokens])[0]
    assert len(forced.text) == len(tokens)
    logits = forced.head.all_logits(forced.text)
    expected = torch.cat(out.logits)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    ids = torch.tensor([5, 100, 17])
    torch.testing.assert_close(forced.head.logits(forced.text, ids), expected[:, ids], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_vision_equals_a_text_prompt(family: str) -> None:
    model, _ = families.build(family)
    parts = ModelParts.of(model)
    inputs = prompt_inputs(family)
    tokens = [60, 61, 62, 63]
    states = force(model, without_vision(inputs, parts.vision_ids), [tokens])[0].text
    ids = inputs["input_ids"][0]
    kept = ids[~torch.isin(ids, torch.tensor(parts.vision_ids))]
    assert 0 < len(kept) < len(ids)
    whole = torch.cat([kept, torch.tensor(tokens[:-1])])[None]  # the same tokens as a plain text prompt
    extra = {name: torch.zeros_like(whole) for name in ("token_type_ids", "mm_token_type_ids") if name in inputs}
    with torch.inference_mode():
        plain = model(input_ids=whole, attention_mask=torch.ones_like(whole), **extra, output_hidden_states=True)
    torch.testing.assert_close(states, plain.hidden_states[-1][0, len(kept) - 1 :], atol=1e-4, rtol=1e-4)
    with_image = force(model, prompt_inputs(family), [tokens])[0].text
    assert not torch.allclose(states, with_image, atol=1e-2)


def test_inputs_grow_by_the_caption_and_lose_the_image() -> None:
    ids = torch.tensor([[1, 9, 9, 4]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": ids * 0 + 2,
        "pixel_values": ids[0],
    }
    longer = forced_inputs(inputs, [[7, 8]])
    assert longer["input_ids"].tolist() == [[1, 9, 9, 4, 7, 8]]
    assert longer["attention_mask"].tolist() == [[1] * 6]
    assert longer["token_type_ids"].tolist() == [[2, 2, 2, 2, 0, 0]]
    assert without_vision(inputs, [9]).keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert without_vision(inputs, [9])["input_ids"].tolist() == [[1, 4]]

    ids = torch.tensor([[0, 9, 4], [9, 9, 4]])  # shorter texts are padded on the right and masked
    longer = forced_inputs({"input_ids": ids, "attention_mask": (ids != 0).long()}, [[7], [7, 8]])
    assert longer["input_ids"].tolist() == [[0, 9, 4, 7, 4], [9, 9, 4, 7, 8]]
    assert longer["attention_mask"].tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
