"""Writes the rows of a Hub dataset as the files and images of a data folder."""

from __future__ import annotations

import io
import json
from collections.abc import Hashable, Mapping
from pathlib import Path, PurePosixPath

from revisit.errors import RevisitError
from revisit.explain.files import below, read_file

MAX_BYTES = 200_000_000  # of an image
ENDINGS = {"JPEG": ".jpg", "PNG": ".png", "GIF": ".gif", "BMP": ".bmp", "TIFF": ".tif", "WEBP": ".webp"}


class Draft:
    """Writes below `root`: every name is checked to stay there, every image is written once.

    Args:
        root: The folder to fill.
        source: The folder of the dataset. Rows may name images below it, and no others.
    """

    def __init__(self, root: Path, source: Path | None = None) -> None:
        self.root, self.source = root, source
        self.images: dict[str, str] = {}  # requested path -> path below root, with its ending
        self._entries: dict[str, list[str]] = {}
        self._seen: set[Hashable] = set()

    def add(self, path: str, value: object) -> None:
        """Append a line of JSON to a file that `close` writes."""
        self._entries.setdefault(path, []).append(json.dumps(value, ensure_ascii=False) + "\n")

    def once(self, key: Hashable, where: str) -> None:
        """Raise RevisitError if a row with this key came before."""
        if key in self._seen:
            raise RevisitError(f"{where}: {key!r} is a duplicate; this is not the published dataset.")
        self._seen.add(key)

    def text(self, path: str, content: str) -> None:
        """Write a file."""
        self._target(path).write_text(content, encoding="utf-8", newline="\n")

    def image(self, place: str, value: object, where: str, *, named: bool = False) -> str:
        """Write an image to `place`, with the ending of its format unless `named`; return its path below root."""
        if place not in self.images:
            data = image_bytes(value, where, self.source)
            path = place if named else place + image_ending(io.BytesIO(data), where)
            self._target(path).write_bytes(data)
            self.images[place] = path
        return self.images[place]

    def close(self) -> None:
        """Write the files that grew entry by entry."""
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


def image_bytes(value: object, where: str, source: Path | None = None) -> bytes:
    """Return the encoded image in a column of a dataset: bytes, or the path of a file below the dataset's folder."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str):
        if source is None:
            raise RevisitError(
                f"{where}: its image is a separate file: leave --limit out, so that all files are downloaded."
            )
        path = below(source, value)
        try:
            value = read_file(path, MAX_BYTES)
        except OSError as error:
            raise RevisitError(f"{where}: its image {path} cannot be read: {error.strerror}.") from error
    if not isinstance(value, bytes) or not value:
        raise RevisitError(f"{where} has no image.")
    return value


def image_ending(file: Path | io.BytesIO, where: str) -> str:
    """Return the ending of an image's format; raise RevisitError if it is in no known one."""
    from PIL import Image  # slow to import

    try:
        with Image.open(file, formats=tuple(ENDINGS)) as image:
            return ENDINGS[str(image.format)]
    except (OSError, Image.DecompressionBombError) as error:
        raise RevisitError(f"{where}: its image is in none of the formats {', '.join(ENDINGS)}.") from error


def has_image(value: object) -> bool:
    """Whether a column's value is an image: an empty one has neither content nor path."""
    return bool(value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value is not None
