"""Tiny random models of every supported family, with real processors, built without files.

`build(family)` returns (model, processor); everything is seeded, float32 and small enough to decode in milliseconds.
The logits are sharpened so that plausible sets are neither one token nor the whole vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from revisit.models.processors import images_only

SPECIAL = ["<pad>", "<s>", "</s>", "<image>", "<video>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|image|>", "<|video|>"]
SPECIAL += ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
SPECIAL += ["<img>", "</img>", "<IMG_CONTEXT>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
SPECIAL += ["<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
SPECIAL += ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"]
SPECIAL += [f"TILE_{i}" for i in range(1, 13)]
SPECIAL += [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
# Behind the alphabet, so that models whose outputs are recorded keep their token ids.
ADDED = [
    "<|audio|>",
    "<|image>",
    "<image|>",
    "<IMG_START>",
    "<IMG_ATOM>",
    "<IMG_GRID>",
    "<IMG_COL>",
    "<IMG_ROW>",
    "<IMG_END>",
]
ADDED += [
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    "<|patch|>",
    "<|tile_x_separator|>",
    "<|tile_y_separator|>",
]
ADDED += [f"<|img_row_{r}_col_{c}|>" for r in range(1, 5) for c in range(1, 5)]
ADDED += [
    "<im_patch>",
    "<im_col>",
    "<im_start>",
    "<low_res_im_start>",
    "<im_end>",
    "<frame_start>",
    "<frame_end>",
    "<im_low>",
]
ADDED += ["<slice>", "</slice>", "<image_id>", "</image_id>", "</image>"]
ADDED += ["<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"]
VOCAB = 512


def tokenizer(**named: str) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with the special tokens of all families' processors."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *ADDED])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([*SPECIAL, *ADDED])
    tok = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=named,
        padding_side="left",
    )
    assert len(tok) <= VOCAB
    return tok


def token_id(token: str) -> int:
    alphabet = len(pre_tokenizers.ByteLevel.alphabet())
    return SPECIAL.index(token) if token in SPECIAL else len(SPECIAL) + alphabet + ADDED.index(token)


TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def _clip(image_token: str = "<image>") -> dict[str, Any]:
    return {
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
        "text_config": {"model_type": "llama", **TEXT},
        "image_token_id": token_id(image_token),
        "vision_feature_layer": -2,
        "image_seq_length": 16,
    }


def _clip_pil(**kwargs: Any) -> Any:
    return transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, do_center_crop=True, **kwargs
    )


def llava() -> tuple[Any, Any]:
    config = transformers.LlavaConfig(**_clip(), vision_feature_select_strategy="default")
    processor = transformers.LlavaProcessor(
        _clip_pil(), tokenizer(), patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def vipllava() -> tuple[Any, Any]:
    config = transformers.VipLlavaConfig(
        **{k: v for k, v in _clip().items() if k != "vision_feature_layer"}, vision_feature_layers=[-2, -1]
    )
    processor = transformers.LlavaProcessor(
        _clip_pil(), tokenizer(), patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return transformers.VipLlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        **_clip(), vision_feature_select_strategy="default", image_grid_pinpoints=pinpoints
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = transformers.LlavaNextProcessor(
        images, tokenizer(), patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return transformers.LlavaNextForConditionalGeneration(config), processor


def llava_onevision() -> tuple[Any, Any]:
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaOnevisionConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        text_config={"model_type": "qwen2", **TEXT},
        image_token_id=token_id("<image>"),
        video_token_id=token_id("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    processor = images_only(transformers.LlavaOnevisionProcessor)(
        images, tokenizer(), None, num_image_tokens=16, vision_feature_select_strategy="full"
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


def _qwen_ids() -> dict[str, int]:
    return {
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }


def _qwen_images(patch: int = 7) -> Any:
    return transformers.Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 56 * 56}
    )


def qwen2_vl() -> tuple[Any, Any]:
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        tie_word_embeddings=False,
        **_qwen_ids(),
    )
    processor = images_only(transformers.Qwen2VLProcessor)(_qwen_images(), tokenizer(), None)
    return transformers.Qwen2VLForConditionalGeneration(config), processor


def qwen2_5_vl(tied: bool = False) -> tuple[Any, Any]:
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE, "tie_word_embeddings": tied},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=tied,
        **_qwen_ids(),
    )
    processor = images_only(transformers.Qwen2_5_VLProcessor)(_qwen_images(), tokenizer(), None)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def qwen3_vl() -> tuple[Any, Any]:
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=False,
        **_qwen_ids(),
    )
    processor = images_only(transformers.Qwen3VLProcessor)(_qwen_images(), tokenizer(), None)
    return transformers.Qwen3VLForConditionalGeneration(config), processor


def internvl() -> tuple[Any, Any]:
    config = transformers.InternVLConfig(
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        text_config={"model_type": "qwen3", **TEXT},
        image_token_id=token_id("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
    )
    tok = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = images_only(transformers.InternVLProcessor)(images, tok, None, image_seq_length=4)
    return transformers.InternVLForConditionalGeneration(config), processor


def _idefics_parts() -> dict[str, Any]:
    return {
        "vision_config": {**TOWER, "image_size": 28},
        "text_config": {"model_type": "llama", **TEXT},
        "image_token_id": token_id("<image>"),
        "scale_factor": 2,
        "pad_token_id": 0,
    }


def idefics3() -> tuple[Any, Any]:
    config = transformers.Idefics3Config(**_idefics_parts())
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return transformers.Idefics3ForConditionalGeneration(config), transformers.Idefics3Processor(
        images, tokenizer(), image_seq_len=4
    )


def smolvlm() -> tuple[Any, Any]:
    config = transformers.SmolVLMConfig(**_idefics_parts())
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    processor = images_only(transformers.SmolVLMProcessor)(images, tokenizer(), None, image_seq_len=4)
    return transformers.SmolVLMForConditionalGeneration(config), processor


def paligemma() -> tuple[Any, Any]:
    config = transformers.PaliGemmaConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32, **TOWER},
        text_config={"model_type": "gemma", **TEXT},
        image_token_id=token_id("<image>"),
        projection_dim=32,
        hidden_size=32,
        tie_word_embeddings=False,
    )
    images = transformers.SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    tok = tokenizer(image_token="<image>")
    return transformers.PaliGemmaForConditionalGeneration(config), transformers.PaliGemmaProcessor(images, tok)


def gemma3() -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        text_config={
            **{k: v for k, v in TEXT.items() if k != "rope_parameters"},
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        mm_tokens_per_image=4,
        image_token_id=token_id("<image_soft_token>"),
        boi_token_id=token_id("<start_of_image>"),
        eoi_token_id=token_id("<end_of_image>"),
        tie_word_embeddings=False,
    )
    tok = tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    images = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    return transformers.Gemma3ForConditionalGeneration(config), transformers.Gemma3Processor(
        images, tok, image_seq_length=4
    )


class PixtralByHand:
    """Does what PixtralProcessor does to images and text; the class itself needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, patch: int) -> None:
        self.image_processor, self.tokenizer, self.patch = image_processor, tokenizer, patch

    def __call__(self, text: list[str], images: list[list[Image.Image]], **kwargs: Any) -> Any:
        flat = [image for own in images for image in own]
        out = self.image_processor(images=flat, return_tensors="pt")
        sizes = iter(out["image_sizes"].tolist() if hasattr(out["image_sizes"], "tolist") else out["image_sizes"])

        def grid(_match: re.Match[str]) -> str:
            height, width = next(sizes)
            return "[IMG_BREAK]".join(["[IMG]" * (width // self.patch)] * (height // self.patch)) + "[IMG_END]"

        texts = [re.sub(r"\[IMG\]", grid, prompt) for prompt in text]
        encoded = self.tokenizer(texts, padding=True, return_tensors="pt")
        encoded.update({"pixel_values": out["pixel_values"], "image_sizes": torch.as_tensor(out["image_sizes"])})
        return encoded


def mistral3() -> tuple[Any, Any]:
    config = transformers.Mistral3Config(
        vision_config={"model_type": "pixtral", **{**TOWER, "image_size": 56, "head_dim": 8}},
        text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
        image_token_id=token_id("[IMG]"),
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    images = transformers.PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=14)
    return transformers.Mistral3ForConditionalGeneration(config), PixtralByHand(images, tokenizer(), 14)


def aya_vision() -> tuple[Any, Any]:
    config = transformers.AyaVisionConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 512, "logit_scale": 0.25},
        image_token_id=token_id("<|IMG_PATCH|>"),
        downsample_factor=2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        adapter_layer_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    processor = transformers.AyaVisionProcessor(images, tokenizer(), patch_size=14, img_size=28, downsample_factor=1)
    return transformers.AyaVisionForConditionalGeneration(config), processor


def glm4v() -> tuple[Any, Any]:
    config = transformers.Glm4vConfig(
        text_config={**TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 7,
            "image_size": 56,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
        },
        image_token_id=token_id("<|image|>"),
        video_token_id=token_id("<|video|>"),
        image_start_token_id=token_id("<|begin_of_image|>"),
        image_end_token_id=token_id("<|end_of_image|>"),
        video_start_token_id=token_id("<|begin_of_video|>"),
        video_end_token_id=token_id("<|end_of_video|>"),
        tie_word_embeddings=False,
    )
    images = transformers.Glm4vImageProcessorPil(
        patch_size=7, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 2 * 56 * 56}
    )
    processor = images_only(transformers.Glm4vProcessor)(images, tokenizer(), None)
    return transformers.Glm4vForConditionalGeneration(config), processor


def _mrope(**more: Any) -> dict[str, Any]:
    return {**TEXT, "rope_parameters": {**MROPE, **more}}


# Four experts, of which a token takes two, by the names that configurations have for them.
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
GLM_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_routed_experts": 4}
LINEAR: dict[str, Any] = {  # three of four layers keep a recurrent state
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def _qwen3_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        **more,
    }


def qwen3_vl_moe() -> tuple[Any, Any]:
    config = transformers.Qwen3VLMoeConfig(
        text_config={**_mrope(), **EXPERTS},
        vision_config=_qwen3_vision(deepstack_visual_indexes=[0]),
        tie_word_embeddings=False,
        **_qwen_ids(),
    )
    processor = images_only(transformers.Qwen3VLProcessor)(_qwen_images(), tokenizer(), None)
    return transformers.Qwen3VLMoeForConditionalGeneration(config), processor


def qwen3_5() -> tuple[Any, Any]:
    config = transformers.Qwen3_5Config(
        text_config={**_mrope(partial_rotary_factor=1.0), **LINEAR},
        vision_config=_qwen3_vision(),
        tie_word_embeddings=False,
        **_qwen_ids(),
    )
    processor = images_only(transformers.Qwen3VLProcessor)(_qwen_images(), tokenizer(), None)
    return transformers.Qwen3_5ForConditionalGeneration(config), processor


def qwen3_5_moe() -> tuple[Any, Any]:
    config = transformers.Qwen3_5MoeConfig(
        text_config={
            **_mrope(partial_rotary_factor=1.0),
            **LINEAR,
            **EXPERTS,
            "shared_expert_intermediate_size": 16,
        },
        vision_config=_qwen3_vision(),
        tie_word_embeddings=False,
        **_qwen_ids(),
    )
    processor = images_only(transformers.Qwen3VLProcessor)(_qwen_images(), tokenizer(), None)
    return transformers.Qwen3_5MoeForConditionalGeneration(config), processor


def gemma4() -> tuple[Any, Any]:
    config = transformers.Gemma4Config(
        text_config={
            **{k: v for k, v in TEXT.items() if k != "rope_parameters"},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 512,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "num_kv_shared_layers": 2,
            "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision",
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 7,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        audio_config=None,
        image_token_id=token_id("<|image|>"),
        video_token_id=token_id("<|video|>"),
        audio_token_id=token_id("<|audio|>"),
        boi_token_id=token_id("<|image>"),
        eoi_token_id=token_id("<image|>"),
        tie_word_embeddings=False,
    )
    tok = tokenizer(
        boi_token="<|image>",
        eoi_token="<image|>",
        image_token="<|image|>",
        audio_token="<|audio|>",
        boa_token="<|image>",
        eoa_token="<image|>",
    )
    images = transformers.Gemma4ImageProcessorPil(patch_size=7, pooling_kernel_size=2, max_soft_tokens=70)
    features = transformers.Gemma4AudioFeatureExtractor()
    return transformers.Gemma4ForConditionalGeneration(config), images_only(transformers.Gemma4Processor)(
        features, images, tok, None
    )


def _glm_ids() -> dict[str, int]:
    return {
        "image_token_id": token_id("<|image|>"),
        "video_token_id": token_id("<|video|>"),
        "image_start_token_id": token_id("<|begin_of_image|>"),
        "image_end_token_id": token_id("<|end_of_image|>"),
        "video_start_token_id": token_id("<|begin_of_video|>"),
        "video_end_token_id": token_id("<|end_of_video|>"),
    }


def _glm_vision() -> dict[str, Any]:
    vision = _qwen3_vision(image_size=56)
    del vision["num_position_embeddings"]
    return vision


def glm4v_moe() -> tuple[Any, Any]:
    config = transformers.Glm4vMoeConfig(
        text_config={**_mrope(partial_rotary_factor=1.0), **GLM_EXPERTS},
        vision_config=_glm_vision(),
        tie_word_embeddings=False,
        **_glm_ids(),
    )
    return transformers.Glm4vMoeForConditionalGeneration(config), glm4v()[1]


def glm46v() -> tuple[Any, Any]:
    config = transformers.Glm46VConfig(
        text_config={"model_type": "glm4v_moe_text", **_mrope(partial_rotary_factor=1.0), **GLM_EXPERTS},
        vision_config={"model_type": "glm4v_moe_vision", **_glm_vision()},
        tie_word_embeddings=False,
        **_glm_ids(),
    )
    images = transformers.Glm46VImageProcessorPil(
        patch_size=7, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 28 * 28, "longest_edge": 2 * 56 * 56}
    )
    processor = images_only(transformers.Glm46VProcessor)(images, tokenizer(), None)
    return transformers.Glm46VForConditionalGeneration(config), processor


def ovis2() -> tuple[Any, Any]:
    config = transformers.Ovis2Config(
        vision_config={**TOWER, "hidden_stride": 2, "vocab_size": 64, "num_visual_indicator_tokens": 5},
        text_config={"model_type": "qwen2", **TEXT},
        image_token_id=token_id("<IMG_ATOM>"),
        visual_indicator_token_ids=[token_id(f"<IMG_{name}>") for name in ("START", "GRID", "COL", "ROW", "END")],
        vocab_size=VOCAB,
        hidden_size=32,
        tie_word_embeddings=False,
    )
    images = transformers.Ovis2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4)
    processor = transformers.Ovis2Processor(images, tokenizer(), image_seq_length=4)
    return transformers.Ovis2ForConditionalGeneration(config), processor


