"""The answers on disk: append-only JSON lines that survive a kill at any moment, one folder per cell of the grid.

    OUTPUT/
      results.json                     what was measured (docs/evaluation.md describes every field)
      .lock, .holder                   the lock of the running process, released by the system when it dies, and its PID
      cells/MODEL-METHOD-BENCHMARK-KEY/
        cell.json                      everything that could change an answer; KEY is its hash
        answers.jsonl                  one line per answer
        scores.json                    the terms of each metric, item by item

A cell never holds answers of two settings, because any difference in `cell.json` is another KEY. Within a cell an
answer belongs to one item *content* (prompt and image bytes), so an old answer is never used for a changed item.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import ValidationError

from revisit.errors import RevisitError
from revisit.evaluation.records import (
    SCHEMA,
    Answer,
    CellRecord,
    Record,
    RunRecord,
    ScoresRecord,
    checksum,
    first_problem,
    sealed,
)


def digest(value: Any) -> str:
    """SHA-256 (hex) of `value` as canonical JSON; values JSON does not know enter by their repr."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def slug(text: str, limit: int = 40) -> str:
    """`text` as a piece of a file name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", text).strip("_.")[-limit:] or "x"


def disk_error(error: OSError, path: Path, *, answers: bool = False) -> RevisitError:
    """The error for a failed write; with `answers`, it says that no stored answer is lost."""
    todo = "Choose another --out"
    if answers:
        todo = "Every answer stored so far is intact; fix that and run the same command again to resume"
    return RevisitError(f"Cannot write {path}: {error.strerror or error}. {todo}.")


def check_file(path: Path) -> None:
    """Raises OSError for pipes and devices, which would block or never end; a missing file is left to the reader."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.ENXIO, "it is a pipe or a device, not a file", str(path))


