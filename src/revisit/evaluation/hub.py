"""Hub datasets as evaluation data, fetched once into the cache folder and read from there."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from revisit.benchmarks.io import hub
from revisit.errors import RevisitError
from revisit.settings import cache_folder

log = logging.getLogger(__name__)


def hub_folder(text: str, benchmark: str | None, limit: int | None) -> Path:
    """The folder of `benchmark` from `hub` or `hub:SOURCE`; of a large dataset only the first `limit` rows are fetched.

    `limit` changes no item: the first items of the whole folder are those of the shorter one.
    """
    if benchmark is None:
        raise RevisitError("`hub` needs a benchmark; run `revisit data get BENCHMARK DIR` and give that folder.")
    cls, dataset = hub.find(benchmark)
    key = cls.name
    source = hub.spelled(text.partition(":")[2] or None)
    tag = f"-{hashlib.sha256(source.encode()).hexdigest()[:12]}" if source else ""
    folder = cache_folder() / f"hub-{key}{tag}"
    first = limit if dataset.large and not folder.is_dir() else None
    if first is not None:
        folder = folder.with_name(f"{folder.name}-first{first}")
    if not folder.is_dir():
        log.warning("Fetching %s from %s into %s, once.", key, source or dataset.repos[0], folder)
    hub.get(key, folder, source, None, first)
    return folder
