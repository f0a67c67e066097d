"""A random LLaVA with the depth, vision tokens and vocabulary of LLaVA-1.5-7B, on which released programs were recorded.

It is drawn from seed 0. The programs got projected features in place of an image; an image's pixel value says which.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

DATA = Path(__file__).parent / "data" / "released"
RECORDED: dict[str, Any] = json.loads((DATA / "llava.json").read_text("utf-8"))
PAD, IMAGE, VISION = 32000, 32001, 576


@functools.cache
def build() -> LlavaForConditionalGeneration:
    """Build the model; raise RuntimeError if its weights are not those of the recorded programs."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, projection_dim=32, image_size=336, patch_size=14
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=32064, hidden_size=64, intermediate_size=128, num_hidden_layers=32, num_attention_heads=4, rms_norm_eps=1e-5,
        max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=PAD,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=VISION)
    ).eval()
    head = model.lm_head.weight.data
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(4.0)
    model.get_input_embeddings().weight.data.normal_(0, 0.3)
    head.normal_(0, 0.5)
    head[2] = 0  # neither the end nor added tokens are chosen
    head[PAD:] = 0
    check_weights(model)
    features = load_file(DATA / "llava.safetensors")["features0"]

    def projected(pixel_values: torch.Tensor, **_: Any) -> Any:
        chosen = pixel_values[:, 0, 0, 0].round().long().tolist()
        return BaseModelOutputWithPooling(pooler_output=[features[number] for number in chosen])

    model.model.get_image_features = projected
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


def check_weights(model: Any) -> None:
    """Compare the weights of the decoder and the head with the checksum of the recorded ones."""
    state = model.state_dict()
    state = {
        name.split("language_model.")[-1]: value
        for name, value in state.items()
        if "language_model." in name or "lm_head" in name
    }
    names = sorted(state, key=lambda name: name if name.startswith("lm_head") else f"model.{name}")
    found = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in names)).hexdigest()
    if found != RECORDED["weights"]:
        raise RuntimeError("This version of torch draws other random numbers than the recorded ones.")


def inputs(before: list[int], after: list[int], image: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a prompt with one of the recorded images."""
    ids = torch.tensor([[*before, *[IMAGE] * VISION, *after]])
    pixels = torch.full((1, 3, 336, 336), float(image))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}
