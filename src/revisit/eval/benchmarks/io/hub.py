"""Hub datasets as local files: rows become the official files that a benchmark's own `load` reads.

Checksums, resuming and scoring are therefore the same for both. No code from a repository is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Benchmark, HubDataset
from revisit.eval.benchmarks.io.download import Progress
from revisit.eval.benchmarks.io.drafts import Draft
from revisit.explain.records import Record


def write(
    benchmark: Benchmark, out: Draft, source: str | None, limit: int | None, progress: Progress | None
) -> dict[str, Any]:
    """Write the rows of the benchmark's dataset as official files; return the entries of source.json about them."""
    need("datasets")
    assert benchmark.hub is not None
    place, revision = _locate(benchmark.hub.repos, source)
    rows = 0

    def counted(dataset: HubDataset, copy: str, version: str | None) -> Iterator[Record]:
        nonlocal rows
        for row in islice(_rows(dataset, copy, version), limit):
            yield row
            rows += 1
            if progress is not None:
                progress(rows)

    try:
        copy, version = place, revision
        if revision is not None and limit is None:  # all of it into the Hub's cache; a few rows are streamed
            copy, version = snapshot_download(place, repo_type="dataset", revision=revision), None
        out.source = Path(copy) if version is None else None
        benchmark.write_rows(counted(benchmark.hub, copy, version), out)
        out.close()
    except RevisitError:
        raise
    except Exception as error:  # every transport has errors of its own
        raise RevisitError(
            f"{place} could not be read as {benchmark.title}'s dataset ({_reason(error)}); nothing was written. If the connection "
            "broke, run the same command again; otherwise check --from."
        ) from error
    if rows == 0:
        raise RevisitError(f"{place} has no rows; nothing was written.")
    items = type(benchmark)().load(out.root)  # with its default options
    return {"source": place, "revision": revision, "rows": rows, "items": len(items), "images": len(out.images)}


def _locate(repos: Iterable[str], given: str | None) -> tuple[str, str | None]:
    """Return the folder or repository `given`, or the first of `repos` on the Hub, and its revision (None for a folder)."""
    if given is not None:
        if Path(given).is_dir():
            return given, None
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
            raise RevisitError(f"{given!r} is neither a folder nor a Hub dataset OWNER/NAME.")
        repos = (given,)
    repos = tuple(repos)
    for repo in repos:
        try:
            return repo, HfApi().dataset_info(repo, timeout=30).sha
        except RepositoryNotFoundError:
            continue
        except Exception as error:  # every transport has errors of its own
            raise RevisitError(
                f"The Hub dataset {repo} cannot be reached ({_reason(error)}); check the connection, or run `hf download {repo} "
                "--repo-type dataset --local-dir FOLDER` on a machine with a connection and use --from FOLDER."
            ) from error
    raise RevisitError(
        f"The Hub has no dataset {' or '.join(repos)}, or you have no access; use --from OWNER/NAME, or a folder "
        "with its files (if it is private, log in with `hf auth login` first)."
    )


def _reason(error: BaseException) -> str:
    """Return the first line of an error, without its full stop."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _rows(dataset: HubDataset, place: str, revision: str | None) -> Iterator[Record]:
    """Yield all rows, images undecoded; each split is opened when it is reached."""
    import datasets

    configs: list[str | None] = [None]
    if dataset.configs:
        known = datasets.get_dataset_config_names(place, revision=revision)
        configs = [config for config in dataset.configs if config in known] or configs
    for config in configs:
        splits = datasets.load_dataset(place, config, streaming=True, revision=revision)
        for split in dataset.splits:
            where = " ".join(filter(None, (place, config, split)))
            for number, row in enumerate(splits[split].decode(False), 1):
                yield Record(row, f"{where} row {number}")
