"""Checks of a checkpoint's small files that transformers and safetensors do not make."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError

INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a model folder."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RevisitError(f"{str(path)!r} is not valid JSON ({brief(error)}); get a complete copy.") from None
    if not isinstance(value, dict):
        raise RevisitError(f"{str(path)!r} must contain a JSON object.")
    return value


def check_index(index: Path) -> None:
    """Raise RevisitError for an index that names anything but safetensors files in its own folder."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise RevisitError(f"{str(index)!r} is damaged: its weight_map must map tensor names to files.")
    for file in files.values():
        if not file.endswith(".safetensors") or file != Path(file).name or "\\" in file:
            raise RevisitError(
                f"{str(index)!r} names {file[:200]!r}: only .safetensors files in its own folder are allowed."
            )


def brief(error: BaseException) -> str:
    """Shorten an error to one line for a message."""
    return textwrap.shorten(str(error) or type(error).__name__, 500, placeholder="…")
