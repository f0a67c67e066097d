"""Tiny random models that vLLM can serve (it does not support the head sizes of those in `families`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import families

TEXT = {**families.TEXT, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
TEXT["head_dim"] = 32
TOWER = {**families.TABLE["bases"]["tower"], "hidden_size": 64, "intermediate_size": 64}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
SMALL = {"size": {"height": 28, "width": 28}}
CROPPED = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c is string %}{{ c }}{% elif c['type'] == 'text' %}"
    "{{ c['text'] }}{% else %}PLACE{% endif %}{% endfor %}{% endfor %}"
)


def llava(text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.LlavaConfig(
        vision_config=CLIP,
        text_config={"model_type": "llama", **text},
        image_token_id=families.token_id("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
    )
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(**CROPPED, do_center_crop=True),
        families.tokenizer(),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def llava_next(text: dict[str, Any]) -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        vision_config=CLIP,
        text_config={"model_type": "llama", **text},
        image_token_id=families.token_id("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_grid_pinpoints=pinpoints,
    )
    processor = transformers.LlavaNextProcessor(
        transformers.LlavaNextImageProcessor(**CROPPED, image_grid_pinpoints=pinpoints),
        families.tokenizer(),
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def llava_onevision(text: dict[str, Any]) -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaOnevisionConfig(
        vision_config=SIGLIP,
        text_config={"model_type": "qwen2", **text},
        image_token_id=families.token_id("<image>"),
        video_token_id=families.token_id("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    processor = transformers.LlavaOnevisionProcessor(
        transformers.LlavaOnevisionImageProcessor(**SMALL, image_grid_pinpoints=pinpoints),
        families.tokenizer(),
        transformers.LlavaOnevisionVideoProcessor(**SMALL),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


def _qwen(name: str, text: dict[str, Any], vision: dict[str, Any], processor: str) -> tuple[Any, Any]:
    """Build a model of a Qwen family, named by the start of its classes."""
    patches = {"patch_size": 7, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    rope |= {"mrope_interleaved": True} if "3" in name else {}
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "rope_parameters": {**rope, **text.get("rotary", {})}},
        vision_config={
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
            **{"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2},
            **vision,
        },
        tie_word_embeddings=False,
        **families.with_ids(families.TABLE["bases"]["qwen_ids"]),
    )
    images = transformers.Qwen2VLImageProcessor(**patches, size=size)
    videos = getattr(transformers, f"{processor.replace('2_5_', '2')}VideoProcessor")(**patches, size=size)
    made = getattr(transformers, f"{processor}Processor")(images, families.tokenizer(), videos)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), made


def qwen2_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    return _qwen("Qwen2VL", text, {"embed_dim": 64, "mlp_ratio": 2}, "Qwen2VL")


def qwen2_5_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    return _qwen("Qwen2_5_VL", text, {"window_size": 28, "fullatt_block_indexes": [1]}, "Qwen2_5_VL")


DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
# Three of four layers are linear attention; the fourth is not.
LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "rotary": {"partial_rotary_factor": 1.0},
}


def qwen3_vl(text: dict[str, Any]) -> tuple[Any, Any]:
    return _qwen("Qwen3VL", text, DEEPSTACK, "Qwen3VL")


def qwen3_5(text: dict[str, Any]) -> tuple[Any, Any]:
    return _qwen("Qwen3_5", {**text, **LINEAR}, {"num_position_embeddings": 64}, "Qwen3VL")


# Four experts, of which a token takes two, by the names that configurations have for them.
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
QWEN_EXPERTS = {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}


def qwen3_vl_moe(text: dict[str, Any]) -> tuple[Any, Any]:
    return _qwen("Qwen3VLMoe", {**text, **QWEN_EXPERTS}, DEEPSTACK, "Qwen3VL")


def qwen3_5_moe(text: dict[str, Any]) -> tuple[Any, Any]:
    text = {**text, **LINEAR, **QWEN_EXPERTS, "shared_expert_intermediate_size": 32}
    return _qwen("Qwen3_5Moe", text, {"num_position_embeddings": 64}, "Qwen3VL")


def _glm(name: str, text: dict[str, Any]) -> tuple[Any, Any]:
    """Build a model of a GLM-4.xV family, named by the start of its classes."""
    patches = {"patch_size": 7, "merge_size": 2, "temporal_patch_size": 2}
    size = {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 56 * 56}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "partial_rotary_factor": 1.0}
    config = getattr(transformers, f"{name}Config")(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            **{"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64},
            **{"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 56},
        },
        tie_word_embeddings=False,
        **families.with_ids(families.TABLE["bases"]["glm_ids"]),
    )
    images = transformers.Glm4vImageProcessor(**patches, size=size)
    videos = transformers.Glm4vVideoProcessor(**patches, size=size)
    processor = transformers.Glm4vProcessor(images, families.tokenizer(), videos)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), processor


def glm4v(text: dict[str, Any]) -> tuple[Any, Any]:
    return _glm("Glm4v", text)


def glm4v_moe(text: dict[str, Any]) -> tuple[Any, Any]:
    return _glm("Glm4vMoe", {**text, **EXPERTS, "n_routed_experts": 4, "use_qk_norm": False})


def internvl(text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.InternVLConfig(
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        text_config={"model_type": "qwen3", **text},  # as InternVL 3.5 has it
        image_token_id=families.token_id("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    tokenizer = families.tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    images = transformers.GotOcr2ImageProcessor(**SMALL, crop_to_patches=True, min_patches=1, max_patches=4)
    videos = transformers.InternVLVideoProcessor(**SMALL)
    processor = transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=4)
    return transformers.InternVLForConditionalGeneration(config), processor


SPLIT = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def _split(name: str, text: dict[str, Any]) -> Any:
    """Build a model of an Idefics 3 family, named by the start of its classes."""
    config = getattr(transformers, f"{name}Config")(
        vision_config=TOWER,
        text_config={"model_type": "llama", **text},
        image_token_id=families.token_id("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def idefics3(text: dict[str, Any]) -> tuple[Any, Any]:
    images = transformers.Idefics3ImageProcessor(**SPLIT)
    return _split("Idefics3", text), transformers.Idefics3Processor(images, families.tokenizer(), image_seq_len=4)


def smolvlm(text: dict[str, Any]) -> tuple[Any, Any]:
    images, videos = transformers.SmolVLMImageProcessor(**SPLIT), transformers.SmolVLMVideoProcessor(**SPLIT)
    return _split("SmolVLM", text), transformers.SmolVLMProcessor(images, families.tokenizer(), videos, image_seq_len=4)


def minicpmv4_6(text: dict[str, Any]) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    config = transformers.MiniCPMV4_6Config(
        vision_config=TOWER,
        text_config={
            "model_type": "qwen3_5_text",
            **{**text, **LINEAR},
            "rope_parameters": {**rope, "partial_rotary_factor": 1.0},
        },
        insert_layer_id=0,
        image_token_id=families.token_id("<|image_pad|>"),
        video_token_id=families.token_id("<|video_pad|>"),
        tie_word_embeddings=False,
    )
    tokenizer = families.tokenizer(
        **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        **{"image_start_token": "<image>", "image_end_token": "</image>"},
        **{"slice_start_token": "<slice>", "slice_end_token": "</slice>"},
        **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
    )
    sizes = {"patch_size": 7, "scale_resolution": 56}
    images = transformers.MiniCPMV4_6ImageProcessor(**sizes, max_slice_nums=4)
    processor = transformers.MiniCPMV4_6Processor(images, transformers.MiniCPMV4_6VideoProcessor(**sizes), tokenizer)
    return transformers.MiniCPMV4_6ForConditionalGeneration(config), processor


def mistral3(text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.Mistral3Config(
        vision_config={"model_type": "pixtral", **TOWER, "image_size": 56, "head_dim": 32},
        text_config={"model_type": "mistral", **text, "sliding_window": None},
        image_token_id=families.token_id("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    images = transformers.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=7)
    processor = transformers.PixtralProcessor(images, families.tokenizer(), patch_size=7, spatial_merge_size=2)
    return transformers.Mistral3ForConditionalGeneration(config), processor


def gemma3(text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        vision_config=SIGLIP,
        text_config={
            **{key: value for key, value in text.items() if key != "rope_parameters"},
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        mm_tokens_per_image=4,
        image_token_id=families.token_id("<image_soft_token>"),
        boi_token_id=families.token_id("<start_of_image>"),
        eoi_token_id=families.token_id("<end_of_image>"),
        tie_word_embeddings=False,
    )
    tokenizer = families.tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])  # each of these is one token, on which vLLM relies
    processor = transformers.Gemma3Processor(transformers.Gemma3ImageProcessor(**SMALL), tokenizer, image_seq_length=4)
    return transformers.Gemma3ForConditionalGeneration(config), processor


def gemma4(text: dict[str, Any]) -> tuple[Any, Any]:
    config = transformers.Gemma4Config(
        text_config={
            **{key: value for key, value in text.items() if key != "rope_parameters"},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 512,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": families.VOCAB,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 30.0,
        },
        vision_config={
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32},
            **{"num_attention_heads": 2, "num_key_value_heads": 2},
            **{"patch_size": 7, "pooling_kernel_size": 2, "position_embedding_size": 64},
            "default_output_length": 70,
        },
        audio_config=None,
        image_token_id=families.token_id("<|image|>"),
        video_token_id=families.token_id("<|video|>"),
        audio_token_id=families.token_id("<|begin_of_video|>"),  # there is no audio here
        boi_token_id=families.token_id("<|begin_of_image|>"),
        eoi_token_id=families.token_id("<|end_of_image|>"),
        tie_word_embeddings=False,
    )
    tokenizer = families.tokenizer(
        boi_token="<|begin_of_image|>",
        eoi_token="<|end_of_image|>",
        image_token="<|image|>",
        audio_token="<|begin_of_video|>",
        boa_token="<|begin_of_video|>",
        eoa_token="<|end_of_video|>",
    )
    patches = {"patch_size": 7, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    images, videos = transformers.Gemma4ImageProcessor(**patches), transformers.Gemma4VideoProcessor(**patches)
    processor = transformers.Gemma4Processor(transformers.Gemma4AudioFeatureExtractor(), images, tokenizer, videos)
    return transformers.Gemma4ForConditionalGeneration(config), processor


_QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
_GLM_PLACE = "<|begin_of_image|><|image|><|end_of_image|>"
# How each family's prompt marks one image.
PLACE = {
    "llava": "<image>",
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "qwen2_vl": _QWEN_PLACE,
    "qwen2_5_vl": _QWEN_PLACE,
    "qwen3_vl": _QWEN_PLACE,
    "qwen3_vl_moe": _QWEN_PLACE,
    "qwen3_5": _QWEN_PLACE,
    "qwen3_5_moe": _QWEN_PLACE,
    "glm4v": _GLM_PLACE,
    "glm4v_moe": _GLM_PLACE,
    "internvl": "<IMG_CONTEXT>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "minicpmv4_6": "<|image_pad|>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
    "mistral3": "[IMG]",
}


def build(family: str, **text: Any) -> tuple[Any, Any]:
    """Build a seeded model and its processor, with logits spread over several nats."""
    torch.manual_seed(0)
    model, processor = globals()[family]({**TEXT, **text})
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
                if not parameter.any():
                    parameter.normal_(0, 0.3)  # Gemma's projector starts at zero: images would not matter at all
        model.get_output_embeddings().weight.normal_(0, 0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    processor.chat_template = TEMPLATE.replace("PLACE", PLACE[family] + "\n")
    return model, processor


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
