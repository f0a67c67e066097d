"""`revisit data get`: a benchmark's data folder, from its authors' servers or a Hub dataset; it appears only when complete.

The rows of a Hub dataset are written as the official files that the benchmark's `load` reads. No code from a repository is run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Benchmark, HubDataset
from revisit.eval.benchmarks.base import get as get_benchmark
from revisit.eval.benchmarks.io.download import Progress, fetch_all
from revisit.io.files import new_folder, path_within, read_file
from revisit.io.records import Fields, Record

SOURCE = "source.json"
MAX_IMAGE_BYTES = 200_000_000


def get(
    name: str,
    folder: Path,
    source: str | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Fields:
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
    benchmark = get_benchmark(name, **options)
    on_hub = benchmark.hub is not None
    if not (on_hub or benchmark.downloads):
        raise RevisitError(f"{benchmark.title} has no data to download; its files come from {benchmark.source}.")
    if source is not None and not on_hub:
        raise RevisitError(f"{benchmark.title} is not on the Hub: leave --from out, or put its files into a folder.")
    folder = folder.expanduser().resolve()
    request = {"benchmark": benchmark.name, "from": source, "limit": limit, "set": options}
    if folder.is_file():
        raise RevisitError(f"{folder} is a file: name a new folder.")
    if folder.exists() and any(folder.iterdir()):
        stored: Fields = json.loads(file.read_text("utf-8")) if (file := folder / SOURCE).is_file() else {}
        if stored.get("asked") == request:
            return stored
        raise RevisitError(f"{folder} has other files: name a new folder, or remove that one first.")
    with new_folder(folder, resume=not on_hub) as root:
        if benchmark.hub:
            fetched = _from_hub(benchmark, benchmark.hub, root, source, limit, progress)
        else:
            fetched = _from_servers(benchmark, root, limit, progress)
        about = {"benchmark": benchmark.name, **fetched, "license": benchmark.license, "asked": request}
        (root / SOURCE).write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return about


def _from_servers(benchmark: Benchmark, root: Path, limit: int | None, progress: Progress | None) -> Fields:
    files = benchmark.downloads
    fetch_all(files, root, progress)
    images = benchmark.image_files(root, limit)
    fetch_all(images, root, progress)
    return {
        "source": ", ".join(dict.fromkeys(url.split("/")[2] for remote in files for url in remote.urls)),
        "files": {path: remote.sha256 for remote in files for path in remote.results},
        "images": sum(len(remote.results) for remote in images),
    }


# -- Hub datasets --------------------------------------------------------------------------------------------------


class Draft:
    """Writes the files and images of a data folder, each image once.

    Args:
        root: The folder to fill.
        source: The folder of the dataset. Rows may refer to images below it, and to no other files.
    """

    def __init__(self, root: Path, source: Path) -> None:
        self.root, self.source = root, source
        self.images: dict[str, str] = {}  # requested path -> path below root, with its suffix

    def add(self, path: str, value: object) -> None:
        """Append a line of JSON to a file."""
        with self._target(path).open("a", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")

    def text(self, path: str, content: str) -> None:
        """Write a file."""
        self._target(path).write_text(content, encoding="utf-8", newline="\n")

    def image(self, path: str, value: object, where: str, *, named: bool = False) -> str:
        """Write an image to `path`, plus the suffix of its format unless `named`; return the path below root."""
        if path not in self.images:
            data = self._bytes(value, where)
            self.images[path] = path if named else path + _suffix(data, where)
            self._target(self.images[path]).write_bytes(data)
        return self.images[path]

    def _target(self, path: str) -> Path:
        target = path_within(self.root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _bytes(self, value: object, where: str) -> bytes:
        """Return the encoded image in a column of a dataset: bytes, or the path of a file of the dataset."""
        content = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value
        if isinstance(content, str):
            return read_file(path_within(self.source, content), MAX_IMAGE_BYTES)
        if not isinstance(content, bytes) or not content:
            raise RevisitError(f"{where} has no image.")
        return content


def _suffix(data: bytes, where: str) -> str:
    """Return the file suffix of an image's format."""
    from PIL import Image  # slow to import

    from revisit.io.images import FORMATS

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return {"JPEG": ".jpg", "TIFF": ".tif"}.get(str(image.format), f".{str(image.format).lower()}")
    except (OSError, Image.DecompressionBombError) as error:
        raise RevisitError(f"{where}: its image is in none of the formats {', '.join(FORMATS)}.") from error


def _from_hub(
    benchmark: Benchmark,
    dataset: HubDataset,
    root: Path,
    source: str | None,
    limit: int | None,
    progress: Progress | None,
) -> Fields:
    need("datasets")
    local = source is not None and Path(source).is_dir()
    repo, copy = (str(source), Path(str(source))) if local else _snapshot((source,) if source else dataset.repos)
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
    except RevisitError:
        raise
    except Exception as error:  # datasets has no common error
        raise RevisitError(
            f"{repo} could not be read as {benchmark.title}'s dataset ({_reason(error)}); nothing was written."
        ) from error
    if rows == 0:
        raise RevisitError(f"{repo} has no rows; nothing was written.")
    items = type(benchmark)().load(root)  # with its default options
    counts = {"rows": rows, "items": len(items), "images": len(out.images)}
    return {"source": repo, "revision": None if local else copy.name, **counts}


def _snapshot(repos: tuple[str, ...]) -> tuple[str, Path]:
    """Download the first repository that exists into the Hub's cache; return its name, and the folder of its revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

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
