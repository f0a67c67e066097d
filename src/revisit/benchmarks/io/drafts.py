"""A data folder that appears under its name only when it is complete, even if the process is killed."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from revisit.errors import RevisitError

ENDINGS = {"JPEG": ".jpg", "PNG": ".png", "GIF": ".gif", "BMP": ".bmp", "TIFF": ".tif", "WEBP": ".webp"}


class Draft:
    """Writes below `root`; every name is checked to stay there, every picture is written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pictures: dict[str, str] = {}  # requested path -> path below root, with its ending
        self._entries: dict[str, list[str]] = {}
        self._seen: set[Hashable] = set()

    def add(self, path: str, value: object) -> None:
        """Appends a line of JSON to a file that `close` will write."""
        self._entries.setdefault(path, []).append(json.dumps(value, ensure_ascii=False) + "\n")

    def once(self, key: Hashable, where: str) -> None:
        """Raises if a row with this key came before."""
        if key in self._seen:
            raise RevisitError(f"{where}: {key!r} is a duplicate; this is not the published dataset.")
        self._seen.add(key)

    def text(self, path: str, content: str) -> None:
        """Writes a whole file."""
        self._target(path).write_text(content, encoding="utf-8", newline="\n")

    def picture(self, place: str, value: object, where: str, *, named: bool = False) -> str:
        """Writes the picture to `place`, with the ending of its format unless `named`; returns its path below root."""
        if place not in self.pictures:
            data, ending = picture_bytes(value, where)
            path = place if named else place + ending
            self._target(path).write_bytes(data)
            self.pictures[place] = path
        return self.pictures[place]

    def close(self) -> None:
        """Writes the files that grew entry by entry."""
        while self._entries:
            path, entries = self._entries.popitem()
            self.text(path, "".join(entries))

    def _target(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts or not parts or "\\" in path or "\0" in path:
            raise RevisitError(f"The dataset names a file {path!r} outside its folder; it was not written.")
        target = self.root.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def picture_bytes(value: object, where: str) -> tuple[bytes, str]:
    """A picture's file content and its ending, from a column of a dataset: bytes, or the path of a file with them."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        import fsspec  # slow to import

        try:
            with fsspec.open(value, "rb") as file:  # on the Hub, or next to the dataset
                value = file.read()
        except Exception as error:  # every file system has its own kinds
            raise RevisitError(f"{where}: its picture {value} cannot be read ({type(error).__name__}).") from error
    if not isinstance(value, bytes) or not value:
        raise RevisitError(f"{where} has no picture.")
    return value, picture_ending(io.BytesIO(value), where)


def picture_ending(file: Path | io.BytesIO, where: str) -> str:
    """The ending of a picture's format."""
    from PIL import Image  # slow to import

    try:
        with Image.open(file, formats=tuple(ENDINGS)) as image:
            return ENDINGS[str(image.format)]
    except (OSError, Image.DecompressionBombError) as error:
        raise RevisitError(f"{where}: its picture is in none of the formats {', '.join(ENDINGS)}.") from error


def has_picture(value: object) -> bool:
    """Whether a column's value is a picture: an empty one has neither content nor path."""
    return bool(value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value is not None


@contextmanager
def drafting(folder: Path, *, resume: bool = False) -> Iterator[Draft]:
    """A draft next to `folder`, renamed to it when the block succeeds and removed when it fails.

    The draft of a killed process is removed first. With `resume` drafts are kept instead. Only one process at a time can draft a folder.
    """
    place = folder.with_name(f".{folder.name}.draft")
    lock = FileLock(place.with_suffix(".lock"), timeout=0, is_singleton=False)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            try:
                if not resume:
                    shutil.rmtree(place, ignore_errors=True)
                place.mkdir(exist_ok=True)
                draft = Draft(place)
                yield draft
                draft.close()
                place.rename(folder)  # replaces an empty folder, never one that holds something
            except BaseException:
                if not resume:
                    shutil.rmtree(place, ignore_errors=True)
                raise
            finally:
                Path(lock.lock_file).unlink(missing_ok=True)  # before the release: nobody else can hold it yet
    except Timeout as error:
        raise RevisitError(f"Another process is writing {folder}; wait until it ends.") from error
    except OSError as error:
        left = "What is complete was kept" if resume else "Nothing was left there"
        raise RevisitError(
            f"Cannot write {folder}: {error.strerror or error}. {left}; make room or choose another folder (REVISIT_CACHE names the "
            "cache), and run the same command again."
        ) from error
