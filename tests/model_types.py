"""Every model type that transformers maps to image-text-to-text, as a tiny random model or configuration.

`families` has the types that pass the whole suite with their real processors. The others are here, with inputs written by
hand: `DECODED` are decoded, `REFUSED` cannot be.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from revisit.models.families import PIXELS
from revisit.models.parts import ModelParts

IMAGE, VIDEO, AUDIO = 3, 4, 5  # token ids
VOCAB = 64
WIDTH = 32
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MROPE = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
PIXTRAL = {"model_type": "pixtral", "head_dim": 8, **TOWER}
MERGED: dict[str, Any] = {  # the vision side of Qwen-VL and those that follow it: 4 × 4 patches become 4 tokens
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": WIDTH,
}
SAM: dict[str, Any] = {
    **TOWER,
    "output_channels": 8,
    "global_attn_indexes": [1],
    "window_size": 2,
    "image_size": 32,
    "mlp_dim": 24,
}
LAYERS_TO_AUDIO: dict[str, Any] = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 8,
    "d_model": 8,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@dataclass
class Tiny:
    """A tiny model of a type: its configuration, its vision tokens in one row, and the inputs of one row besides the text."""

    config: dict[str, Any]
    tokens: int
    inputs: dict[str, Any] = field(default_factory=lambda: {"pixel_values": noise(1, 3, 8, 8)})
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # tokens before and after the image
    needs: str = ""  # a package that the tests do not install
    since: str = "5.19"  # the version of transformers from which on this configuration and these inputs are its


def packed(patches: int = 16, pixels: int = 3 * 2 * 4 * 4, grid: tuple[int, int, int] = (1, 4, 4)) -> dict[str, Any]:
    """Pixels as Qwen-VL's processors pack them."""
    return {"pixel_values": noise(patches, pixels), "image_grid_thw": torch.tensor([grid])}


QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 6, "vision_end_token_id": 7}
GLM_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": 6, "image_end_token_id": 7}
GLM_IDS |= {"video_start_token_id": 8, "video_end_token_id": 9}
PLAIN: dict[str, Any] = {"image_token_id": IMAGE, "tie_word_embeddings": False}


