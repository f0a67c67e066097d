"""`revisit data get`: a benchmark's data folder, from its authors' servers or from a hub dataset; whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from revisit.benchmarks import registry
from revisit.benchmarks.base import Benchmark
from revisit.benchmarks.io import hub
from revisit.benchmarks.io.download import Remote, fetch_all, mirrored
from revisit.benchmarks.io.drafts import drafting
from revisit.errors import RevisitError

Progress = Callable[[int], None]  # how many files or rows are there


def get(
    name: str,
    folder: Path,
    source: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Makes `folder` the benchmark's data folder and gives what its source.json says.

    `source`: a hub dataset OWNER/NAME, a folder with a dataset's files, or the address of a copy of the authors' servers.
    Interrupted downloads resume.
    """
    cls = registry.find(name)
    if from_hub(cls, source):
        if source is not None and "://" in source:
            raise RevisitError(
                f"{cls.title} is fetched from the hub: give --from OWNER/NAME or a folder, not an address."
            )
        return hub.get(name, folder, full_path(source), split, limit, progress)
    if split is not None:
        raise RevisitError(f"{cls.title}'s files have no splits to choose from; leave --split out.")
    return _download(registry.get(name, **options), options, folder, source, limit, progress)


def from_hub(cls: type[Benchmark], source: str | None) -> bool:
    """Whether the data comes from a hub dataset, or a folder with one, instead of the authors' servers or a copy of them."""
    return not cls.downloads or (source is not None and not source.startswith(("http://", "https://")))


def full_path(source: str | None) -> str | None:
    """A folder by its full path, anything else as it is."""
    if source is not None and Path(source).expanduser().is_dir():
        return str(Path(source).expanduser().resolve())
    return source


def _download(
    benchmark: Benchmark,
    options: dict[str, Any],
    folder: Path,
    mirror: str | None,
    limit: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    folder = folder.expanduser().resolve()
    asked = {"from": mirror, "split": None, "limit": limit, **({"set": options} if options else {})}
    if known := hub.present(folder, {"benchmark": benchmark.name, "asked": asked}):
        return known

    def fetched(remotes: list[Remote]) -> int:
        fetch_all((mirrored(remote, mirror) for remote in remotes), out.root, progress)
        return sum(len(remote.results) for remote in remotes)

    with drafting(folder, resume=True) as out:
        files = list(benchmark.downloads)
        fetched(files)
        pictures = fetched(benchmark.pictures(out.root, limit))
        about: dict[str, Any] = {
            "benchmark": benchmark.name,
            "source": mirror or ", ".join(dict.fromkeys(url.split("/")[2] for r in files for url in r.urls)),
            "revision": None,
            "splits": [],
            "files": {place: remote.sha256 for remote in files for place in remote.results},
            "pictures": pictures,
            "fingerprint": out.fingerprint(),
            "license": benchmark.license,
            "asked": asked,
        }
        out.text(hub.SOURCE, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return about
