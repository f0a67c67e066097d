"""Generated scenes as evaluation data, built once into the cache folder and named by what made them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from revisit.errors import RevisitError, unknown

SPLITS = ("usual", "unusual")


def cache_folder() -> Path:
    """Where generated data is kept: $REVISIT_CACHE, else revisit/ below $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("REVISIT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "revisit"


def parse_scenes(text: str) -> tuple[str, int, int]:
    """(split, number of pictures, seed) of `scenes[:split[:n[:seed]]]`."""
    parts = text.split(":")[1:]
    split = parts[0] if parts and parts[0] else "unusual"
    if split not in SPLITS:
        raise unknown("split of scenes", split, SPLITS)
    try:
        n = int(parts[1]) if len(parts) > 1 else 100
        seed = int(parts[2]) if len(parts) > 2 else 0
    except ValueError as error:
        raise RevisitError(
            f"Scenes are named scenes:SPLIT:NUMBER:SEED, for example scenes:unusual:200:0, not {text!r}."
        ) from error
    if n < 1 or len(parts) > 3:
        raise RevisitError(
            f"Scenes are named scenes:SPLIT:NUMBER:SEED, for example scenes:unusual:200:0, not {text!r}."
        )
    return split, n, seed


def scene_folder(text: str) -> Path:
    """The folder of the scenes `text` names; built on first use, whole or not at all."""
    from revisit.tiny.build import build

    split, n, seed = parse_scenes(text)

    folder = cache_folder() / f"scenes-{split}-{n}-{seed}"
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        build(partial, split=split, n=n, seed=seed)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