def clear(path: Path) -> Path:
    """`path`, safe to write to: a link, which may lead anywhere, or a pipe in its place is removed first."""
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        path.unlink()
    return path


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` by `value` in one step: a reader, or a kill, sees the old file or the new one, never a part."""
    data = (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with clear(temporary).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):  # the folder may not be writable
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path, answers=True) from error


def read_json(path: Path) -> Any:
    """The JSON in `path`; raises RevisitError if it is absent, unreadable or not JSON."""
    try:
        check_file(path)
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = f"{path.parent} is a file" if path.parent.is_file() else f"{path} does not exist"
        raise RevisitError(f"{problem}: give the --out folder of a `revisit eval` run.") from error
    except OSError as error:
        raise RevisitError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is not valid JSON ({error}); {AGAIN}") from error


KEY = 12  # digits of a cell's key that end its folder's name
AnyRecord = TypeVar("AnyRecord", bound=Record)
AGAIN = "move it away and run the same `revisit eval` command again (stored answers are kept)."


class Damaged(RevisitError):
    """A stored file that is not what was written."""


def read_record(path: Path, kind: type[AnyRecord]) -> AnyRecord:
    """A stored record; raises RevisitError if it is absent, of another format, or not what was written."""
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise Damaged(f"{path} is damaged: it holds a {type(raw).__name__}, not a record; {AGAIN}")
    number = raw.get("schema")
    if not isinstance(number, int):
        raise Damaged(f"{path} is damaged: it has no schema number; {AGAIN}")
    if number != SCHEMA:
        raise RevisitError(f"{path} has format {number}; this version reads {SCHEMA}: {AGAIN}")
    if raw.get("checksum") != checksum(raw):
        raise Damaged(f"{path} is damaged: its checksum does not match; {AGAIN}")
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise Damaged(f"{path} is damaged ({first_problem(error)}); {AGAIN}") from error


def write_record(path: Path, value: Mapping[str, Any], kind: type[Record]) -> dict[str, Any]:
    """Replaces `path` by a record in one step, with its checksum; returns what was written."""
    record = sealed({"schema": SCHEMA, **value})
    kind.model_validate(record)
    write_json(path, record)
    return record


def read_results(output: Path) -> dict[str, Any]:
    """The results.json of an output folder as plain data; raises RevisitError if it is absent, damaged or of another format."""
    path = output / "results.json"
    raw = read_json(path)
    if isinstance(raw, dict) and not {"schema", "cells"} & raw.keys():
        raise RevisitError(f"{path} was not written by `revisit eval`: use another --out, or move that file.")
    results = read_record(path, RunRecord).model_dump(mode="json", by_alias=True)
    for cell in results["cells"]:
        if cell["status"] == "unfinished":  # its answers have grown since this file was written
            try:
                stored = {line.id: line.seconds for line in sort_lines(output / cell["path"] / "answers.jsonl")[0]}
            except OSError:  # nothing was answered yet, or nothing can be read
                stored = {}
            cell["answers"], cell["seconds"] = min(len(stored), cell["items"]), round(sum(stored.values()), 3)
    return results


def unfinished(results: Mapping[str, Any]) -> str:
    """The notice that a run is incomplete, with the commands that finish it, from what `read_results` returned; else empty."""
    cells = [cell for cell in results["cells"] if cell["status"] != "complete"]
    if not cells:
        return ""
    listed = "; ".join(partial_text(cell) for cell in cells[:5])
    more = f"; and {len(cells) - 5} more" if len(cells) > 5 else ""
    commands = dict.fromkeys(shlex.join(cell["provenance"]["argv"]) for cell in cells)
    return (
        f"This run is incomplete: {len(cells)} of {len(results['cells'])} combinations of model, method and benchmark have no "
        f"result ({listed}{more}). To finish it, run: {' ; '.join(commands)}"
    )


def partial_text(cell: Mapping[str, Any]) -> str:
    """A cell that is not complete: what it is, and how many of its answers are there."""
    seed = f" · seed {cell['seed']}" if cell["seed"] else ""
    name = f"{cell['model']['name']} · {cell['method']['label']} · {cell['benchmark']['label']}{seed}"
    why = ", unreadable images" if cell["status"] == "unreadable images" else ""
    return f"{name}: {cell['answers']} of {cell['items']} answers{why}"


def read_scores(folder: Path) -> ScoresRecord:
    """The scores.json of a cell's folder."""
    found = read_record(folder / "scores.json", ScoresRecord)
    if not folder.name.endswith(found.key[:KEY]):
        raise Damaged(f"{folder / 'scores.json'} belongs to another model, method or benchmark; {AGAIN}")
    return found


def make_folder(path: Path) -> Path:
    """`path`, created if needed; raises RevisitError where that is not possible, or where nothing can be written into it."""
    if path.suffix.lower() in (".html", ".htm", ".json"):
        raise RevisitError(f"--out must be a folder: use {path.with_suffix('')}, not {path}.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    except OSError as error:
        raise disk_error(error, path) from error
    return path


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Holds `output` for this process; a second process is refused, a dead one's lock does not count."""
    path, holder = make_folder(output) / ".lock", output / ".holder"
    lock = FileLock(path, timeout=0, is_singleton=False)
    try:
        clear(path)
        lock.acquire()
    except Timeout as error:
        try:
            name = holder.read_text("utf-8", errors="replace").strip()[:200]
        except OSError:
            name = ""
        raise RevisitError(
            f"{output} is in use by {name or 'another process'}; wait until it ends, or use another --out."
        ) from error
    except OSError as error:
        raise disk_error(error, path) from error
    try:
        try:
            clear(holder).write_text(f"process {os.getpid()} on {socket.gethostname()}\n", "utf-8")
        except OSError as error:
            raise disk_error(error, holder) from error
        yield
    finally:
        lock.release()


class Cell:
    """The answers of one (model, method, benchmark) under one identity, on disk."""

    def __init__(self, output: Path, names: Sequence[str], identity: Mapping[str, Any]) -> None:
        self.identity = dict(identity)
        self.key = digest(self.identity)
        self.path = output / "cells" / "-".join([*(slug(name) for name in names), self.key[:KEY]])
        self.repairs: list[str] = []  # what was repaired when the cell was opened
        self._lines: dict[tuple[str, str], Answer] = {}
        self._descriptor: int | None = None
        self._size = 0

    def open(self) -> Cell:
        """Reads and repairs what is stored; then answers can be appended.

        An incomplete last line, which a kill leaves, is cut off. A damaged line is moved to `damaged.jsonl` and reported in `repairs`;
        its answer is missing from then on.
        """
        make_folder(self.path)
        self._open_about(self.path / "cell.json")
        path = self.path / "answers.jsonl"
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW  # behind a link is a file of somebody else
        try:
            check_file(path)
            descriptor = os.open(path, flags | os.O_CREAT, 0o644)
            os.close(descriptor)
            lines, damaged = sort_lines(path)
            _keep_whole_lines(path, {number for number, _ in damaged})
            self._descriptor = os.open(path, flags)
            self._size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disk_error(error, path, answers=True) from error
        if damaged:
            numbers = ", ".join(str(number) for number, _ in damaged[:5]) + (", …" if len(damaged) > 5 else "")
            answers = "1 answer is" if len(damaged) == 1 else f"{len(damaged)} answers are"
            self.repairs.append(f"{path}: {answers} damaged (line {numbers}) and will be regenerated.")
        self._lines = {(line.id, line.item): line for line in lines}
        return self

    def _open_about(self, path: Path) -> None:
        """Checks `cell.json`; writes it if it is missing or damaged, since its content is known."""
        try:
            known = read_record(path, CellRecord).key if path.exists() else None
        except Damaged:
            known = None
            self.repairs.append(f"{path} was damaged and has been rewritten.")
        if known is None:
            write_record(path, {"key": self.key, "identity": self.identity}, CellRecord)
        elif known != self.key:
            raise RevisitError(f"{path} belongs to other settings; move the folder {self.path}.")

    def close(self) -> None:
        """Ends appending; what is stored stays readable."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Cell:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, id: str, item: str) -> Answer | None:
        """The answer to item `id` with content `item`, or None."""
        return self._lines.get((id, item))

    def append(self, lines: Iterable[Answer]) -> int:
        """Stores those of `lines` that are not stored yet, all of them or none, and returns how many there were."""
        if self._descriptor is None:
            raise RuntimeError("the cell is not open")
        new = [line for line in lines if (line.id, line.item) not in self._lines]
        if not new:
            return 0
        data = b"".join(line.to_json(self.key[:KEY]).encode() + b"\n" for line in new)
        try:
            view = memoryview(data)
            while view:  # a write may be short; O_APPEND puts the rest behind it
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)  # shrinking needs no room: the file ends with a whole line again
            raise disk_error(error, self.path / "answers.jsonl", answers=True) from error
        self._size += len(data)
        self._lines.update({(line.id, line.item): line for line in new})
        return len(new)


def sort_lines(path: Path) -> tuple[list[Answer], list[tuple[int, str]]]:
    """The stored answers in the order they were written, and the number and problem of every damaged line."""
    good, damaged = [], []
    cell = path.parent.name[-KEY:]
    check_file(path)
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                break  # incomplete: the process was killed
            try:
                good.append(Answer.from_json(raw.decode(), cell))
            except (ValueError, RecursionError) as error:
                damaged.append((number, str(error) or type(error).__name__))
    return good, damaged


def _keep_whole_lines(path: Path, damaged: Set[int]) -> None:
    """Moves damaged lines to `damaged.jsonl` and drops an unfinished last line; the file is replaced in one step."""
    with path.open("rb") as file:
        lines = file.readlines()
    kept = [line for number, line in enumerate(lines, 1) if number not in damaged and line.endswith(b"\n")]
    if len(kept) == len(lines):
        return
    temporary, aside_path = clear(path.with_name(f".{path.name}.tmp")), clear(path.with_name("damaged.jsonl"))
    if damaged:
        with aside_path.open("ab") as aside:
            aside.writelines(lines[number - 1] for number in sorted(damaged))
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_answers(path: Path) -> Iterator[Answer]:
    """The stored answers in the order they were written, an unfinished last line left out; raises RevisitError for a damaged one."""
    try:
        lines, damaged = sort_lines(path)
    except OSError as error:
        raise RevisitError(f"{path} cannot be read: {error.strerror}.") from error
    if damaged:
        number, problem = damaged[0]
        raise RevisitError(
            f"{path}, line {number} is damaged ({problem[:200]}); run the same `revisit eval` command again to "
            "regenerate that answer."
        )
    return iter(lines)
