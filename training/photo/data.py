"""Training data of `photo`: COCO photos, their objects and their captions, and the lists of photos by use.

None of these data are part of this repository. Photos are read from the objects of a git repository whose files are named by COCO
id, labels from a map of CHAIR's objects, and captions from lists of records with a file name and captions.
"""

from __future__ import annotations

import io
import random
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from PIL import Image

from revisit.errors import RevisitError
from revisit.io import records
from revisit.words import CATEGORIES

VALIDATION = 800  # photos of val2014 that choose settings
HELD_OUT_EVERY = 7  # val2014 photos whose id this divides are never trained on


def photo_id(name: str) -> int:
    """Return the COCO id in a photo's file name: the digits before its extension."""
    found = re.search(r"(\d+)\.\w+$", name)
    if found is None:
        raise RevisitError(f"{name!r} has no COCO id before its extension.")
    return int(found[1])


def read_json(path: Path) -> Any:
    """Return the value of a JSON file, or the objects of JSON lines; either may be compressed with gzip."""
    try:
        return records.read_json(path)
    except RevisitError:
        return records.read_records(path)


@dataclass(frozen=True)
class Labels:
    """CHAIR's objects by photo, as indices into CATEGORIES, and the photos that belong to val2014."""

    objects: dict[int, list[int]]
    val2014: frozenset[int]

    @classmethod
    def read(cls, path: Path) -> Labels:
        """Read a file with `categories`, and with the indices of each photo's objects in `train2014` and `val2014`."""
        data = read_json(path)
        try:
            order = [CATEGORIES.index(name) for name in data["categories"]]
            parts = {
                split: {int(photo): sorted(order[k] for k in found) for photo, found in data[split].items()}
                for split in ("train2014", "val2014")
            }
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RevisitError(
                f"{str(path)!r} is not a map of CHAIR's objects with categories, train2014 and val2014: {error!r}"
            ) from None
        return cls(parts["train2014"] | parts["val2014"], frozenset(parts["val2014"]))


def read_captions(paths: Iterable[Path]) -> dict[int, list[str]]:
    """Return human captions by photo, from records with `image` or `file_path`, and `caption` or `captions`."""
    out: dict[int, list[str]] = {}
    for path in paths:
        for record in read_json(path):
            name = record.get("image") or record.get("file_path")
            captions = record.get("caption") or record.get("captions")
            if not name or not isinstance(captions, list):
                raise RevisitError(f"A record of {str(path)!r} has no file name or no list of captions.")
            out.setdefault(photo_id(name), [text.strip() for text in captions])
    return out


def read_held_out(paths: Iterable[Path]) -> set[int]:
    """Return the COCO ids that benchmark files name: in lists of ids, and in records with `image` or `image_id`, at any depth."""
    whole: set[int] = set()

    def visit(value: Any, found: set[int]) -> None:
        if isinstance(value, dict):
            name, number = value.get("image"), value.get("image_id")
            if isinstance(name, str) and "COCO" in name:
                found.add(photo_id(name))
            if isinstance(number, int):
                found.add(number)
            for inner in value.values():
                visit(inner, found)
        elif isinstance(value, list):
            found.update(item for item in value if isinstance(item, int))
            for item in value:
                if isinstance(item, dict | list):
                    visit(item, found)

    for path in paths:
        found: set[int] = set()
        visit(read_json(path), found)
        whole |= found
        if not found:
            raise RevisitError(f"{str(path)!r} names no COCO photo.")
    return whole


@dataclass(frozen=True)
class Lists:
    """Photos by use, in the order in which they are used; no photo is in two of them."""

    captioned: tuple[int, ...]  # trained on, with human captions
    labelled: tuple[int, ...]  # trained on, with objects only
    validation: tuple[int, ...]  # choose settings, never trained on
    test: tuple[int, ...]  # val2014 photos whose id 7 divides, and which no benchmark names


def build_lists(
    photos: Iterable[int], labels: Labels, captioned: Iterable[int], held_out: Iterable[int], seed: int
) -> Lists:
    """Divide the photos that have labels; `held_out` are the ids that benchmarks name."""
    known, named = set(photos) & labels.objects.keys(), set(held_out)
    seventh = {photo for photo in labels.val2014 if photo % HELD_OUT_EVERY == 0}
    dice = random.Random(seed)
    test = sorted((known & seventh) - named)
    dice.shuffle(test)
    free = sorted(known - seventh - named)
    dice.shuffle(free)
    validation = [photo for photo in free if photo in labels.val2014][:VALIDATION]
    trained, with_captions = [photo for photo in free if photo not in set(validation)], set(captioned)
    return Lists(
        tuple(photo for photo in trained if photo in with_captions),
        tuple(photo for photo in trained if photo not in with_captions),
        tuple(validation),
        tuple(test),
    )


class Photos:
    """Photos of a git directory, by COCO id, without a checkout; a context manager."""

    def __init__(self, git_dir: Path, folder: str = "train2017/") -> None:
        self._git = ["git", f"--git-dir={git_dir}"]
        listed = subprocess.run([*self._git, "ls-tree", "-r", "HEAD", folder], capture_output=True, text=True)
        if listed.returncode:
            raise RevisitError(f"{str(git_dir)!r} is not a git directory with photos: {listed.stderr.strip()}")
        rows = (line.split() for line in listed.stdout.splitlines())
        self._blobs = {photo_id(name): blob for _, _, blob, name in rows}

    def ids(self) -> list[int]:
        """Return the ids of all photos."""
        return list(self._blobs)

    def __enter__(self) -> Photos:
        self._reader = subprocess.Popen(
            [*self._git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.communicate()

    def read(self, photo: int) -> Image.Image:
        """Return a photo in RGB."""
        return Image.open(io.BytesIO(self.data(photo))).convert("RGB")

    def data(self, photo: int) -> bytes:
        """Return the bytes of a photo's file."""
        sent, back = self._reader.stdin, self._reader.stdout
        assert sent is not None
        assert back is not None
        sent.write(f"{self._blobs[photo]}\n".encode())
        sent.flush()
        size = int(back.readline().split()[-1])
        return back.read(size + 1)[:size]


def batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield consecutive parts of a list."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
