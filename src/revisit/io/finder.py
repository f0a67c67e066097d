"""Find the images that the rows of a file name, in a folder and its subfolders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError, short
from revisit.io.files import path_within
from revisit.io.records import IMAGES, VIDEOS, Record

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
VIDEO_SUFFIXES = {".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv", ".apng"}
IDS = ("image_id", "id", "question_id", "index", "doc_id")


def is_video(name: str | Path) -> bool:
    """Return whether a file is a video by its name."""
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def image_files(folder: Path) -> list[Path]:
    """Return the image and video files in a folder and its subfolders, in order; hidden ones are left out."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES | VIDEO_SUFFIXES)
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


class ImageFinder:
    """Finds the images that rows name, in a folder and its subfolders."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise RevisitError(f"{folder} is not a folder of images.")
        self.folder = folder

    @cached_property
    def _files(self) -> dict[str, list[Path]]:
        """The image files by name, by name without suffix, by path without suffix, and by the number that ends their name."""
        found: dict[str, list[Path]] = {}
        for file in image_files(self.folder):
            number = re.search(r"(\d+)$", file.stem)
            path = file.relative_to(self.folder).with_suffix("").as_posix()
            for key in {file.name, file.stem, f"./{path}", *([f"#{int(number[1])}"] if number else [])}:
                found.setdefault(key, []).append(file)
        return found

    def find(self, row: Record) -> list[Path]:
        """Return the images of a row: the files that it names, or the one whose name is, or ends in, the row's id."""
        named: list[Any] = [next((row[field] for field in fields if row.get(field)), []) for fields in (IMAGES, VIDEOS)]
        if names := [name for value in named for name in (value if isinstance(value, list) else [value])]:
            if not all(isinstance(name, str) for name in names):
                raise RevisitError(f"{row.where}: an image must be the path of a file, not {type(names[0]).__name__}.")
            return [self._named(name, row.where) for name in names]
        key = next((str(row[field]) for field in IDS if row.get(field) is not None), "")
        number = f"#{int(key)}" if key.isdecimal() else ""
        found = self._only(key, (f"./{key}", key, number), row.where) if key else None
        if found is None:
            missing = (
                f"no image in {self.folder} is named or numbered {short(key)}" if key else "it has no image and no id"
            )
            raise RevisitError(f"{row.where}: {missing}.")
        return [found]

    def name(self, image: Path) -> str:
        """Return the path of an image within the folder."""
        return image.relative_to(os.path.abspath(self.folder)).as_posix()

    def _named(self, value: str, where: str) -> Path:
        """Return the file at this path, within the folder or as typed, or else the only one with this base name."""
        for name in (value, os.path.abspath(value)):
            with suppress(OSError, ValueError):  # too long; outside the folder; no path at all
                if (path := path_within(self.folder, name)).is_file():
                    return path
        return self._only(value, (Path(value).name,), where) or path_within(self.folder, value)

    def _only(self, value: str, keys: Sequence[str], where: str) -> Path | None:
        """Return the file of the first key that has files; raise RevisitError if it has several."""
        files = next((self._files[key] for key in keys if key in self._files), [])
        if len(files) > 1:
            names = ", ".join(file.relative_to(self.folder).as_posix() for file in files[:3])
            raise RevisitError(
                f"{where}: {short(value)} could be any of {len(files)} images in {self.folder} ({names}"
                f"{', …' if len(files) > 3 else ''}); name the image by its path within that folder."
            )
        return path_within(self.folder, files[0].relative_to(self.folder)) if files else None
