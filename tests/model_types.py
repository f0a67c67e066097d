"""Every model type that transformers maps to image-text-to-text, as a tiny random model or configuration.

`families` has the types that pass the whole suite with their real processors. The others are in model_types.yaml: `DECODED` are
decoded, with inputs written by hand; `UNSUPPORTED` raise an error.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import families
from revisit.models.families import PIXELS
from revisit.models.parts import ModelParts

IMAGE = 3  # token id
TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass
class Tiny:
    """A tiny model of a type: its configuration, its vision tokens in one row, and the other inputs of one row."""

    config: dict[str, Any]
    tokens: int
    inputs: dict[str, Any]
    around: tuple[list[int], list[int]] = ([], [])  # tokens before and after the image
    needs: str = ""  # a package that the tests do not install
    since: str = "5.19"  # the first version of transformers with this configuration and these inputs
    real: dict[str, Any] | None = None  # its processor, as in families.yaml, and the names of its special tokens' ids


def merged(node: Any) -> Any:
    """Merge the bases of a node of the table into it."""
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for base in node.get("base", ()):
        found |= merged(TABLE["bases"][base])
    for name in node.get("without", ()):
        del found[name]
    return found | {name: merged(value) for name, value in node.items() if name not in ("base", "without")}


def tensor(entry: Any) -> torch.Tensor:
    if isinstance(entry, dict):
        return torch.tensor(entry["values"])
    return torch.randn(*entry, generator=torch.Generator().manual_seed(1))


def tiny(entry: dict[str, Any]) -> Tiny:
    inputs = entry.get("inputs", {"pixel_values": [1, 3, 8, 8]})
    real = merged(entry.get("real"))
    made = {
        "config": merged(entry["config"]),
        "real": real,
        "inputs": {name: tensor(value) for name, value in inputs.items()},
    }
    return Tiny(**{**entry, **made})


DECODED = {name: tiny(entry) for name, entry in TABLE["decoded"].items()}
UNSUPPORTED = {name: (merged(entry["config"]), entry["reason"]) for name, entry in TABLE["unsupported"].items()}


def random_model(model_type: str, settings: dict[str, Any]) -> Any:
    """Build a tiny random model of a type."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
        ModelParts.of(model).head.weight.normal_(0, 0.5)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    return model


@functools.cache
def build(model_type: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Build a tiny random model of a type, and the inputs of one row; cached, so tests must not change them."""
    tiny = DECODED[model_type]
    model = random_model(model_type, tiny.config)
    before, after = tiny.around
    row = torch.tensor([[1, *before, *[IMAGE] * tiny.tokens, *after, 30, 31, 32]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), **tiny.inputs}
    pixels = next((name for name in PIXELS if name in inspect.signature(model.forward).parameters), "pixel_values")
    inputs[pixels] = inputs.pop("pixel_values")  # by its name in this version of transformers
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        inputs["mm_token_type_ids"] = (row == IMAGE).long()
    return model, inputs


def build_with_processor(model_type: str) -> tuple[Any, Any]:
    """Build a tiny random model with the token ids of its real processor, and what that makes of two prompts with an image each."""
    tiny = DECODED[model_type]
    assert tiny.real is not None
    ids = {name: families.token_id(token) for name, token in tiny.real["ids"].items()}
    text = {**tiny.config["text_config"], "vocab_size": families.VOCAB}
    processor = families.processor(tiny.real)
    texts = [tiny.real["place"] + prompt for prompt in ("what is it?", "hi")]
    images = [[families.image(0)], [families.image(1, (32, 48))]]
    inputs = processor(text=texts, images=images, padding=True, return_tensors="pt")
    return random_model(model_type, {**tiny.config, **ids, "text_config": text}), families.wide(inputs)
