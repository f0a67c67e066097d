"""The results of a command on many items: a folder in which a killed or repeated command continues.

`settings.json` has what all results have in common, a file of lines one result for each item, and `failures.jsonl` the items without a
result. The lines are in the order of the items when a command ends, whatever was stored when it began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.io.files import (
    LineFile,
    digest,
    file_digest,
    inside,
    local_path,
    make_folder,
    scan_lines,
    write_bytes,
    write_json,
    write_text,
)
from revisit.io.records import read_json

SETTINGS, FAILURES = "settings.json", "failures.jsonl"
Line = Mapping[str, Any]


def content_hash(files: Sequence[str | Path]) -> str | None:
    """Return a hash of the bytes of files; None if one cannot be read, or is no file."""
    with suppress(OSError, ValueError):
        return digest([file_digest(local_path(file)) for file in files])
    return None


class Results:
    """The lines of a results folder, which only this process can append to.

    Args:
        path: The file of lines; its folder is created if needed.
        settings: What identifies the results, besides the items.
        key: Returns the identity of a line's item.
        only: Drop the lines of items that the last command did not name.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], key: Callable[[Line], Hashable], *, only: bool = False
    ) -> None:
        self.path, self.key, self.only = path, key, only
        self._file = LineFile(inside(make_folder(path.parent), path.name), lambda line: (key(line), line.get("hash")))
        self.hashes: dict[Hashable, str] = dict(self._file.objects)
        try:
            self._check_settings(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = inside(self.path.parent, SETTINGS)
        stored = read_json(path) if path.exists() else {}
        if not self.hashes:
            write_json(path, settings)
        elif changed := [name for name in {**settings, **stored} if stored.get(name) != settings.get(name)]:
            raise RevisitError(
                f"{self.path.parent} has results with other settings ({', '.join(changed)}); use another --out."
            )

    def missing(self, items: Iterable[tuple[Hashable, Sequence[str | Path]]]) -> list[int]:
        """Return the numbers of the items, given as identities and images, without a result for the images as they are now."""
        return [
            number
            for number, (key, images) in enumerate(items)
            if key not in self.hashes or self.hashes[key] != content_hash(images)
        ]

    def fill(
        self, keys: Iterable[Hashable], batches: Iterable[Sequence[Line]], advance: Callable[[int, int], None]
    ) -> list[Line]:
        """Store the lines of each batch, all of them or none, as it comes; return those with an `error`, which are listed apart.

        At the end, the lines are in the order of `keys`, and those of other items, if they are kept, last. `advance` is called with the
        numbers of lines and of errors.
        """
        failures: dict[Hashable, Line] = {}
        for batch in batches:
            failed = {self.key(line): line for line in batch if "error" in line}
            if good := [line for line in batch if "error" not in line]:
                self._file.append(good)
            failures |= failed
            advance(len(batch), len(failed))
        self._finish(keys, failures)
        return list(failures.values())

    def _finish(self, keys: Iterable[Hashable], failures: Mapping[Hashable, Line]) -> None:
        self.close()
        places = {}  # item -> offset and length of its last line
        order, offset = [], 0
        for raw, line in scan_lines(self.path):
            order.append(None if line is None else self.key(line))
            places[order[-1]] = offset, len(raw)
            offset += len(raw)
        named = dict.fromkeys(keys if self.only else [*keys, *order])
        wanted = [key for key in named if key in places and key is not None and key not in failures]
        if wanted != order:
            with self.path.open("rb") as file:
                write_bytes(self.path, b"".join(_read(file, *places[key]) for key in wanted))
        failed = inside(self.path.parent, FAILURES)
        if failures:
            write_text(failed, "".join(json.dumps(line) + "\n" for line in failures.values()))
        else:
            failed.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, so that other processes can open it."""
        self._file.close()


def _read(file: Any, offset: int, length: int) -> bytes:
    file.seek(offset)
    return bytes(file.read(length))