def deepseek_vl() -> tuple[Any, Any]:
    config = transformers.DeepseekVLConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        text_config={"model_type": "llama", **TEXT},
        image_token_id=token_id("<image>"),
        tie_word_embeddings=False,
    )
    images = transformers.DeepseekVLImageProcessorPil(size={"height": 28, "width": 28}, min_size=7)
    processor = transformers.DeepseekVLProcessor(images, tokenizer(image_token="<image>"), num_image_tokens=16)
    return transformers.DeepseekVLForConditionalGeneration(config), processor


# Families whose image processors need torchvision.


def cohere2_vision() -> tuple[Any, Any]:
    config = transformers.Cohere2VisionConfig(
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        text_config={"model_type": "cohere2", **TEXT, "sliding_window": 512, "logit_scale": 0.25},
        image_token_id=token_id("<|IMG_PATCH|>"),
        downsample_factor=2,
        alignment_intermediate_size=32,
        tie_word_embeddings=False,
    )
    tok = tokenizer(
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        image_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    images = transformers.Cohere2VisionImageProcessor(
        size={"height": 28, "width": 28}, patch_size=2, min_patches=1, max_patches=4
    )
    return transformers.Cohere2VisionForConditionalGeneration(config), transformers.Cohere2VisionProcessor(images, tok)


def lfm2_vl() -> tuple[Any, Any]:
    config = transformers.Lfm2VlConfig(
        vision_config={
            "model_type": "siglip2_vision_model",
            "vision_use_head": False,
            **{key: value for key, value in TOWER.items() if key != "image_size"},
            "num_patches": 16,
        },
        text_config={
            "model_type": "lfm2",
            **TEXT,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "conv_L_cache": 3,
        },
        image_token_id=token_id("<image>"),
        projector_hidden_size=16,
        downsample_factor=2,
        tie_word_embeddings=False,
    )
    images = transformers.Lfm2VlImageProcessor(
        encoder_patch_size=7,
        downsample_factor=2,
        tile_size=28,
        min_tiles=2,
        max_tiles=4,
        min_image_tokens=2,
        max_image_tokens=6,
    )
    return transformers.Lfm2VlForConditionalGeneration(config), transformers.Lfm2VlProcessor(images, tokenizer())


def llama4() -> tuple[Any, Any]:
    config = transformers.Llama4Config(
        vision_config={
            **TOWER,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        text_config={**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 512},
        image_token_index=token_id("<|patch|>"),
        boi_token_index=token_id("<|image_start|>"),
        eoi_token_index=token_id("<|image_end|>"),
        tie_word_embeddings=False,
    )
    images = transformers.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4)
    processor = transformers.Llama4Processor(images, tokenizer(), patch_size=7, pixel_shuffle_ratio=0.5)
    return transformers.Llama4ForConditionalGeneration(config), processor


def minicpmv4_6() -> tuple[Any, Any]:
    config = transformers.MiniCPMV4_6Config(
        vision_config=TOWER,
        text_config={"model_type": "qwen3_5_text", **_mrope(partial_rotary_factor=1.0), **LINEAR},
        insert_layer_id=0,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        tie_word_embeddings=False,
    )
    tok = tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    images = transformers.MiniCPMV4_6ImageProcessorPil(patch_size=7, scale_resolution=56, max_slice_nums=4)
    videos = transformers.MiniCPMV4_6VideoProcessor(patch_size=7, scale_resolution=56)
    processor = transformers.MiniCPMV4_6Processor(images, videos, tok)
    return transformers.MiniCPMV4_6ForConditionalGeneration(config), processor


def molmo2() -> tuple[Any, Any]:
    config = transformers.Molmo2Config(
        vision_config={
            **TOWER,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "image_size": [28, 28],
            "num_position_embeddings": 16,
        },
        adapter_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "text_hidden_size": 32,
            "vision_feature_layer": [-1],
        },
        text_config={**TEXT, "additional_vocab_size": 8},
        image_patch_id=token_id("<im_patch>"),
        image_start_token_id=token_id("<im_start>"),
        low_res_image_start_token_id=token_id("<low_res_im_start>"),
        image_end_token_id=token_id("<im_end>"),
        frame_start_token_id=token_id("<frame_start>"),
        frame_end_token_id=token_id("<frame_end>"),
        tie_word_embeddings=False,
    )
    images = transformers.Molmo2ImageProcessor(
        size={"height": 28, "width": 28}, patch_size=7, max_crops=4, overlap_margins=[1, 1], pooling_size=[2, 2]
    )
    videos = transformers.Molmo2VideoProcessor(size={"height": 28, "width": 28}, patch_size=7)
    return transformers.Molmo2ForConditionalGeneration(config), transformers.Molmo2Processor(
        images, videos, tokenizer()
    )


