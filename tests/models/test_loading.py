"""Loading from a folder: safe defaults, images without torchvision, clear refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import families
import revisit
from revisit import ReVisiT, RevisitError
from revisit.models.loading import load_processor
from revisit.models.prompts import answers, prepare

TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def save(family: str, folder: Path) -> Path:
    """A model folder as the hub has it, processor included, written without saving the processor object itself."""
    model, processor = families.build(family)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    own = {"processor_class": type(processor).__name__}
    for name in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens", "image_seq_length"):
        if isinstance(getattr(processor, name, None), (int, str)):
            own[name] = getattr(processor, name)
    for name in ("image_seq_len", "num_image_tokens"):
        if hasattr(processor, name):
            own[name] = getattr(processor, name)
    (folder / "processor_config.json").write_text(json.dumps(own))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", families.PLACEHOLDER[family]))
    return folder


@pytest.mark.parametrize(
    "family", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision", "smolvlm", "glm4v"]
)
def test_load_and_decode_a_batch(family: str, tmp_path: Path) -> None:
    model, processor = revisit.load(save(family, tmp_path))
    assert model.dtype == torch.float32
    assert processor.tokenizer.padding_side == "left"
    pictures = [[families.picture(0, (40, 32))], [families.picture(1, (30, 30))]]
    inputs = prepare(processor, ["what is it?", "hi"], pictures)
    out = revisit.generate(model, **inputs, method=ReVisiT(), max_new_tokens=4, do_sample=False)
    assert len(answers(processor, out, inputs)) == 2
    original, _ = families.build(family)
    same = revisit.generate(original, **inputs, method=ReVisiT(), max_new_tokens=4, do_sample=False)
    assert out.tolist() == same.tolist()


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_an_images_only_processor_is_never_saved_incomplete(tmp_path: Path) -> None:
    processor = load_processor(save("qwen2_vl", tmp_path))
    with pytest.raises(RevisitError, match="torchvision"):
        processor.save_pretrained(tmp_path / "again")


def test_clear_refusals(tmp_path: Path) -> None:
    with pytest.raises(RevisitError, match="neither a local folder nor a hub id"):
        revisit.load("nobody/has-this-model")
    with pytest.raises(RevisitError, match=r"no config\.json"):
        revisit.load(tmp_path)
    import transformers

    transformers.LlamaForCausalLM(transformers.LlamaConfig(**families.TEXT)).save_pretrained(tmp_path / "text")
    with pytest.raises(RevisitError, match="takes no images"):
        revisit.load(tmp_path / "text")


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    folder = save("llava", tmp_path)
    weights = folder / "model.safetensors"
    torch.save({}, folder / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(RevisitError, match="safetensors"):
        revisit.load(folder)


def test_half_precision_does_not_overflow_into_a_wrong_choice(tmp_path: Path) -> None:
    """States that overflow float16 when projected must still give finite scores."""
    model, processor = revisit.load(save("llava", tmp_path), dtype=torch.float16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(200)
        model.get_decoder().norm.weight.mul_(0.005)  # the model's own logits stay as they were
    inputs: Any = prepare(processor, ["hi"], [[families.picture(0)]])
    inputs["pixel_values"] = inputs["pixel_values"].half()
    for method in (ReVisiT(alpha=1e-2, layers="all"), ReVisiT.official(alpha=1e-2, layers="all")):
        out = revisit.generate(
            model,
            **inputs,
            method=method,
            max_new_tokens=3,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for scores in out.scores:
            assert not scores.isnan().any()
            assert torch.isfinite(scores.max())
