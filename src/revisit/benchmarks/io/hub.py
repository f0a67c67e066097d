"""Hub datasets as local files: rows become the official files that a benchmark's own `load` reads.

So checksums, resuming and scoring are the same for both. Rows are streamed, code from a repository is never run, and the
folder appears only when the benchmark has read it back. Column names are those of the datasets' cards and of lmms-eval.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from revisit.benchmarks import registry
from revisit.benchmarks.base import HubDataset
from revisit.benchmarks.io.download import check_space
from revisit.benchmarks.io.drafts import drafting
from revisit.benchmarks.io.files import Record
from revisit.errors import RevisitError, unknown

SOURCE = "source.json"
Progress = Callable[[int], None]

# --------------------------------------------------------------------------------------------------- the source


@dataclass(frozen=True)
class Place:
    """A hub repository at one revision, or a folder with a dataset's files (`revision` None)."""

    source: str
    revision: str | None = None

    @property
    def options(self) -> dict[str, str]:
        return {"revision": self.revision} if self.revision else {}


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise RevisitError(
            "Fetching from the hub needs the `datasets` package: pip install 'revisit-decoding[hub]'."
        ) from error
    if int(datasets.__version__.split(".")[0]) < 4:  # older ones can run code from a repository
        raise RevisitError(f"datasets {datasets.__version__} is too old: pip install 'datasets>=4'.")
    return datasets


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, without its full stop."""
    text = str(error).strip().split("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def locate(repos: Iterable[str], given: str | None) -> Place:
    """The place `given`, or the first of `repos` that the hub has."""
    if given is not None:
        if Path(given).expanduser().is_dir():
            return Place(str(Path(given).expanduser().resolve()))
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", given):
            raise RevisitError(f"{given!r} is neither a folder nor a hub dataset OWNER/NAME.")
        repos = (given,)
    repos = tuple(repos)
    for repo in repos:
        revision = _revision(repo)
        if revision:
            return Place(repo, revision)
    raise RevisitError(
        f"The hub has no dataset {' or '.join(repos)}, or not for you; name another with --from OWNER/NAME, or a folder "
        "with its files (if it is private, log in with `hf auth login` first)."
    )


def _revision(repo: str) -> str | None:
    """The commit that the repository is at; None if there is no such repository."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return HfApi().dataset_info(repo, timeout=30).sha
    except RepositoryNotFoundError:
        return None
    except Exception as error:  # every transport has its own kinds
        raise RevisitError(
            f"The hub dataset {repo} cannot be reached ({_reason(error)}); check the connection, or run `hf download {repo} "
            "--repo-type dataset --local-dir FOLDER` where there is one and give --from FOLDER."
        ) from error


def downloaded(place: Place, folder: Path) -> Place:
    """The whole repository in the hub's own cache, which resumes what broke off; a folder is there already."""
    if place.revision is None:
        return place
    from huggingface_hub import HfApi, snapshot_download

    try:
        about = HfApi().dataset_info(place.source, revision=place.revision, files_metadata=True, timeout=30)
        size = sum(file.size or 0 for file in about.siblings or ())
        folder.parent.mkdir(parents=True, exist_ok=True)
        check_space(folder.parent, 2 * size)  # the files of the repository, and what is made of them
        copy = Path(snapshot_download(place.source, repo_type="dataset", revision=place.revision))
        for file in about.siblings or ():
            _check(copy / file.rfilename, file, place)
        return Place(str(copy))
    except RevisitError:
        raise
    except Exception as error:  # every transport has its own kinds
        raise _unreadable(place, error) from error


def _check(path: Path, file: Any, place: Place) -> None:
    """Removes and refuses a file that is not what the hub says it is, by SHA-256 for large files and git's SHA-1 for others."""
    if file.lfs is not None:
        expected, state = file.lfs.sha256, hashlib.sha256()
    elif file.blob_id:
        expected, state = file.blob_id, hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        return
    with path.open("rb") as opened:
        while block := opened.read(1 << 20):
            state.update(block)
    if state.hexdigest() != expected:
        path.resolve().unlink()  # in the hub's cache, the content; its name there is a link
        path.unlink(missing_ok=True)
        raise RevisitError(
            f"{file.rfilename} of {place.source} did not arrive as the hub has it (its checksum is {state.hexdigest()[:12]}…, not "
            f"{expected[:12]}…) and was removed; run the same command again."
        )


def _configs(library: Any, dataset: HubDataset, place: Place) -> list[str | None]:
    """The configurations to read: those of the dataset that are there, in its order, or the only one."""
    if not dataset.configs:
        return [None]
    try:
        known = set(library.get_dataset_config_names(place.source, **place.options))
    except Exception as error:
        raise _unreadable(place, error) from error
    return [config for config in dataset.configs if config in known] or [None]


def _unreadable(place: Place, error: BaseException) -> RevisitError:
    return RevisitError(
        f"{place.source} cannot be read as a dataset ({_reason(error)}); nothing was written. "
        "If the connection broke, run the same command again; else name the right place with --from."
    )


