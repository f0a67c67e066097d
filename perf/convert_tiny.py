"""Write the embedded model `tiny` for mlx-vlm or llama.cpp, in float32.

python perf/convert_tiny.py mlx FOLDER          # a folder for mlx_vlm.load
python perf/convert_tiny.py llama-cpp FOLDER    # tiny.gguf and mmproj.gguf
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import revisit

if TYPE_CHECKING:
    import gguf

SOURCE = Path(revisit.__file__).parent / "embedded" / "weights" / "tiny"
# The model's own template; llama-cpp-python replaces images by text parts.
TEMPLATE = (
    "{{ '<s><|user|>' }}{% for part in messages[0]['content'] %}{{ part['text'] }}{% endfor %}{{ '<|assistant|>' }}"
)
Weights = dict[str, NDArray[np.float32]]


def read_weights() -> Weights:
    return {name: value.astype(np.float32) for name, value in load_file(SOURCE / "model.safetensors").items()}


def write_mlx(folder: Path) -> Path:
    """Copy the model with its weights in float32, in which mlx-vlm then computes."""
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    save_file(read_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf(folder: Path, head: str = "F32") -> tuple[Path, Path]:
    """Write the language model and the image encoder with the names that llama.cpp reads; the LM head in the named type."""
    config, weights = json.loads((SOURCE / "config.json").read_text()), read_weights()
    folder.mkdir(parents=True, exist_ok=True)
    language, encoder = folder / "tiny.gguf", folder / "mmproj.gguf"
    _write_language(language, config["text_config"], weights, head)
    _write_encoder(encoder, config["vision_config"], config["text_config"]["hidden_size"], weights)
    return language, encoder


def _write_language(path: Path, config: dict[str, Any], weights: Weights, head: str) -> None:
    import gguf

    out, kind = gguf.GGUFWriter(path, "llama"), gguf.GGMLQuantizationType[head]
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    _add_tokenizer(out)

    prefix, heads = "language_model.model.", config["num_attention_heads"]
    embedding = weights[f"{prefix}embed_tokens.weight"]
    out.add_tensor("token_embd.weight", embedding)
    out.add_tensor("output.weight", gguf.quantize(embedding, kind), raw_dtype=kind)
    out.add_tensor("output_norm.weight", weights[f"{prefix}norm.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(config["num_hidden_layers"]):
        for new, old in names.items():
            value = weights[f"{prefix}layers.{layer}.{old}.weight"]
            if new in ("attn_q", "attn_k"):  # llama.cpp rotates neighboring pairs, transformers two halves
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            out.add_tensor(f"blk.{layer}.{new}.weight", np.ascontiguousarray(value))
    _finish(out)


def _add_tokenizer(out: gguf.GGUFWriter) -> None:
    from gguf import TokenType

    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = {
        **tokenizer["model"]["vocab"],
        **{token["content"]: token["id"] for token in tokenizer["added_tokens"]},
    }
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    kinds = (TokenType.NORMAL, TokenType.CONTROL)
    out.add_token_types([kinds[vocabulary[token] in special] for token in tokens])
    out.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_add_bos_token(False)  # the template has it
    out.add_chat_template(TEMPLATE)


def _write_encoder(path: Path, config: dict[str, Any], width: int, weights: Weights) -> None:
    import gguf

    out = gguf.GGUFWriter(path, "clip")
    out.add_clip_has_vision_encoder(True)
    out.add_clip_projector_type("mlp")
    out.add_vision_image_size(config["image_size"])
    out.add_vision_patch_size(config["patch_size"])
    out.add_vision_embedding_length(config["hidden_size"])
    out.add_vision_feed_forward_length(config["intermediate_size"])
    out.add_vision_head_count(config["num_attention_heads"])
    out.add_vision_projection_dim(width)
    out.add_vision_attention_layernorm_eps(config["layer_norm_eps"])
    processor = json.loads((SOURCE / "processor_config.json").read_text())["image_processor"]
    out.add_vision_image_mean(processor["image_mean"])
    out.add_vision_image_std(processor["image_std"])
    layers = config["num_hidden_layers"]
    out.add_vision_block_count(layers + 1)  # llama.cpp leaves out the last block of LLaVA's encoder

    tower = "vision_tower.vision_model."
    out.add_tensor("v.class_embd", weights[f"{tower}embeddings.class_embedding"])
    out.add_tensor("v.patch_embd.weight", weights[f"{tower}embeddings.patch_embedding.weight"])
    out.add_tensor("v.position_embd.weight", weights[f"{tower}embeddings.position_embedding.weight"])
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_out": "self_attn.out_proj",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
    for kind in ("weight", "bias"):
        out.add_tensor(f"v.pre_ln.{kind}", weights[f"{tower}pre_layrnorm.{kind}"])
        out.add_tensor(f"mm.0.{kind}", weights[f"multi_modal_projector.linear_1.{kind}"])
        out.add_tensor(f"mm.2.{kind}", weights[f"multi_modal_projector.linear_2.{kind}"])
        for layer in range(layers + 1):
            for new, old in names.items():
                value = weights[f"{tower}encoder.layers.{min(layer, layers - 1)}.{old}.{kind}"]
                out.add_tensor(f"v.blk.{layer}.{new}.{kind}", value)
    _finish(out)


def _finish(out: gguf.GGUFWriter) -> None:
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    engine, target = sys.argv[1], Path(sys.argv[2])
    print(*({"mlx": lambda: [write_mlx(target)], "llama-cpp": lambda: write_gguf(target)}[engine]()), sep="\n")