# Types that `tests/families.py` does not build. Each says its configuration, how many vision tokens a row has, and its inputs.
DECODED: dict[str, Tiny] = {
    "aria": Tiny(
        {
            "vision_config": TOWER,
            "text_config": {**TEXT, **EXPERTS, "moe_num_experts": 2, "moe_topk": 1},
            "image_token_index": IMAGE,
            "projector_patch_to_query_dict": {4: 2},
        },
        2,
        since="5.22",
    ),
    "chameleon": Tiny(
        {
            **TEXT,
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 4,
                "latent_channels": 4,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
            },
            "vocabulary_map": {"<image>": IMAGE, "IMGIMGAZ": 10, "IMGIMGBZ": 11, "IMGIMGCZ": 12, "IMGIMGDZ": 13},
        },
        16,
    ),
    "cohere2_vision": Tiny(
        {
            "vision_config": SIGLIP,
            "text_config": {"model_type": "cohere2", **TEXT, "sliding_window": 64, "logit_scale": 0.25},
            "alignment_intermediate_size": 16,
            **PLAIN,
        },
        1,
    ),
    "cohere_compass": Tiny(
        {
            "vision_config": {**MERGED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": {
                **MROPE,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "sliding_attention": MROPE["rope_parameters"],
                    "full_attention": MROPE["rope_parameters"],
                },
            },
            **QWEN_IDS,
        },
        4,
        packed(),
    ),
    "cosmos3_edge": Tiny(
        {
            "vision_config": {**TOWER, "num_patches": 16},
            "text_config": MROPE,
            "projector_hidden_size": 16,
            **QWEN_IDS,
        },
        4,
        packed(pixels=3 * 4 * 4),
    ),
    "cosmos3_omni": Tiny(
        {
            "vision_config": {**MERGED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": MROPE,
            **QWEN_IDS,
        },
        4,
        packed(),
    ),
    "deepseek_ocr2": Tiny(
        {
            "vision_config": {
                "sam_config": {
                    **TOWER,
                    "output_channels": 8,
                    "downsample_channels": [8, 16],
                    "global_attn_indexes": [1],
                    "window_size": 2,
                    "image_size": 64,
                },
                "encoder_config": {**TEXT, "hidden_size": 16, "num_key_value_heads": 4},
            },
            "text_config": {
                **TEXT,
                **EXPERTS,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "mlp_layer_types": ["dense", "sparse"],
            },
            **PLAIN,
        },
        145,
        {"pixel_values": noise(1, 3, 64, 64)},
    ),
    "deepseek_vl_hybrid": Tiny(
        {
            "vision_config": SIGLIP,
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                **TOWER,
                "output_channels": 8,
                "image_size": 32,
                "global_attn_indexes": [1],
                "window_size": 2,
            },
            "text_config": {"model_type": "llama", **TEXT},
            **PLAIN,
        },
        4,
        {"pixel_values": noise(1, 3, 8, 8), "high_res_pixel_values": noise(1, 3, 32, 32)},
    ),
    "dots3_note": Tiny(
        {
            "vision_config": {
                **TOWER,
                "adapter_in_dim": 16,
                "adapter_out_dim": WIDTH,
                "mlp_layer_types": ["dense", "sparse"],
                "moe_intermediate_size": 8,
                "num_local_experts": 4,
            },
            "audio_config": {
                **TOWER,
                "adapter_input_size": 16,
                "adapter_out_dim": WIDTH,
                "downsample_hidden_size": 8,
                "feature_size": 8,
            },
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
                **EXPERTS,
                "num_key_value_heads": 4,
                "layer_types": ["indexed_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse"],
                "n_routed_experts": 4,
                "shared_experts_intermediate_size": 8,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 8,
                "index_topk": 8,
                "index_head_dim": 8,
                "index_n_heads": 2,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 4,
                "swa_q_lora_rank": 8,
                "swa_kv_lora_rank": 8,
                "swa_head_dim": 8,
                "swa_qk_nope_head_dim": 4,
                "swa_v_head_dim": 8,
            },
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
        },
        4,
        packed(pixels=3 * 4 * 4),
    ),
    "emu3": Tiny(
        {
            "vq_config": {
                "codebook_size": 8,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "hidden_size": 32,
                "temporal_downsample_factor": 1,
                "attn_resolutions": [],
            },
            "text_config": TEXT,
            "vocabulary_map": {
                "<image>": IMAGE,
                **{f"<|visual token {n:06}|>": 10 + n for n in range(8)},
                "<|extra_200|>": 20,
            },
        },
        4 * 5,
        {"pixel_values": noise(1, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])},
    ),
    "ernie4_5_vl_moe": Tiny(
        {
            "vision_config": {
                key: value for key, value in MERGED.items() if key not in ("temporal_patch_size", "out_hidden_size")
            },
            "text_config": {
                **MROPE,
                "mlp_layer_types": ["dense", "sparse"],
                "moe_intermediate_size": [8, 8],
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_num_shared_experts": 1,
            },
            **GLM_IDS,
        },
        4,
        packed(pixels=3 * 4 * 4),
    ),
    "exaone4_5": Tiny(
        {
            "vision_config": {**MERGED, "num_key_value_heads": 2, "fullatt_block_indexes": [1], "window_size": 8},
            "text_config": {"model_type": "exaone4", **TEXT},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        4,
        packed(),
    ),
    "fast_vlm": Tiny(
        {
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "fastvit_mci0",
                "do_pooling": True,
                "global_pool": "avg",
                "hidden_size": 1024,
                "initializer_range": 0.02,
                "model_args": {"inference_mode": True},
            },
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_index": IMAGE,
        },
        4,
        {"pixel_values": noise(1, 3, 64, 64)},
        needs="timm",
    ),
    "fuyu": Tiny(
        {
            "text_config": {"model_type": "persimmon", **TEXT, "num_key_value_heads": 4},
            "image_size": 8,
            "patch_size": 4,
            **PLAIN,
        },
        4,
        {"pixel_values": noise(1, 4, 3 * 4 * 4)},
        since="5.22",
    ),
    "gemma3n": Tiny(
        {
            "vision_config": {
                "architecture": "test_efficientnet",
                "hidden_size": 256,
                "vocab_size": 4,
                "vocab_offset": VOCAB - 8,
            },
            "audio_config": {
                "hidden_size": 16,
                "conf_num_hidden_layers": 1,
                "vocab_offset": VOCAB - 4,
                "vocab_size": 4,
            },
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
                "altup_num_inputs": 2,
                "laurel_rank": 4,
                "activation_sparsity_pattern": [0.0] * 4,
            },
            "vision_soft_tokens_per_image": 4,
            **PLAIN,
        },
        4,
        {"pixel_values": noise(1, 3, 64, 64)},
        needs="timm",
    ),
    "gemma4_unified": Tiny(
        {
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 16,
                "mm_posemb_size": 16,
                "output_proj_dims": 16,
            },
            "text_config": {
                **{k: v for k, v in TEXT.items() if k != "rope_parameters"},
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 8,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
            "tie_word_embeddings": False,
        },
        4,
        {
            "pixel_values": noise(1, 4, 3 * 8 * 8),
            "image_position_ids": torch.tensor([[[x, y] for y in range(2) for x in range(2)]]),
        },
    ),
    "glm5_next": Tiny(
        {
            "vision_config": {**MERGED, "image_size": 16, "projection_intermediate_size": 16},
            "text_config": {
                **TEXT,
                **EXPERTS,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "mlp_layer_types": ["dense", "sparse"],
                "layer_types": ["linear_attention", "full_attention"],
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "linear_conv_kernel_dim": 2,
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "v_head_dim": 8,
                "qk_nope_head_dim": 8,
                "index_topk": 8,
                "index_head_dim": 8,
                "index_n_heads": 2,
                "index_kpool": 2,
            },
            **GLM_IDS,
        },
        4,
        packed(),
    ),
    "glm_ocr": Tiny({"vision_config": {**MERGED, "image_size": 16}, "text_config": MROPE, **GLM_IDS}, 4, packed()),
    "glmga": Tiny({"vision_config": {**MERGED, "image_size": 16}, "text_config": MROPE, **GLM_IDS}, 4, packed()),
    "got_ocr2": Tiny(
        {
            "vision_config": SAM,
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_index": IMAGE,
        },
        4,
        {"pixel_values": noise(1, 3, 32, 32)},
    ),
    "granite4_vision": Tiny(
        {
            "vision_config": {**CLIP, "image_size": 16, "hidden_size": 64},
            "text_config": {"model_type": "granite4_vision_text", **TEXT, "logits_scaling": 4.0},
            "qformer_config": {"intermediate_size": 24},
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 16]],
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[1, 0]],
        },
        4 + 2 * 3,
        {"pixel_values": noise(1, 2, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])},
        since="5.22",
    ),
    "granite_docling": Tiny(
        {
            "vision_config": {
                **TOWER,
                "image_size": 16,
                "out_hidden_size": WIDTH,
                "scale_factor": 2,
                "deepstack_visual_indexes": [0],
            },
            "text_config": {**TEXT, "logits_scaling": 4.0},
            **PLAIN,
        },
        2 * 4,
        {
            "pixel_values": noise(1, 3, 3, 16, 16),
            "pixel_attention_mask": torch.tensor([[True, True, False]]),
        },
    ),
    "hunyuan_vl": Tiny(
        {
            "vision_config": {
                **TOWER,
                "out_hidden_size": WIDTH,
                "text_hidden_size": WIDTH,
                "spatial_merge_size": 2,
                "max_image_size": 16,
                "min_image_size": 8,
            },
            "text_config": {
                **TEXT,
                "num_key_value_heads": 4,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]},
            },
            **PLAIN,
        },
        2 * 3 + 2,
        packed(pixels=3 * 4 * 4),
    ),
    "hyperclovax_vision_v2": Tiny(
        {
            "vision_config": {**MERGED, "fullatt_block_indexes": [1], "window_size": 8},
            "text_config": {"model_type": "hyperclovax", **TEXT},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "tie_word_embeddings": False,
        },
        4,
        packed(),
    ),
    "idefics2": Tiny(
        {
            "vision_config": TOWER,
            "perceiver_config": {
                "hidden_size": WIDTH,
                "resampler_n_latents": 2,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "num_key_value_heads": 1,
                "resampler_head_dim": 8,
            },
            "text_config": {"model_type": "mistral", **TEXT},
            **PLAIN,
        },
        2,
        {"pixel_values": noise(1, 1, 3, 8, 8)},
    ),
    "inkling2": Tiny(
        {
            "vision_config": {
                **TOWER,
                "text_hidden_size": WIDTH,
                "posemb_grid_size": 4,
                "projection_hidden_dim": 16,
            },
            "text_config": {
                **TEXT,
                **EXPERTS,
                "unpadded_vocab_size": VOCAB - 4,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 8,
                "num_hidden_layers": 3,
                "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
                "n_layers_per_attn_res_block": 2,
                "n_routed_experts": 4,
                "d_rel": 4,
                "rel_extent": 8,
            },
            "image_token_id": IMAGE,
        },
        4,
        {"pixel_values": noise(4, 8, 8, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])},
    ),
    "inkling_mm_model": Tiny(
        {
            "vision_config": {
                "text_hidden_size": WIDTH,
                "patch_size": 5,
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "text_config": {
                **TEXT,
                **EXPERTS,
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "swa_head_dim": 8,
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "logits_mup_width_multiplier": 4.0,
                "d_rel": 4,
                "rel_extent": 8,
            },
            "audio_config": {"text_hidden_size": WIDTH, "n_mel_bins": 4, "mel_vocab_size": 8},
            "image_token_id": IMAGE,
            "audio_token_id": AUDIO,
            "image_bos_token_id": 6,
            "audio_bos_token_id": 7,
        },
        4,
        {"pixel_values": noise(4, 2, 5, 5, 3)},
    ),
    "janus": Tiny(
        {
            "vision_config": {**TOWER, "projection_dim": WIDTH, "num_image_tokens": 4},
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 8,
                "latent_channels": 4,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": WIDTH,
                "image_token_embed_dim": WIDTH,
                "num_patches": 4,
            },
            "text_config": {"model_type": "llama", **TEXT},
            **PLAIN,
        },
        4,
    ),
    "kimi_k25": Tiny(
        {
            "vision_config": {
                **TOWER,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "pos_emb_time": 2,
                "merge_kernel_size": [2, 2],
            },
            "text_config": {"model_type": "llama", **TEXT},
            "projection_hidden_size": 16,
            **QWEN_IDS,
        },
        4,
        {"pixel_values": noise(16, 3, 4, 4), "image_grid_thw": torch.tensor([[1, 4, 4]])},
    ),
    "lfm2_vl": Tiny(
        {
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "vision_use_head": False,
                **TOWER,
                "num_patches": 16,
            },
            "text_config": {"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
            "projector_hidden_size": 16,
            **PLAIN,
        },
        4,
        {
            "pixel_values": noise(1, 16, 3 * 4 * 4),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
            "spatial_shapes": torch.tensor([[4, 4]]),
        },
    ),
    "lfm3_vl": Tiny(
        {
            "vision_config": {
                **{key: value for key, value in TOWER.items() if key != "image_size"},
                "num_key_value_heads": 1,
                "layer_types": ["conv", "full_attention"],
            },
            "text_config": {
                **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
                "model_type": "lfm3",
                "num_hidden_layers": 3,
                "layer_types": ["conv", "sliding_attention", "full_attention"],
            },
            "projector_hidden_size": 16,
            **QWEN_IDS,
            "tie_word_embeddings": False,
        },
        4,
        packed(),
    ),
    "lighton_ocr": Tiny(
        {"vision_config": PIXTRAL, "text_config": {"model_type": "qwen3", **TEXT}, "spatial_merge_size": 2, **PLAIN},
        1,
        {"pixel_values": noise(1, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])},
    ),
    "llama4": Tiny(
        {
            "vision_config": {
                **TOWER,
                "intermediate_size": 64,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
            "text_config": {**TEXT, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 64},
            "image_token_index": IMAGE,
        },
        1,
    ),
    "llava_next_video": Tiny(
        {
            "vision_config": CLIP,
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_grid_pinpoints": [[8, 8]],
        },
        4 + 2 * 3,
        {"pixel_values": noise(1, 2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]])},
    ),
    "minicpmv4_6": Tiny(
        {
            "vision_config": TOWER,
            "text_config": {"model_type": "qwen3_5_text", **MROPE, **LINEAR},
            "insert_layer_id": 0,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        1,
        {"pixel_values": noise(1, 3, 4, 16 * 4), "target_sizes": torch.tensor([[4, 4]])},
    ),
    "minimax_m3_vl": Tiny(
        {
            "vision_config": {**TOWER, "temporal_patch_size": 2, "spatial_merge_size": 2, "image_size": 16},
            "text_config": {
                **TEXT,
                **EXPERTS,
                "num_local_experts": 4,
                "dense_intermediate_size": 16,
                "shared_intermediate_size": 8,
                "rotary_dim": 4,
                "index_n_heads": 2,
                "index_head_dim": 8,
                "index_block_size": 4,
            },
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "projector_hidden_size": 16,
        },
        4,
        packed(),
    ),
    "minicpm_ocr": Tiny(
        {
            "vision_config": TOWER,
            "text_config": {"model_type": "qwen3_5_text", **MROPE, **LINEAR},
            "insert_layer_id": 0,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "tie_word_embeddings": False,
        },
        4,
        {"pixel_values": noise(1, 3, 4, 16 * 4), "target_sizes": torch.tensor([[4, 4]])},
    ),
    "minicpmv4_7": Tiny(
        {
            "vision_config": TOWER,
            "text_config": {"model_type": "qwen3_5_text", **MROPE, **LINEAR},
            "insert_layer_id": 0,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_id": 6,
            "image_end_id": 7,
            "slice_start_id": 8,
            "slice_end_id": 9,
            "newline_id": 10,
        },
        1,
        {"pixel_values": noise(1, 3, 4, 16 * 4), "target_sizes": torch.tensor([[4, 4]])},
        around=((6,), (7,)),
    ),
    "mistral_large4": Tiny(
        {
            "vision_config": {**PIXTRAL, "image_size": 16},
            "text_config": {
                **TEXT,
                **EXPERTS,
                "n_routed_experts": 4,
                "num_key_value_heads": 4,
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 8,
                "index_topk": 8,
                "index_head_dim": 8,
                "index_n_heads": 2,
            },
            "image_token_index": IMAGE,
        },
        4,
        {"pixel_values": noise(1, 3, 16, 16), "image_sizes": torch.tensor([[16, 16]])},
    ),
    "molmo2": Tiny(
        {
            "vision_config": {
                **TOWER,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "image_size": [8, 8],
                "num_position_embeddings": 4,
            },
            "adapter_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "text_hidden_size": WIDTH,
                "vision_feature_layer": [-1],
            },
            "text_config": {**TEXT, "additional_vocab_size": 8},
            "image_patch_id": IMAGE,
        },
        1,
        {
            "pixel_values": noise(1, 4, 3 * 4 * 4),
            "image_token_pooling": torch.tensor([[0, 1, 2, 3]]),
            "image_grids": torch.tensor([[1, 1, 0, 0]]),
            "image_num_crops": torch.tensor([1]),
        },
    ),
    "muse_glimmer": Tiny(
        {
            "vision_config": {
                **TOWER,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "layer_types": ["window_attention", "full_attention"],
            },
            "text_config": {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": None},
            "out_hidden_size": 64,
            "projector_hidden_size": 16,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        4,
        packed(),
    ),
    "muse_spark": Tiny(
        {
            "vision_config": {
                **TOWER,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "layer_types": ["window_attention", "full_attention"],
            },
            "text_config": {
                **TEXT,
                **EXPERTS,
                "num_local_experts": 4,
                "moe_hidden_size": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": None,
            },
            "audio_config": {"hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1], "out_hidden_size": WIDTH},
            "out_hidden_size": 64,
            "projector_hidden_size": 16,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
        },
        4,
        packed(),
    ),
    "nemotron_h_omni": Tiny(
        {
            "vision_config": {"model_type": "radio", **TOWER, "image_size": 16, "video_temporal_patch_size": 2},
            "text_config": {
                "model_type": "nemotron_h",
                **TEXT,
                "layers_block_type": ["mamba", "attention"],
                "mamba_num_heads": 4,
                "mamba_head_dim": 8,
                "ssm_state_size": 8,
                "n_groups": 2,
                "conv_kernel": 2,
                "chunk_size": 8,
            },
            "audio_config": None,
            "projector_hidden_size": 16,
            "vision_hidden_size": 16,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        4,
        {"pixel_values": noise(16, 3 * 4 * 4), "image_grid_hw": torch.tensor([[4, 4]])},
    ),
    "paddleocr_vl": Tiny(
        {"vision_config": {**TOWER, "image_size": 16}, "text_config": MROPE, **QWEN_IDS, "tie_word_embeddings": False},
        4,
        {"pixel_values": noise(16, 3, 4, 4), "image_grid_thw": torch.tensor([[1, 4, 4]])},
    ),
    "perception_lm": Tiny(
        {
            "vision_config": {
                "model_type": "timm_wrapper",
                "architecture": "vit_pe_core_tiny_patch16_384",
                "model_args": {"embed_dim": 16, "img_size": [32, 32], "depth": 1, "num_heads": 2, "global_pool": ""},
                "hidden_size": 16,
            },
            "text_config": {"model_type": "llama", **TEXT},
            "vision_use_cls_token": True,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        4,
        {"pixel_values": noise(1, 1, 3, 32, 32)},
        needs="timm",
    ),
    "pp_chart2table": Tiny(
        {
            "vision_config": SAM,
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_index": IMAGE,
        },
        4,
        {"pixel_values": noise(1, 3, 32, 32)},
    ),
    "qianfan_ocr": Tiny(
        {
            "vision_config": {**TOWER, "image_size": [8, 8], "patch_size": [4, 4]},
            "text_config": {"model_type": "qwen3", **TEXT},
            "image_seq_length": 1,
            **PLAIN,
        },
        1,
    ),
    "qwen2_5_omni_thinker": Tiny(
        {
            "vision_config": {**MERGED, "fullatt_block_indexes": [1], "window_size": 8},
            "text_config": MROPE,
            "audio_config": {**LAYERS_TO_AUDIO, "num_mel_bins": 4, "output_dim": WIDTH},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_token_index": AUDIO,
            "vision_start_token_id": 6,
        },
        4,
        packed(),
    ),
    "qwen3_omni_moe_thinker": Tiny(
        {
            "vision_config": {**MERGED, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            "text_config": {**MROPE, **EXPERTS, "num_experts": 4},
            "audio_config": {**LAYERS_TO_AUDIO, "num_mel_bins": 8, "output_dim": WIDTH, "downsample_hidden_size": 8},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
            "vision_start_token_id": 6,
        },
        4,
        packed(),
    ),
    "qwen4_exp": Tiny(
        {
            "vision_config": {**MERGED, "num_position_embeddings": 16},
            "text_config": {
                **MROPE,
                **LINEAR,
                **EXPERTS,
                "num_experts": 4,
                "shared_expert_intermediate_size": 8,
                "hc_lowrank": 4,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 8,
                "indexer_budget": 8,
                "indexer_compress_ratio": 2,
            },
            **QWEN_IDS,
        },
        4,
        packed(),
    ),
    "shieldgemma2": Tiny(
        {
            "vision_config": SIGLIP,
            "text_config": {
                "model_type": "gemma3_text",
                **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": 6,
            "eoi_token_index": 7,
        },
        4,
    ),
    "step3p7": Tiny(
        {
            "vision_config": {**TOWER, "image_size": 16, "max_position_embeddings": 16},
            "text_config": {
                **TEXT,
                **EXPERTS,
                "n_routed_experts": 4,
                "share_expert_dim": 8,
                "layer_types": ["full_attention"] * 2,
                "sliding_window": 8,
            },
            "image_token_id": IMAGE,
        },
        1,
        {"pixel_values": noise(1, 3, 16, 16)},
    ),
    "unlimited_ocr": Tiny(
        {
            "vision_config": {
                "sam_config": {**SAM, "image_size": 64, "downsample_channels": [8, 16]},
                "encoder_config": {**TOWER, "image_size": 16},
            },
            "text_config": {**TEXT, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "num_key_value_heads": 4},
            **PLAIN,
        },
        4 * 5 + 1,
        {"pixel_values": noise(1, 3, 64, 64)},
    ),
    "video_llama_3": Tiny(
        {
            "vision_config": TOWER,
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        4,
        {**packed(pixels=3 * 4 * 4), "image_merge_sizes": torch.tensor([2])},
    ),
    "video_llava": Tiny(
        {
            "vision_config": CLIP,
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "image_seq_length": 4,
        },
        4,
        {"pixel_values": noise(1, 3, 8, 8)},
    ),
}


BLIP: dict[str, Any] = {
    "vision_config": TOWER,
    "qformer_config": {**TOWER, "encoder_hidden_size": 16, "vocab_size": VOCAB},
    "text_config": {"model_type": "opt", **TEXT, "ffn_dim": 48, "word_embed_proj_dim": WIDTH},
    "num_query_tokens": 2,
}
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BART: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
KOSMOS: dict[str, Any] = {"text_config": {"vocab_size": VOCAB, "embed_dim": 16, "layers": 1}, "vision_config": {}}

# Types that cannot be decoded: a tiny configuration, and the reason that users read.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "blip": ({"vision_config": TOWER, "text_config": SMALL}, "reads images by cross-attention"),
    "blip-2": ({**BLIP, "image_token_index": IMAGE}, "passes its prompt to a language model as embeddings"),
    "diffusion_gemma": ({"text_config": TEXT, "image_token_id": IMAGE}, "writes text by diffusion"),
    "evolla": ({**SMALL, "protein_encoder_config": SMALL}, "reads proteins, not images"),
    "florence2": ({"text_config": {"model_type": "bart", **BART}, "image_token_id": IMAGE}, "encoder–decoder"),
    "git": ({**SMALL, "vision_config": TOWER}, "puts the image before the text without a token for it"),
    "idefics": (SMALL, "reads images by cross-attention"),
    "instructblip": ({**BLIP, "image_token_index": IMAGE}, "passes its prompt to a language model as embeddings"),
    "instructblipvideo": ({**BLIP, "video_token_index": VIDEO}, "passes its prompt to a language model as embeddings"),
    "kosmos-2": (KOSMOS, "marks the image in its prompt by an input of its own"),
    "kosmos-2.5": (KOSMOS, "marks the image in its prompt by an input of its own"),
    "mistral4": ({**TEXT, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}, "is a text-only model"),
    "mllama": (
        {"text_config": {**TEXT, "cross_attention_layers": [1]}, "vision_config": {}, "image_token_index": IMAGE},
        "reads images by cross-attention",
    ),
    "pi0": ({}, "writes a robot's actions"),
    "pix2struct": ({"text_config": {"vocab_size": VOCAB}, "vision_config": {}}, "encoder–decoder"),
    "pp_formulanet": ({}, "encoder–decoder"),
    "t5gemma2": ({}, "encoder–decoder"),
    "udop": ({"vocab_size": VOCAB, "d_model": 16, "num_layers": 1}, "encoder–decoder"),
    "vision-encoder-decoder": (
        {"encoder": {"model_type": "vit", **TOWER}, "decoder": {"model_type": "gpt2", "n_layer": 1}},
        "encoder–decoder",
    ),
}


@functools.cache
def build(model_type: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tiny random model of a type, and the inputs of one row; cached, so leave them as you found them."""
    tiny = DECODED[model_type]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**tiny.config)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        ModelParts.of(model).head.module.weight.normal_(0, 0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    before, after = tiny.around
    row = torch.tensor([[1, *before, *[IMAGE] * tiny.tokens, *after, 30, 31, 32]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), **tiny.inputs}
    pixels = next((name for name in PIXELS if name in inspect.signature(model.forward).parameters), "pixel_values")
    inputs[pixels] = inputs.pop("pixel_values")  # by its name in this version of transformers
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (row == IMAGE).long()
    return model, inputs