def perception_lm() -> tuple[Any, Any]:
    config = transformers.PerceptionLMConfig(
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 16, "img_size": [64, 64], "depth": 1, "num_heads": 2, "global_pool": ""},
            "hidden_size": 16,
        },
        text_config={"model_type": "llama", **TEXT},
        projector_pooling_ratio=2,
        image_token_id=token_id("<|image|>"),
        video_token_id=token_id("<|video|>"),
        tie_word_embeddings=False,
    )
    images = transformers.PerceptionLMImageProcessor(tile_size=64, max_num_tiles=1)  # it cannot batch different numbers
    videos = transformers.PerceptionLMVideoProcessor(size={"height": 64, "width": 64})
    tok = tokenizer(image_token="<|image|>", video_token="<|video|>")
    processor = transformers.PerceptionLMProcessor(videos, images, tok, patch_size=16, pooling_ratio=2)
    return transformers.PerceptionLMForConditionalGeneration(config), processor


def kimi_k25() -> tuple[Any, Any]:
    config = transformers.Kimi_K25Config(
        vision_config={
            **TOWER,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "pos_emb_time": 2,
            "merge_kernel_size": [2, 2],
        },
        text_config={
            "model_type": "deepseek_v3",
            **TEXT,
            **GLM_EXPERTS,
            "num_key_value_heads": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "head_dim": 4,
        },
        projection_hidden_size=16,
        image_token_id=token_id("<|media_pad|>"),
        video_token_id=token_id("<|video|>"),
        vision_start_token_id=token_id("<|media_begin|>"),
        vision_end_token_id=token_id("<|media_end|>"),
        tie_word_embeddings=False,
    )
    tok = tokenizer(image_token="<|media_pad|>", video_token="<|video|>")
    images = transformers.Kimi_K25ImageProcessor(
        patch_size=7, merge_size=2, max_patches=64, size={"max_height": 8, "max_width": 8}
    )
    videos = transformers.Kimi_K25VideoProcessor(patch_size=7, merge_size=2)
    return transformers.Kimi_K25ForConditionalGeneration(config), transformers.Kimi_K25Processor(
        image_processor=images, tokenizer=tok, video_processor=videos
    )


