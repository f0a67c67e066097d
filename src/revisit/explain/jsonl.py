"""Append-only files of JSON objects, one per line and each with a checksum.

A kill at any byte costs at most the lines being written. Damaged lines are skipped and stay where they are: whoever needs their content
appends it again. Texts are escaped, so no text contains a line end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from revisit.errors import RevisitError
from revisit.explain.files import FLAGS, digest, disk_error, make_folder, open_regular

try:
    import fcntl
except ImportError:  # Windows, where two processes that append to one file are not noticed
    fcntl = None  # type: ignore[assignment]

CHECKSUM = "checksum"
LENGTH = 16  # characters of a line's checksum


def encode(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line."""
    line = {**row, CHECKSUM: digest(row)[:LENGTH]}
    return json.dumps(line, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the row of a line; raise ValueError unless it is exactly what `encode` wrote."""
    row = json.loads(line)
    if not isinstance(row, dict) or row.pop(CHECKSUM, None) != digest(row)[:LENGTH]:
        raise ValueError("the checksum does not match")
    return row


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a file in order, and the number of damaged lines; an unfinished last line is neither."""
    rows, damaged, _ = _read(path)
    return rows, damaged


def _read(path: Path) -> tuple[list[dict[str, Any]], int, int]:
    """Return the rows, the number of damaged lines, and the length of the file without an unfinished last line."""
    rows, damaged, size = [], 0, 0
    with open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            size += len(line)
            try:
                rows.append(decode(line))
            except (ValueError, RecursionError):
                damaged += 1
    return rows, damaged, size


class LineFile:
    """A file of rows that this process may append to; any other process that opens it gets an error.

    Attributes:
        rows: The rows that the file had when it was opened.
        damaged: The number of lines that were skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        # A link is not followed: behind it is a file of somebody else.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | FLAGS
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            if fcntl:
                fcntl.flock(
                    self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB
                )  # the system releases it when the process dies
            self.rows, self.damaged, self._size = _read(path)
            if self._size < os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, self._size)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise RevisitError(
                f"{path} is in use by another process; wait until it ends, or use another --out."
            ) from error
        except OSError as error:
            os.close(self._descriptor)
            raise disk_error(error, path) from error

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store some rows, all of them or none."""
        data = b"".join(map(encode, rows))
        try:
            view = memoryview(data)
            while view:  # a write may be short; O_APPEND puts the rest behind it
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)  # shrinking needs no room: the file ends with a whole line again
            todo = "Everything stored so far is intact; fix that and run the same command again to resume"
            raise disk_error(error, self.path, todo) from error
        self._size += len(data)

    def close(self) -> None:
        """End appending and let other processes in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> LineFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
