"""Tiny random LLaVA and Qwen2.5-VL that vLLM can serve (it refuses the head sizes of the even smaller test models)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import families

TEXT = {**families.TEXT, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
TEXT["head_dim"] = 32
TOWER = {**families.TOWER, "hidden_size": 64, "intermediate_size": 64}
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c is string %}{{ c }}{% elif c['type'] == 'text' %}"
    "{{ c['text'] }}{% else %}PLACE{% endif %}{% endfor %}{% endfor %}"
)
PLACE = {"llava": "<image>", "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>"}


def _llava(text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
        text_config={"model_type": "llama", **text},
        image_token_id=families.token_id("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, do_center_crop=True
    )
    processor = transformers.LlavaProcessor(
        images,
        families.tokenizer(),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def _qwen2_5_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
        **families._qwen_ids(),
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    images = transformers.Qwen2VLImageProcessor(patch_size=7, merge_size=2, temporal_patch_size=2, size=size)
    videos = transformers.Qwen2VLVideoProcessor(patch_size=7, merge_size=2, temporal_patch_size=2, size=size)
    processor = transformers.Qwen2_5_VLProcessor(images, families.tokenizer(), videos)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def build(family: str, **text: Any) -> tuple[Any, Any]:
    """A seeded model and its processor, with logits spread over several nats."""
    torch.manual_seed(0)
    model, processor = {"llava": _llava, "qwen2_5_vl": _qwen2_5_vl}[family]({**TEXT, **text})
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        model.get_output_embeddings().weight.normal_(0, 0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    processor.chat_template = TEMPLATE.replace("PLACE", PLACE[family] + "\n")
    return model, processor


def save(model: Any, processor: Any, folder: Path) -> Path:
    """The checkpoint as vLLM reads it."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if model.config.model_type == "llava":  # vLLM wants the vision tower under the name it had before transformers 5.19
        file = folder / "model.safetensors"
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model.")
            if "vision_tower." in name and "vision_model" not in name
            else name: tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    return folder
