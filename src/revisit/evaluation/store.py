"""The answers on disk: append-only JSON lines that survive a kill at any moment, one folder per cell of the grid.

    OUTPUT/
      results.json                     what was measured (docs/evaluation.md describes every field)
      .lock                            held by the running process, released by the system when it dies
      cells/MODEL-METHOD-BENCHMARK-KEY/
        cell.json                      everything that could change an answer; KEY is its hash
        answers.jsonl                  one line per answer
        scores.json                    the terms of each metric, item by item

A cell never holds answers of two settings, because any difference in `cell.json` is another KEY. Within a cell an
answer belongs to one item *content* (prompt and image bytes), so a changed data file never meets an old answer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError

SCHEMA = 1  # of results.json


@dataclass(frozen=True)
class Line:
    """One answer as stored: `item` hashes prompt and image bytes, `prompt` the prompt alone, `seconds` is its share."""

    id: str
    item: str
    prompt: str
    text: str
    tokens: tuple[int, ...]
    counters: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> str:
        """The line without its line end; texts are escaped, so no text can contain a line end."""
        return json.dumps(asdict(self), ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Line:
        """The inverse of `to_json`; raises ValueError for anything else."""
        raw = json.loads(text)
        try:
            line = cls(
                **{**raw, "tokens": tuple(raw["tokens"])},
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"not an answer: {error}") from error
        if not all(isinstance(v, str) for v in (line.id, line.item, line.prompt, line.text)):
            raise ValueError("not an answer: id, item, prompt and text must be strings")
        return line


def digest(value: Any) -> str:
    """SHA-256 (hex) of `value` as canonical JSON; values JSON does not know enter by their repr."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        state = hashlib.sha256()
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def slug(text: str, limit: int = 40) -> str:
    """`text` as a piece of a file name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", text).strip("_.")[-limit:] or "x"


def disk_error(error: OSError, path: Path) -> RevisitError:
    """The sentence for a failed write: what happened, where, and that nothing already stored is lost."""
    reasons = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file may not grow further",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "the folder is not writable",
        errno.EPERM: "the folder is not writable",
        errno.ENOTDIR: "a file stands where a folder is needed",
        errno.EEXIST: "a file stands where a folder is needed",
    }
    reason = reasons.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
    return RevisitError(
        f"Cannot write {path}: {reason}. Every answer stored so far is intact; "
        "make room or choose another --out, and run the same command again to go on."
    )


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` by `value` in one step: a reader, or a kill, sees the old file or the new one, never a part."""
    data = (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def read_json(path: Path) -> Any:
    """The JSON in `path`; raises one sentence if it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RevisitError(f"{path} does not exist: give the --out folder of a `revisit eval` run.") from error
    except NotADirectoryError as error:
        raise RevisitError(f"{path.parent} is a file: give the --out folder of a `revisit eval` run.") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise RevisitError(f"{path} is not valid JSON ({error}); move it away and run `revisit eval` again.") from error


def read_results(output: Path) -> Any:
    """The results.json of an output folder; raises one sentence if it is absent or of another format."""
    results = read_json(output / "results.json")
    if not isinstance(results, dict) or results.get("schema") != SCHEMA or not isinstance(results.get("cells"), list):
        raise RevisitError(
            f"{output / 'results.json'} was not written by this version of `revisit eval`: give another --out, or move "
            "that file away (the answers beside it are kept)."
        )
    return results


def make_folder(path: Path) -> Path:
    """`path`, created if needed; raises one sentence where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, path) from error
    return path


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Holds `output` for this process; a second process is refused, a dead one's lock does not count."""
    try:
        import fcntl
    except ImportError as error:  # pragma: no cover - Windows
        raise RevisitError("`revisit eval` needs POSIX file locks; on Windows run it inside WSL.") from error
    path = make_folder(output) / ".lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            raise RevisitError(
                f"{output} is in use by {holder}; wait until it ends, or give this run another --out."
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            raise disk_error(error, path) from error
        yield
    finally:
        os.close(descriptor)  # releases the lock; the file stays, since removing it would race with the next holder


class Cell:
    """The answers of one (model, method, benchmark) under one identity, on disk."""

    def __init__(self, output: Path, names: tuple[str, str, str], identity: Mapping[str, Any]) -> None:
        self.identity = dict(identity)
        self.key = digest(self.identity)
        self.path = output / "cells" / "-".join([*(slug(name) for name in names), self.key[:12]])
        self._lines: dict[tuple[str, str], Line] = {}
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> Cell:
        """Reads what is stored, cuts an unfinished last line, and is ready to append."""
        make_folder(self.path)
        about = self.path / "cell.json"
        if not about.exists():
            write_json(about, {"key": self.key, "identity": json.loads(json.dumps(self.identity, default=repr))})
        elif read_json(about).get("key") != self.key:
            raise RevisitError(f"{about} belongs to other settings; move the folder {self.path} away.")
        path = self.path / "answers.jsonl"
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = repair(self._descriptor, path)
        except OSError as error:
            raise disk_error(error, path) from error
        self._lines = {(line.id, line.item): line for line in read_answers(path)}
        return self

    def close(self) -> None:
        """Ends appending; what is stored stays readable."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Cell:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, id: str, item: str) -> Line | None:
        """The answer to item `id` with content `item`, or None."""
        return self._lines.get((id, item))

    def append(self, lines: Iterable[Line]) -> int:
        """Stores those of `lines` that are not stored yet, all of them or none, and returns how many there were."""
        if self._descriptor is None:
            raise RuntimeError("the cell is not open")
        new = [line for line in lines if (line.id, line.item) not in self._lines]
        if not new:
            return 0
        data = b"".join(line.to_json().encode() + b"\n" for line in new)
        try:
            view = memoryview(data)
            while view:  # a write may be short; O_APPEND puts the rest behind it
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)  # shrinking needs no room: the file ends with a whole line again
            raise disk_error(error, self.path / "answers.jsonl") from error
        self._size += len(data)
        self._lines.update({(line.id, line.item): line for line in new})
        return len(new)


def repair(descriptor: int, path: Path) -> int:
    """Cuts what follows the last line end (a kill in the middle of a write) and returns the file's size."""
    size = os.fstat(descriptor).st_size
    end, step = size, 1 << 16
    while end > 0:
        start = max(0, end - step)
        place = os.pread(descriptor, end - start, start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end != size:
        os.ftruncate(descriptor, end)
        os.fsync(descriptor)
    return end


def read_answers(path: Path) -> Iterator[Line]:
    """The stored answers in the order they were written, an unfinished last line left out.

    A damaged line before the end is not the work of a kill; it is refused rather than guessed at.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                yield Line.from_json(raw.decode())
            except ValueError as error:
                raise RevisitError(
                    f"{path}, line {number} is damaged ({error}); delete that line and run the same command again, "
                    "which asks for that answer anew."
                ) from error
