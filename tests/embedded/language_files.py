"""A small random Llama in a GGUF file, with the embedded model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import revisit.embedded

# Special tokens of the embedded model's tokenizer -> those of SmolLM2.
RENAMED = {"<s>": "<|im_start|>", "</s>": "<|im_end|>", "<pad>": "<|endoftext|>", "<image>": "<jupyter_start>"}


def random_llama(vocabulary: int) -> LlamaForCausalLM:
    """Return a model with two layers, tied embeddings, and two query heads that share one key."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a query or key matrix in the order of GGUF files, which interleave the two halves of a rotation."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_language(path: Path) -> LlamaForCausalLM:
    """Write the file; return its model."""
    core = json.loads((revisit.embedded.path() / "tokenizer.json").read_text())
    vocabulary = {RENAMED.get(token, token): number for token, number in core["model"]["vocab"].items()}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(pair) for pair in core["model"]["merges"]]
    model = random_llama(len(tokens))
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(1024)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    special = set(RENAMED.values()) | {"<|user|>", "<|assistant|>"}
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(vocabulary["<|im_start|>"])
    writer.add_eos_token_id(vocabulary["<|im_end|>"])
    writer.add_pad_token_id(vocabulary["<|im_end|>"])
    writer.add_unk_token_id(vocabulary["<|endoftext|>"])
    _add_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_weights(writer: gguf.GGUFWriter, model: LlamaForCausalLM) -> None:
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.model.state_dict(prefix="model.").items():
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(
            name.removesuffix("_proj.weight")[-1]
        )
        value = weight.numpy() if "self_attn" not in name or heads is None else _interleaved(weight.numpy(), heads)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(value))
