"""`revisit data get`: a benchmark's data folder, from its authors' servers or a Hub dataset; it appears when it is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.eval.benchmarks import registry
from revisit.eval.benchmarks.base import Benchmark
from revisit.eval.benchmarks.io import hub
from revisit.eval.benchmarks.io.download import Progress, Remote, fetch_all
from revisit.eval.benchmarks.io.drafts import Draft
from revisit.explain.files import new_folder

SOURCE = "source.json"


def get(
    name: str,
    folder: Path,
    source: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Download a benchmark's data into `folder`. Interrupted downloads resume.

    Args:
        name: The benchmark.
        folder: A new or empty folder; one that the same request filled is left as it is.
        source: The address of a copy of the authors' servers; for a benchmark on the Hub a dataset OWNER/NAME, or a folder with its
            files.
        limit: Only the first items (rows of a Hub dataset).
        progress: Called with the number of files or rows so far.
        **options: Options of the benchmark.

    Returns:
        The content of source.json.
    """
    benchmark = registry.get(name, **options)
    if not (benchmark.hub or benchmark.downloads):
        raise RevisitError(f"{benchmark.title} has no data to download; its files come from {benchmark.source}.")
    on_hub, address = benchmark.hub is not None, source is not None and "://" in source
    if source is not None and on_hub == address:
        wanted = "OWNER/NAME on the Hub, or a folder" if on_hub else "the address of a copy of its servers, http://…"
        raise RevisitError(f"--from {source} cannot be used for {benchmark.title}: give {wanted}.")
    source = full_path(source)
    folder = folder.expanduser().resolve()
    asked = {"from": source, "limit": limit, **({"set": options} if options else {})}
    if known := _present(folder, {"benchmark": benchmark.name, "asked": asked}):
        return known
    with new_folder(folder, resume=not on_hub) as root:
        if on_hub:
            fetched = hub.write(benchmark, Draft(root), source, limit, progress)
        else:
            fetched = _download(benchmark, root, source, limit, progress)
        about = {"benchmark": benchmark.name, **fetched, "license": benchmark.license, "asked": asked}
        (root / SOURCE).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return about


def full_path(source: str | None) -> str | None:
    """Return the full path of a folder, and anything else unchanged."""
    if source is not None and Path(source).expanduser().is_dir():
        return str(Path(source).expanduser().resolve())
    return source


def fetched_items(folder: Path) -> int | None:
    """Return the `limit` of a folder that lists more items than it has images for; None for any other.

    The files of a Hub dataset only list the items that were downloaded.
    """
    known = _source(folder)
    return known["asked"].get("limit") if known and "items" not in known else None


def _download(
    benchmark: Benchmark, root: Path, mirror: str | None, limit: int | None, progress: Progress | None
) -> dict[str, Any]:
    def fetched(remotes: list[Remote]) -> int:
        fetch_all((remote.mirrored(mirror) for remote in remotes), root, progress)
        return sum(len(remote.results) for remote in remotes)

    files = list(benchmark.downloads)
    fetched(files)
    return {
        "source": mirror or ", ".join(dict.fromkeys(url.split("/")[2] for r in files for url in r.urls)),
        "revision": None,
        "files": {place: remote.sha256 for remote in files for place in remote.results},
        "images": fetched(benchmark.image_files(root, limit)),
    }


def _present(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of source.json if the same request filled `folder`; None if the folder is free."""
    if folder.is_file():
        raise RevisitError(f"{folder} is a file; name a new or empty folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return None
    known = _source(folder)
    if known is None or any(known.get(name) != value for name, value in wanted.items()):
        whose = f"{known['benchmark']} from {known['source']}" if known else "other files"
        raise RevisitError(f"{folder} is not empty and contains {whose}; name a new folder, or remove that one first.")
    return known


def _source(folder: Path) -> dict[str, Any] | None:
    """Return the content of source.json; None if it is absent or of another program."""
    try:
        known = json.loads((folder / SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and {"benchmark", "source", "asked"} <= set(known) else None