def _rows(library: Any, dataset: HubDataset, place: Place, splits: Iterable[str]) -> Iterator[Record]:
    """All rows as streamed, pictures undecoded; each split is opened when it is reached."""
    for config in _configs(library, dataset, place):
        try:
            found = library.load_dataset(place.source, config, streaming=True, **place.options)
        except Exception as error:
            raise _unreadable(place, error) from error
        known = {str(name): stream for name, stream in found.items()}
        for split in splits:
            if split not in known:
                raise unknown(f"split of {place.source}:", split, known)
            where = f"{place.source} {f'{config} ' if config else ''}{split}"
            yield from _checked(_undecoded(known[split], place), where, dataset)


def _undecoded(stream: Any, place: Place) -> Iterator[Mapping[str, Any]]:
    """The rows with their pictures as stored; raises RevisitError for whatever breaks on the way."""
    try:
        yield from stream.decode(False) if stream.features else stream
    except Exception as error:
        raise _unreadable(place, error) from error


def _checked(stream: Iterable[Mapping[str, Any]], where: str, dataset: HubDataset) -> Iterator[Record]:
    for number, row in enumerate(stream, 1):
        missing = [name for name in dataset.columns if name not in row]
        if missing:
            raise RevisitError(
                f"{where} has no column {', '.join(missing)} (it has {', '.join(row)}), so it is not laid out like "
                f"{dataset.repos[0]}; give another --from, or use the official files (docs/benchmarks.md)."
            )
        yield Record(row, f"{where} row {number}")


# ------------------------------------------------------------------------------------------------------ fetching


def get(
    benchmark: str,
    folder: Path,
    source: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Makes `folder` the benchmark's data folder and gives what its source.json says.

    A folder that the same request made is left as it is; one that holds anything else is refused.
    """
    cls = registry.find(benchmark)
    dataset, key = cls.hub, cls.name
    if dataset is None:
        raise RevisitError(f"{cls.title} names no hub dataset; run `revisit data get {key} DIR` and give that folder.")
    if limit is not None and limit < 1:
        raise RevisitError(f"limit must be at least 1, not {limit}; leave it out to fetch everything.")
    folder = folder.expanduser().resolve()
    asked = {"from": source, "split": split, "limit": limit}
    if known := present(folder, {"benchmark": key, "asked": asked}):
        return known
    library = _library()
    splits = tuple(split.split(",")) if split else dataset.splits
    place = locate(dataset.repos, source)
    copy = place if limit is not None else downloaded(place, folder)
    with drafting(folder) as out:
        rows = 0

        def counted() -> Iterator[Record]:
            nonlocal rows
            for row in islice(_rows(library, dataset, copy, splits), limit):
                yield row
                rows += 1
                if progress is not None:
                    progress(rows)

        cls.write_rows(counted(), out)
        out.close()
        about = {
            "benchmark": key,
            "source": place.source,
            "revision": place.revision,
            "splits": list(splits),
            "rows": rows,
            "items": _read_back(key, out.root, rows, place, whole=limit is None),
            "pictures": len(out.pictures),
            "fingerprint": out.fingerprint(),
            "datasets": library.__version__,
            "license": cls.license,
            "asked": asked,
        }
        out.text(SOURCE, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return about


def present(folder: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """What source.json says if `folder` is the answer to the same request; None if it is free."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise RevisitError(f"{folder} is a file; name a new or empty folder.")
    if not any(folder.iterdir()):
        return None
    known = _source(folder)
    if known is None or any(known.get(name) != value for name, value in wanted.items()):
        whose = f"{known['benchmark']} from {known['source']}" if known else "other files"
        raise RevisitError(f"{folder} is not empty and holds {whose}; name a new folder, or remove that one first.")
    return known


def fetched_items(folder: Path) -> int | None:
    """How many items a folder was fetched with pictures for; None if it has all of them, or was not fetched by us."""
    known = _source(folder)
    limit = known["asked"].get("limit") if known and isinstance(known["asked"], dict) else None
    return limit if isinstance(limit, int) else None


def _source(folder: Path) -> dict[str, Any] | None:
    """What source.json says; None if there is none of ours."""
    try:
        known = json.loads((folder / SOURCE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) and {"benchmark", "source", "asked"} <= set(known) else None


def _read_back(key: str, root: Path, rows: int, place: Place, *, whole: bool) -> int:
    """How many items the benchmark finds in `root`, every picture there; one per row if the set is `whole`."""
    if rows == 0:
        raise RevisitError(f"{place.source} has no rows in that split; nothing was written.")
    items = registry.get(key).load(root)
    if whole and len(items) != rows:
        raise RevisitError(f"{place.source}: {rows} rows make {len(items)} questions; nothing was written.")
    for item in items:
        for image in item.images:
            if not image.is_file():
                raise RevisitError(f"{place.source}: the picture of {item.id} is missing; nothing was written.")
    return len(items)
