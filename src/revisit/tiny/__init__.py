"""The embedded model: a small vision-language model with its scenes, its training and its weights."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder of the embedded model, which any transformers program can load."""
    from revisit.errors import RevisitError

    folder = Path(__file__).parent / "weights"
    if not (folder / "model.safetensors").is_file():
        raise RevisitError(f"The embedded model is missing from {folder}; install revisit-decoding again.")
    return folder