# How each family's prompt marks one image.
PLACEHOLDER = {
    "llava": "<image>\n",
    "vipllava": "<image>\n",
    "llava_next": "<image>\n",
    "llava_onevision": "<image>\n",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "internvl": "<IMG_CONTEXT>\n",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "paligemma": "<image>",
    "gemma3": "<start_of_image>",
    "mistral3": "[IMG]",
    "aya_vision": "<image>",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
    "qwen3_vl_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5_moe": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma4": "<|image|>",
    "glm4v_moe": "<|begin_of_image|><|image|><|end_of_image|>",
    "glm46v": "<|begin_of_image|><|image|><|end_of_image|>",
    "ovis2": "<image>",
    "deepseek_vl": "<image>",
}
TORCHVISION = {
    "cohere2_vision": "<|IMG_PATCH|>",
    "kimi_k25": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    "lfm2_vl": "<image>",
    "llama4": "<|image|>",
    "minicpmv4_6": "<|image_pad|>",
    "molmo2": "<|image|>",
    "perception_lm": "<|image|>",
}
PLACEHOLDER |= TORCHVISION
RECURRENT = ("lfm2_vl", "minicpmv4_6", "qwen3_5", "qwen3_5_moe")  # only some of their decoder layers attend
ALL = tuple(PLACEHOLDER)
if Version(transformers.__version__) < Version("5.22"):
    TORCHVISION["gemma4"] = PLACEHOLDER["gemma4"]  # older versions import torchvision with its processor
