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
from revisit.eval.benchmarks.io.download import Progress, Remote, fetch_all, mirrored
from revisit.eval.benchmarks.io.drafts import Draft
from revisit.explain.files import new_folder

SOURCE = "source.json"


def get(
    name: str,
    folder: Path,
    source: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Download a benchmark's data into `folder`. Interrupted downloads resume.

    Args:
        name: The benchmark.
        folder: A new or empty folder; one that the same request filled is left as it is.
        source: A Hub dataset OWNER/NAME, a folder with a dataset's files, or the address of a copy of the authors' servers.
        split: Splits of the Hub dataset, separated by commas; the benchmark's own by default.
        limit: Only the first items.
        progress: Called with the number of files or rows so far.
        **options: Options of the benchmark.

    Returns:
        The content of source.json.
    """
    benchmark = registry.get(name, **options)
    on_hub = from_hub(type(benchmark), source)
    if on_hub and source is not None and "://" in source:
        raise RevisitError(f"{benchmark.title} comes from the Hub: use --from OWNER/NAME or a folder.")
    if split is not None and not on_hub:
        raise RevisitError(f"{benchmark.title}'s files have no splits; remove --split.")
    source = full_path(source)
    folder = folder.expanduser().resolve()
    asked = {"from": source, "split": split, "limit": limit, **({"set": options} if options else {})}
    if known := _present(folder, {"benchmark": benchmark.name, "asked": asked}):
        return known
    with new_folder(folder, resume=not on_hub) as root:
        out = Draft(root)
        if on_hub:
            fetched = hub.write(benchmark, out, source, split, limit, progress)
        else:
            fetched = _download(benchmark, out, source, limit, progress)
        about = {"benchmark": benchmark.name, **fetched, "license": benchmark.license, "asked": asked}
        out.text(SOURCE, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return about


def from_hub(cls: type[Benchmark], source: str | None) -> bool:
    """Whether the data comes from a Hub dataset, or a folder with one, instead of the authors' servers or a copy of them."""
    return not cls.downloads or (source is not None and not source.startswith(("http://", "https://")))


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
    limit = known["asked"].get("limit") if known and "items" not in known and isinstance(known["asked"], dict) else None
    return limit if isinstance(limit, int) else None


def _download(
    benchmark: Benchmark, out: Draft, mirror: str | None, limit: int | None, progress: Progress | None
) -> dict[str, Any]:
    def fetched(remotes: list[Remote]) -> int:
        fetch_all((mirrored(remote, mirror) for remote in remotes), out.root, progress)
        return sum(len(remote.results) for remote in remotes)

    files = list(benchmark.downloads)
    fetched(files)
    return {
        "source": mirror or ", ".join(dict.fromkeys(url.split("/")[2] for r in files for url in r.urls)),
        "revision": None,
        "splits": [],
        "files": {place: remote.sha256 for remote in files for place in remote.results},
        "images": fetched(benchmark.image_files(out.root, limit)),
    }


def _present(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of source.json if the same request filled `folder`; None if the folder is free."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise RevisitError(f"{folder} is a file; name a new or empty folder.")
    if not any(folder.iterdir()):
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
