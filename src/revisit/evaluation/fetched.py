"""Benchmarks' data fetched once into the cache folder and read from there: hub datasets, and what `revisit data get` fetches."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from revisit.benchmarks import registry
from revisit.benchmarks.io import data, hub
from revisit.errors import RevisitError
from revisit.settings import cache_folder

log = logging.getLogger(__name__)

FEW = 200  # items; of fewer only what they need is fetched from the authors' servers, else all that the benchmark needs


def downloaded_folder(text: str, benchmark: str | None, limit: int | None) -> Path:
    """The folder of `benchmark` from `download`: its authors' servers (or `download:ADDRESS`, a copy of them), else the hub.

    `limit` changes no item: the first items of the whole folder are those of the shorter one.
    """
    cls = registry.find(_named(benchmark, "download"))
    source = text.partition(":")[2] or None
    if not cls.downloads:
        return hub_folder(f"hub:{source}" if source else "hub", benchmark, limit)
    folder = cache_folder() / f"data-{cls.name}{_tag(source)}"
    large = cls.hub is not None and cls.hub.large
    first = limit if limit is not None and (large or limit < FEW) and not folder.is_dir() else None
    if first is not None:
        folder = folder.with_name(f"{folder.name}-first{first}")
    if not folder.is_dir():
        _announce(cls.name, source or "its authors' servers", folder, cls.license)
    data.get(cls.name, folder, source, None, first)
    return folder


def hub_folder(text: str, benchmark: str | None, limit: int | None) -> Path:
    """The folder of `benchmark` from `hub` or `hub:SOURCE`; of a large dataset only the first `limit` rows are fetched.

    `limit` changes no item: the first items of the whole folder are those of the shorter one.
    """
    cls, dataset = hub.find(_named(benchmark, "hub"))
    key = cls.name
    source = hub.spelled(text.partition(":")[2] or None)
    folder = cache_folder() / f"hub-{key}{_tag(source)}"
    first = limit if dataset.large and not folder.is_dir() else None
    if first is not None:
        folder = folder.with_name(f"{folder.name}-first{first}")
    if not folder.is_dir():
        _announce(key, source or dataset.repos[0], folder, cls.license)
    hub.get(key, folder, source, None, first)
    return folder


def _named(benchmark: str | None, place: str) -> str:
    if benchmark is None:
        raise RevisitError(f"`{place}` needs a benchmark; run `revisit data get BENCHMARK DIR` and give that folder.")
    return benchmark


def _tag(source: str | None) -> str:
    return f"-{hashlib.sha256(source.encode()).hexdigest()[:12]}" if source else ""


def _announce(name: str, source: str, folder: Path, license_: str) -> None:
    log.warning("Fetching %s from %s into %s, once. License: %s.", name, source, folder, license_)
