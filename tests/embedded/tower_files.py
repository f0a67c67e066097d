"""A small random CLIP tower in an ONNX file with int8 matrices, named as in an export."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from onnx import helper, numpy_helper
from transformers import CLIPVisionConfig, CLIPVisionModel

from revisit.models.photo import PATCH, SIZE


def write_tower(path: Path) -> CLIPVisionModel:
    """Write the file; return its model."""
    torch.manual_seed(5)
    config = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=1,
        num_hidden_layers=3,
        image_size=SIZE,
        patch_size=PATCH,
    )
    model = CLIPVisionModel(config).eval()
    arrays, nodes = {"visual_projection_quantized": torch.ones(3, 3, dtype=torch.int8)}, []
    for name, value in model.state_dict().items():
        torch.nn.init.normal_(value, std=0.1)
        if name.startswith("encoder.") and value.dim() == 2:  # a matrix that the export moved into its product
            stem = f"onnx::MatMul_{len(nodes)}"
            scale, zero = value.abs().amax(1) / 100, torch.arange(len(value)).remainder(5).to(torch.int8)
            steps = (value / scale[:, None]).round()
            value.copy_(steps * scale[:, None])
            arrays[f"{stem}_quantized"] = (steps + zero[:, None]).to(torch.int8).T.contiguous()
            arrays[f"{stem}_scale"], arrays[f"{stem}_zero_point"] = scale, zero
            place = name.removesuffix(".weight").replace(".", "/").replace("layers/", "layers.")
            inputs = ["x", f"{stem}_quantized", "x_zero_point", f"{stem}_zero_point"]
            nodes.append(helper.make_node("MatMulInteger", inputs, [stem], name=f"/vision_model/{place}/MatMul_quant"))
        else:
            arrays[f"vision_model.{name}"] = value
    tensors = [numpy_helper.from_array(value.numpy(), name) for name, value in arrays.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "tower", [], [], tensors)), path)
    return model
