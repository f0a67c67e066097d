"""A small random vision transformer in an ONNX file, with names as an export writes them."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from onnx import helper, numpy_helper
from transformers import Dinov2Config, Dinov2Model

EXPORTED = {
    "q_proj": "attention.query",
    "k_proj": "attention.key",
    "v_proj": "attention.value",
    "o_proj": "output.dense",
}


def write_tower(path: Path) -> Dinov2Model:
    """Write the file; the model that it holds."""
    torch.manual_seed(5)
    config = Dinov2Config(
        hidden_size=64, num_attention_heads=1, num_hidden_layers=2, patch_size=14, image_size=56, mlp_ratio=2
    )
    model = Dinov2Model(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    arrays, nodes = {}, []
    for name, value in model.state_dict().items():
        for new, old in EXPORTED.items():
            name = name.replace(f"attention.{new}", f"attention.{old}")
        if name.startswith("encoder.") and value.dim() == 2:  # a product that has taken its matrix over
            arrays[f"onnx::MatMul_{len(nodes)}"] = value.T.contiguous()
            product = f"/backbone/{name.removesuffix('.weight').replace('.', '/').replace('layer/', 'layer.')}/MatMul"
            nodes.append(helper.make_node("MatMul", ["x", f"onnx::MatMul_{len(nodes)}"], [product], name=product))
        elif name == "embeddings.position_embeddings":
            arrays["onnx::Concat_1"], arrays["onnx::Reshape_2"] = value[:, :1], value[:, 1:]
        elif name != "embeddings.mask_token":
            arrays[f"backbone.{name}"] = value
    arrays["decoder.weight"] = torch.ones(3, 3)
    tensors = [numpy_helper.from_array(value.numpy(), name) for name, value in arrays.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "tower", [], [], tensors)), path)
    return model
