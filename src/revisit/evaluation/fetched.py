"""What `revisit data get` fetches, kept in the cache folder and read from there by runs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from revisit.benchmarks import registry
from revisit.benchmarks.io import data
from revisit.errors import RevisitError
from revisit.settings import cache_folder

log = logging.getLogger(__name__)

FEW = 200  # with a smaller limit only what the first items need is fetched from the authors' servers


def downloaded_folder(text: str, benchmark: str | None, limit: int | None) -> Path:
    """The folder of `benchmark` from `download` or `download:SOURCE`, fetched on first use.

    Args:
        text: SOURCE is what `revisit data get --from` takes: an address, a hub dataset OWNER/NAME, or a folder.
        benchmark: Its name.
        limit: Changes no item: the first items of the whole folder are those of the shorter one.
    """
    if benchmark is None:
        raise RevisitError("`download` needs a benchmark; run `revisit data get BENCHMARK DIR` and give that folder.")
    cls = registry.find(benchmark)
    source = data.full_path(text.partition(":")[2] or None)
    tag = f"-{hashlib.sha256(source.encode()).hexdigest()[:12]}" if source else ""
    folder = cache_folder() / f"data-{cls.name}{tag}"
    few = limit is not None and limit < FEW and not data.from_hub(cls, source)
    first = limit if few and not folder.is_dir() else None
    if first is not None:
        folder = folder.with_name(f"{folder.name}-first{first}")
    if not folder.is_dir():
        place = source or ("its authors' servers" if cls.downloads else "its hub dataset")
        log.warning("Fetching %s from %s into %s, once. License: %s.", cls.name, place, folder, cls.license)
    data.get(cls.name, folder, source, None, first)
    return folder