FAMILIES = ALL if importlib.util.find_spec("torchvision") else tuple(name for name in ALL if name not in TORCHVISION)


@functools.cache
def build(family: str, seed: int = 0) -> tuple[Any, Any]:
    """Build a tiny random model of the family and its processor; cached, so tests must not change them."""
    torch.manual_seed(seed)
    model, processor = globals()[family]()
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # with the default initialization, images hardly matter
                if not parameter.any():
                    parameter.normal_(0, 0.3)  # Gemma3's projector starts at zero: images would not matter
        model.get_output_embeddings().weight.normal_(0, 0.5)  # spreads the logits over several nats
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = 2
    model.generation_config.bos_token_id = 1
    return model, processor


def image(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    """Make an image of random coarse blocks, so that places differ."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


def inputs(family: str, prompts: list[str], images: list[list[Image.Image]]) -> Any:
    """Make left-padded inputs, each prompt after its own images."""
    _, processor = build(family)
    texts = [PLACEHOLDER[family] * len(own) + prompt for prompt, own in zip(prompts, images, strict=True)]
    made = processor(text=texts, images=[list(own) for own in images], padding=True, return_tensors="pt")
    return wide(made)


def wide(inputs: Any) -> Any:
    """Convert the pixels to float32; Llama 4's processor returns bfloat16."""
    inputs["pixel_values"] = inputs["pixel_values"].float()
    return inputs


TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}PLACE{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def save(family: str, folder: Path) -> Path:
    """Write a model folder as on the Hub, without the processor's own save_pretrained."""
    model, processor = build(family)
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
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", PLACEHOLDER[family]))
    return folder
