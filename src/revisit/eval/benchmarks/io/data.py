"""`revisit data get`: a benchmark's data folder, from its authors' servers or a Hub dataset; it appears when it is complete.

The rows of a Hub dataset become the official files that a benchmark's own `load` reads. No code from a repository is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from revisit.errors import RevisitError, need
from revisit.eval.benchmarks import registry
from revisit.eval.benchmarks.base import Benchmark, HubDataset
from revisit.eval.benchmarks.io.download import Progress, fetch_all
from revisit.eval.benchmarks.io.drafts import Draft
from revisit.explain.files import new_folder
from revisit.explain.records import Record

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
        source: For a benchmark on the Hub: another dataset OWNER/NAME, or a folder with its files.
        limit: Only the first items (rows of a Hub dataset).
        progress: Called with the number of files or rows so far.
        **options: Options of the benchmark.

    Returns:
        The content of source.json.
    """
    benchmark = registry.get(name, **options)
    on_hub = benchmark.hub is not None
    if not (on_hub or benchmark.downloads):
        raise RevisitError(f"{benchmark.title} has no data to download; its files come from {benchmark.source}.")
    if source is not None and not on_hub:
        raise RevisitError(f"{benchmark.title} is not on the Hub: leave --from out, or put its files into a folder.")
    folder = folder.expanduser().resolve()
    asked = {"benchmark": benchmark.name, "from": source, "limit": limit, "set": options}
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        known: dict[str, Any] = json.loads(file.read_text("utf-8")) if (file := folder / SOURCE).is_file() else {}
        if known.get("asked") == asked:
            return known
        raise RevisitError(f"{folder} has other files: name a new folder, or remove that one first.")
    with new_folder(folder, resume=not on_hub) as root:
        if benchmark.hub:
            fetched = _from_hub(benchmark, benchmark.hub, root, source, limit, progress)
        else:
            fetched = _from_servers(benchmark, root, limit, progress)
        about = {"benchmark": benchmark.name, **fetched, "license": benchmark.license, "asked": asked}
        (root / SOURCE).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return about


def _from_servers(benchmark: Benchmark, root: Path, limit: int | None, progress: Progress | None) -> dict[str, Any]:
    files = benchmark.downloads
    fetch_all(files, root, progress)
    images = benchmark.image_files(root, limit)
    fetch_all(images, root, progress)
    return {
        "source": ", ".join(dict.fromkeys(url.split("/")[2] for remote in files for url in remote.urls)),
        "files": {place: remote.sha256 for remote in files for place in remote.results},
        "images": sum(len(remote.results) for remote in images),
    }


def _from_hub(
    benchmark: Benchmark,
    dataset: HubDataset,
    root: Path,
    source: str | None,
    limit: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    need("datasets")
    local = source is not None and Path(source).is_dir()
    place, copy = (str(source), Path(str(source))) if local else _snapshot(dataset, source)
    out, rows = Draft(root, copy), 0

    def counted() -> Iterator[Record]:
        nonlocal rows
        for row in islice(_rows(dataset, copy), limit):
            yield row
            rows += 1
            if progress is not None:
                progress(rows)

    try:
        benchmark.write_rows(counted(), out)
        out.close()
    except RevisitError:
        raise
    except Exception as error:  # datasets has no common error
        raise RevisitError(
            f"{place} could not be read as {benchmark.title}'s dataset ({_reason(error)}); nothing was written."
        ) from error
    if rows == 0:
        raise RevisitError(f"{place} has no rows; nothing was written.")
    items = type(benchmark)().load(root)  # with its default options
    counts = {"rows": rows, "items": len(items), "images": len(out.images)}
    return {"source": place, "revision": None if local else copy.name, **counts}


def _snapshot(dataset: HubDataset, source: str | None) -> tuple[str, Path]:
    """Download the first repository that exists into the Hub's cache; return its name, and the folder of its revision."""
    repos = (source,) if source else dataset.repos
    for repo in repos:
        try:
            return repo, Path(snapshot_download(repo, repo_type="dataset"))
        except RepositoryNotFoundError:
            continue
        except Exception as error:  # every transport has errors of its own
            raise RevisitError(
                f"The Hub dataset {repo} cannot be downloaded ({_reason(error)}); check the connection, or run `hf download {repo} "
                "--repo-type dataset --local-dir FOLDER` on a machine with a connection and use --from FOLDER."
            ) from error
    raise RevisitError(
        f"The Hub has no dataset {' or '.join(repos)}, or you have no access; use --from OWNER/NAME, or a folder "
        "with its files (if it is private, log in with `hf auth login` first)."
    )


def _rows(dataset: HubDataset, copy: Path) -> Iterator[Record]:
    """Yield all rows, images undecoded; each split is opened when it is reached."""
    import datasets

    configs: list[str | None] = [None]
    if dataset.configs:
        known = datasets.get_dataset_config_names(str(copy))
        configs = [config for config in dataset.configs if config in known] or configs
    for config in configs:
        splits = datasets.load_dataset(str(copy), config, streaming=True)
        for split in dataset.splits:
            where = " ".join(filter(None, (str(copy), config, split)))
            for number, row in enumerate(splits[split].decode(False), 1):
                yield Record(row, f"{where} row {number}")


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without its full stop."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')[:200]}"
