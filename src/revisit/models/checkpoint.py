"""Is a checkpoint whole? What transformers and safetensors do not check themselves."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError

INDEX = "model.safetensors.index.json"
MAX_COUNT = 100_000  # layers or labels: each gets memory of its own before any weight is read


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder; raises RevisitError if there is none."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RevisitError(f"{str(path)!r} is damaged: it is not JSON ({brief(error)}); get a complete copy.") from None
    if not isinstance(value, dict):
        raise RevisitError(f"{str(path)!r} is damaged: it must be a JSON object.")
    return value


def check_counts(name: str, config: dict[str, Any]) -> None:
    """Refuses numbers of layers and labels that no model has, before anything of that size is built, and a layer that is not there."""
    for part in (config, config.get("text_config"), config.get("vision_config")):
        for field in ("num_hidden_layers", "num_layers", "depth", "num_labels"):
            value = part.get(field) if isinstance(part, dict) else None
            if value is not None and (type(value) is not int or not 0 <= value <= MAX_COUNT):
                raise RevisitError(f"The config.json of {name!r} is damaged: {field} is {str(value)[:40]!r}.")
    tower = config.get("vision_config")
    depth = tower.get("num_hidden_layers") if isinstance(tower, dict) else None
    layers = config.get("vision_feature_layer")
    for layer in layers if isinstance(layers, list) else [layers]:
        if type(layer) is int and type(depth) is int and not -depth - 1 <= layer <= depth:
            raise RevisitError(
                f"The config.json of {name!r} is damaged: its vision tower has {depth} layers, and vision_feature_layer is {layer}."
            )


def check_index(index: Path) -> None:
    """Refuses an index that names anything but safetensors files of its own folder."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise RevisitError(f"{str(index)!r} is damaged: its weight_map must map tensors to files.")
    for file in files.values():
        if not file.endswith(".safetensors") or file != Path(file).name or "\\" in file:
            raise RevisitError(
                f"{str(index)!r} names {file[:200]!r}: only .safetensors files in its own folder are allowed."
            )


def brief(error: BaseException) -> str:
    """An error in one line of bounded length, for a sentence."""
    return textwrap.shorten(str(error) or type(error).__name__, 500, placeholder="…")
