"""Writes the rows of a Hub dataset as the files and images of a data folder."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

from revisit.errors import RevisitError
from revisit.explain.files import below, read_file

MAX_BYTES = 200_000_000  # of an image


class Draft:
    """Writes the files and images of a data folder, each image once.

    Args:
        root: The folder to fill.
        source: The folder of the dataset. Rows may name images below it, and no others.
    """

    def __init__(self, root: Path, source: Path) -> None:
        self.root, self.source = root, source
        self.images: dict[str, str] = {}  # requested path -> path below root, with its suffix
        self._lines: dict[str, list[str]] = {}

    def add(self, path: str, value: object) -> None:
        """Append a line of JSON to a file that `close` writes."""
        self._lines.setdefault(path, []).append(json.dumps(value, ensure_ascii=False) + "\n")

    def text(self, path: str, content: str) -> None:
        """Write a file."""
        self._target(path).write_text(content, encoding="utf-8", newline="\n")

    def image(self, place: str, value: object, where: str, *, named: bool = False) -> str:
        """Write an image to `place`, with the suffix of its format unless `named`; return its path below root."""
        if place not in self.images:
            data = self._bytes(value, where)
            path = place if named else place + _suffix(data, where)
            self._target(path).write_bytes(data)
            self.images[place] = path
        return self.images[place]

    def close(self) -> None:
        """Write the files that grew line by line."""
        for path, lines in self._lines.items():
            self.text(path, "".join(lines))

    def _target(self, path: str) -> Path:
        target = below(self.root, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _bytes(self, value: object, where: str) -> bytes:
        """Return the encoded image in a column of a dataset: bytes, or the path of a file of the dataset."""
        found = (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value
        if isinstance(found, str):
            return read_file(below(self.source, found), MAX_BYTES)
        if not isinstance(found, bytes) or not found:
            raise RevisitError(f"{where} has no image.")
        return found


def _suffix(data: bytes, where: str) -> str:
    """Return the file suffix of an image's format."""
    from PIL import Image  # slow to import

    from revisit.models.images import FORMATS

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return {"JPEG": ".jpg", "TIFF": ".tif"}.get(str(image.format), f".{str(image.format).lower()}")
    except (OSError, Image.DecompressionBombError) as error:
        raise RevisitError(f"{where}: its image is in none of the formats {', '.join(FORMATS)}.") from error
