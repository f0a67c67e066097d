"""The processor of a model is passed or found, so that a model decodes alike however it was loaded."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import families
import revisit
from revisit import CODE, ICD, M3ID, PAI, RITUAL, RevisitError

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": families.VOCAB + 1}
STRONG = {
    "ritual": RITUAL(alpha=3.0, transform="colors"),
    "m3id": M3ID(decay=1.0, start=1),
    "pai": PAI.guidance(gamma=3.0),
    "icd": ICD(place="image"),
    "code": CODE(description_tokens=3),
}


def scores(model: Any, family: str, method: Any, **more: Any) -> torch.Tensor:
    inputs = families.inputs(family, ["what is it"], [[families.image(1)]])
    settings = {**OPTIONS, "output_scores": True, "return_dict_in_generate": True}
    return torch.stack(revisit.generate(model, **inputs, method=method, **settings, **more).scores)


@pytest.mark.parametrize("name", STRONG)
@pytest.mark.parametrize(
    "family", ["internvl", "gemma3"]
)  # other normalizations than CLIP's, and tokens around the image
def test_a_model_of_plain_transformers_decodes_like_a_loaded_one(family: str, name: str, tmp_path: Path) -> None:
    folder = families.save(family, tmp_path)
    plain: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    loaded, processor = revisit.load(folder)
    want = scores(loaded, family, STRONG[name])
    assert torch.equal(scores(plain, family, STRONG[name]), want)
    in_memory, _ = families.build(family)
    torch.testing.assert_close(scores(in_memory, family, STRONG[name], processor=processor), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", STRONG)
def test_a_missing_processor_raises(name: str) -> None:
    model, _ = families.build("internvl")
    with pytest.raises(
        RevisitError, match=r"needs the model's processor, .*: pass processor=processor to generate"
    ) as raised:
        scores(model, "internvl", STRONG[name])
    assert "\n" not in str(raised.value)


def test_a_family_with_unknown_image_boundaries_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = families.build("qwen2_vl")
    monkeypatch.setattr(type(model.config), "model_type", "no_such_family")
    for name in ("m3id", "pai", "icd", "code"):
        with pytest.raises(RevisitError, match="not declared for this model family"):
            scores(model, "qwen2_vl", STRONG[name], processor=processor)


def test_nothing_keeps_a_dropped_model_or_processor_alive() -> None:
    model, processor = revisit.load("tiny")
    inputs = revisit.prepare(processor, "what?", families.image(1))
    for method in ("revisit", *STRONG.values()):
        revisit.generate(model, **inputs, method=method, max_new_tokens=2)
    left = weakref.ref(model), weakref.ref(processor), weakref.ref(processor.tokenizer)
    del model, processor, inputs
    gc.collect()
    assert [ref() for ref in left] == [None, None, None]
