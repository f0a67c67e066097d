"""The tiny random models of `families` with sizes that vLLM supports, and with the processors of torchvision."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file

import families

# Settings that replace those of `families`, where a configuration has them.
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 2,
    "use_bidirectional_attention": None,
}
TOWER = {"hidden_size": 64, "intermediate_size": 64, "embed_dim": 64, "out_hidden_size": 64, "head_dim": 32}
# Settings that only one family needs.
MORE = {
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
    "qwen3_5_moe": {"text_config": {"norm_topk_prob": True}},
    "glm4v_moe": {"text_config": {"use_qk_norm": False}},
    "gemma4": {"vision_config": {"default_output_length": 70}},
}
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c is string %}{{ c }}{% elif c['type'] == 'text' %}"
    "{{ c['text'] }}{% else %}PLACE{% endif %}{% endfor %}{% endfor %}"
)
# The start of the name of each family's video processor, if it has one.
VIDEOS = {
    **{"llava": None, "llava_next": None, "llava_onevision": "LlavaOnevision", "qwen2_vl": "Qwen2VL"},
    **{"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VL", "qwen3_5": "Qwen3VL"},
    **{"qwen3_5_moe": "Qwen3VL", "glm4v": "Glm4v", "glm4v_moe": "Glm4v", "internvl": "InternVL", "idefics3": None},
    **{"smolvlm": "SmolVLM", "minicpmv4_6": None, "gemma3": None, "gemma4": "Gemma4", "mistral3": None},
}
SHARED = (
    "size",
    "patch_size",
    "merge_size",
    "temporal_patch_size",
    "max_image_size",
    "pooling_kernel_size",
    "max_soft_tokens",
)
PLACE = {family: families.PLACEHOLDER[family].rstrip() for family in VIDEOS}  # how a prompt marks one image


def entry_of(family: str, **text: Any) -> dict[str, Any]:
    """Return the family's entry of the table, enlarged, with processors of torchvision and these settings of the text model."""
    entry: dict[str, Any] = copy.deepcopy(families.TABLE["families"][family])
    config, images, more = entry["config"], entry["images"], MORE.get(family, {})
    config["tie_word_embeddings"] = False
    for name, values in (("text_config", TEXT), ("vision_config", TOWER)):
        part = config[name]
        part |= {key: value for key, value in values.items() if key in part} | more.get(name, {})
    config["text_config"] |= text
    rope = config["text_config"].get("rope_parameters", {})
    if "mrope_section" in rope:
        rope["mrope_section"] = [4, 6, 6]
        rope |= {"mrope_interleaved": True} if family.startswith(("qwen3", "minicpm")) else {}
    images["class"] = images["class"].removesuffix("Pil")
    if family.startswith("glm"):
        images["size"]["shortest_edge"] = 2 * 28 * 28
    if family == "mistral3":
        images["patch_size"] = 7
        entry["processor"] = {"class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2}
    if VIDEOS[family]:
        sizes = {name: images[name] for name in SHARED if name in images}
        entry["videos"] = {"class": f"{VIDEOS[family]}VideoProcessor", **sizes}
    return entry


def build(family: str, **text: Any) -> tuple[Any, Any]:
    """Build a seeded model and its processor, with logits spread over several nats and these settings of the text model."""
    torch.manual_seed(0)
    with patch.dict(families.TABLE["families"], {family: entry_of(family, **text)}):
        model, processor = families.make(family)
    if family == "gemma3":  # vLLM relies on each of these being one token
        processor.tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    processor.chat_template = TEMPLATE.replace("PLACE", PLACE[family] + "\n")
    return families.sharpen(model), processor


def save(model: Any, processor: Any, folder: Path) -> Path:
    """Save the checkpoint as vLLM reads it."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = dict(as_published(model.config.model_type, *item) for item in load_file(file).items())
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def save_draft(model: Any, processor: Any, folder: Path) -> Path:
    """Save the text model of a LLaVA model as one of its own, which drafts tokens without seeing the image."""
    draft = transformers.LlamaForCausalLM(model.config.text_config)
    draft.model.load_state_dict(model.model.language_model.state_dict())
    draft.lm_head.load_state_dict(model.lm_head.state_dict())
    draft.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return folder


def as_published(kind: str, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Rename and reshape a tensor as in published checkpoints, which predate transformers 5.19."""
    old = kind in ("llava", "llava_next", "llava_onevision", "gemma3")
    if old and "vision_tower." in name and "vision_model" not in name:
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
    if kind == "qwen3_vl_moe" and ".experts." in name:
        tensor = tensor.transpose(1, 2).contiguous()
    return name, tensor
