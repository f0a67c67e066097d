"""Hub datasets as local files: rows become the official files that a benchmark's own `load` reads.

Checksums, resuming and scoring are therefore the same for both. Code from a repository is never run. Column names are those of
the datasets' cards and of lmms-eval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks.base import Benchmark, HubDataset
from revisit.eval.benchmarks.io.download import Progress
from revisit.eval.benchmarks.io.drafts import Draft
from revisit.explain.records import Record


def write(
    benchmark: Benchmark,
    out: Draft,
    source: str | None,
    split: str | None,
    limit: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    """Write the rows of the benchmark's dataset as official files; return the entries of source.json about them."""
    dataset = benchmark.hub
    if dataset is None:
        raise RevisitError(f"{benchmark.title} has no Hub dataset; leave --from out, or give an http(s) address.")
    library = _library()
    splits = tuple(split.split(",")) if split else dataset.splits
    place, revision = _locate(dataset.repos, source)
    copy, copied = place, revision
    if revision is not None and limit is None:  # all of it into the Hub's cache; a few rows are streamed
        with _reading(place):
            copy, copied = snapshot_download(place, repo_type="dataset", revision=revision), None
    out.source = Path(copy) if copied is None else None
    rows = 0

    def counted() -> Iterator[Record]:
        nonlocal rows
        wanted = None if limit is None else math.ceil(limit / dataset.items_per_row)
        for row in islice(_rows(library, dataset, copy, copied, splits), wanted):
            yield row
            rows += 1
            if progress is not None:
                progress(rows)

    benchmark.write_rows(counted(), out)
    out.close()
    return {
        "source": place,
        "revision": revision,
        "splits": list(splits),
        "rows": rows,
        "items": _read_back(benchmark, out.root, rows, place, whole=limit is None),
        "images": len(out.images),
        "datasets": library.__version__,
    }


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise RevisitError(
            "Downloading from the Hub needs the `datasets` package: pip install 'revisit-decoding[hub]'."
        ) from error
    if int(datasets.__version__.split(".")[0]) < 4:  # older ones can run code from a repository
        raise RevisitError(f"datasets {datasets.__version__} is too old: pip install 'datasets>=4'.")
    return datasets


def _locate(repos: Iterable[str], given: str | None) -> tuple[str, str | None]:
    """Return the folder or repository `given`, or the first of `repos` that the Hub has, and its revision (None for a folder)."""
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
        except Exception as error:  # every transport has its own kinds
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


@contextmanager
def _reading(place: str) -> Iterator[None]:
    """Raise RevisitError for whatever breaks while a dataset is read: every transport has its own errors."""
    try:
        yield
    except RevisitError:
        raise
    except Exception as error:
        raise RevisitError(
            f"{place} cannot be read as a dataset ({_reason(error)}); nothing was written. "
            "If the connection broke, run the same command again; otherwise check --from."
        ) from error


def _rows(
    library: Any, dataset: HubDataset, place: str, revision: str | None, splits: Iterable[str]
) -> Iterator[Record]:
    """Yield all rows, images undecoded; each split is opened when it is reached."""
    configs: list[str | None] = [None]
    if dataset.configs:
        with _reading(place):
            known = library.get_dataset_config_names(place, revision=revision)
        configs = [config for config in dataset.configs if config in known] or configs
    for config in configs:
        with _reading(place):
            streams = library.load_dataset(place, config, streaming=True, revision=revision)
        for split in splits:
            if split not in streams:
                raise unknown(f"split of {place}:", split, map(str, streams))
            where = f"{place} {f'{config} ' if config else ''}{split}"
            stream = streams[split]
            rows = enumerate(stream.decode(False) if stream.features else stream, 1)
            while True:
                with _reading(place):
                    number, row = next(rows, (0, {}))
                if not number:
                    break
                if missing := [name for name in dataset.columns if name not in row]:
                    raise RevisitError(
                        f"{where} has no column {', '.join(missing)} (it has {', '.join(row)}), so it is not laid out like "
                        f"{dataset.repos[0]}; give another --from, or use the official files (docs/benchmarks.md)."
                    )
                yield Record(row, f"{where} row {number}")


def _read_back(benchmark: Benchmark, root: Path, rows: int, place: str, *, whole: bool) -> int:
    """Return the number of items that the benchmark loads from `root`; raise RevisitError if an image or item is missing."""
    if rows == 0:
        raise RevisitError(f"{place} has no rows in that split; nothing was written.")
    items = type(benchmark)().load(root)  # with its default options
    assert benchmark.hub is not None
    if whole and len(items) != rows * benchmark.hub.items_per_row:
        raise RevisitError(f"{place}: {rows} rows contain {len(items)} questions; nothing was written.")
    for item in items:
        for image in item.images:
            if not image.is_file():
                raise RevisitError(f"{place}: the image of {item.id} is missing; nothing was written.")
    return len(items)
