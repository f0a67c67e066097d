"""A tiny random Qwen2.5-VL, four inputs, and the tokens of other implementations (tests/data/parity)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parent / "data" / "parity"


def rows(name: str) -> list[dict[str, Any]]:
    """Read the recorded rows: `revisit` of the published code, `dola` of the last DoLa in transformers."""
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def load() -> tuple[Any, list[dict[str, Any]]]:
    """Load the model in float32, and the inputs of the four cases."""
    import transformers

    config = transformers.Qwen2_5_VLConfig.from_dict(json.loads((FOLDER / "config.json").read_text("utf-8")))
    tensors = load_file(FOLDER / "tensors.safetensors")
    weights = {name.removeprefix("weights/"): t for name, t in tensors.items() if name.startswith("weights/")}
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32
    )
    cases = []
    for number in range(4):
        prefix = f"inputs/case{number}."
        inputs = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == config.image_token_id).int()
        cases.append(inputs)
    return model.eval(), cases
