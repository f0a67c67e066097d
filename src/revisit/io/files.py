"""Read files named in data safely, and write files whole or not at all.

File names from data go through `path_within`, and files are opened by `open_regular`, which raises an error for pipes and devices: reading
them could block or never end.

`LineFile` is an append-only file of JSON objects, one per line, each with a checksum. A kill at any byte costs at most the lines being
written. Damaged lines are skipped and stay in the file; their content can be appended again.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock, Timeout

from revisit.errors import RevisitError

try:
    import fcntl
except ImportError:  # Windows: two processes that append to one file are not detected
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

# Do not wait for the writer of a pipe. Windows translates line ends unless files are binary.
FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
MAX_BYTES = 8 << 30  # of a data file; some tables have 1 GB
BLOCK = 1 << 20
TEMPORARY = ".revisit-tmp"  # ends the names of files that are being written
HOUR = 3600  # seconds; no write takes longer
CHECKSUM = "checksum"
CHECKSUM_LENGTH = 16  # characters


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of `value` as canonical JSON; values that JSON cannot express are replaced by their repr."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def slug(text: str, limit: int = 40) -> str:
    """Return the last `limit` characters of a text, in characters that are safe in a file name."""
    return re.sub(r"[^A-Za-z0-9._]+", "_", text).strip("_.")[-limit:] or "x"


# -- reading --------------------------------------------------------------------------------------------------------


def local_path(name: str | Path) -> Path:
    """Return the path that a user has typed, which may begin with `~` or `file://`."""
    if str(name).startswith("file:"):
        return Path(url2pathname(urlsplit(str(name)).path))
    return Path(name).expanduser()


def path_within(folder: Path, name: str | Path) -> Path:
    """Return the absolute path of a file in a folder; raise RevisitError if the name leads out of the folder.

    Only names are checked: links in a data folder were created by its owner and are followed.
    """
    base, path = os.path.abspath(folder), os.path.abspath(folder / name)
    if "\0" in str(name) or not path.startswith(base.rstrip(os.sep) + os.sep):
        raise RevisitError(f"{str(name)[:200]!r} is outside the folder {folder}; such files are not read.")
    return Path(path)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading; raise OSError for pipes, devices and folders."""
    descriptor = os.open(path, os.O_RDONLY | FLAGS)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.ENXIO, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; raise OSError for anything else."""
    with open_regular(path) as file:
        return read_blocks(file, limit)


def read_blocks(file: IO[bytes], limit: int) -> bytes:
    """Return the rest of an open file in blocks, so that memory follows its content; raise OSError if it is larger than `limit`."""
    content = io.BytesIO()
    while block := file.read(BLOCK):
        if content.write(block) and content.tell() > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes")
    return content.getvalue()


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a regular file's bytes."""
    state = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            state.update(block)
    return state.hexdigest()


# -- writing --------------------------------------------------------------------------------------------------------


def disk_error(error: OSError, path: Path, advice: str = "Choose another --out") -> RevisitError:
    """Return the error for a failed write."""
    return RevisitError(f"Cannot write {path}: {error.strerror or error}. {advice}.")


def make_folder(path: Path) -> Path:
    """Create a folder if needed and return it; raise RevisitError unless files can be written into it.

    Files that killed writers left there are removed.
    """
    if path.suffix.lower() in (".html", ".htm", ".json", ".jsonl", ".csv"):
        raise RevisitError(f"--out must be a folder: use {path.with_suffix('')}, not {path}.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        for left in path.glob(f".*{TEMPORARY}"):
            with suppress(FileNotFoundError):  # another process has finished it
                if time.time() - left.lstat().st_mtime > HOUR:
                    left.unlink()
    except OSError as error:
        raise disk_error(error, path) from error
    return path


def inside(folder: str | Path, *names: str) -> Path:
    """Return a path in a results folder; raise RevisitError if a part of it is a link, which could lead anywhere.

    The folder itself is the user's choice and may be a link.
    """
    path = Path(folder)
    for name in names:
        path = path / name
        if path.is_symlink():
            raise RevisitError(
                f"{path} is a link, and results are not written through links: remove it, or use another --out."
            )
    return path


def write_json(path: Path, value: Any) -> None:
    """Replace a file in one step by a value as JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step by a text in UTF-8; lone surrogates become "?"."""
    write_bytes(path, text.encode(errors="replace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, also after a kill or with several writers."""
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path, "Make room or fix that, and run the same command again") from error


def _remove_lock(lock: FileLock) -> None:
    """Remove the file of a held lock, while nobody else can hold it; on Windows, the release does it."""
    with suppress(OSError):
        Path(lock.lock_file).unlink()


def _cannot_write(folder: Path, error: OSError, left: str) -> RevisitError:
    return RevisitError(
        f"Cannot write {folder}: {error.strerror or error}. {left}; make room or choose another folder (REVISIT_CACHE names the "
        "cache), and run the same command again."
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait, with a notice, until no other process prepares this folder."""
    lock = FileLock(folder.with_name(f".{folder.name}.wait"), is_singleton=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("Another process is writing %s; waiting until it ends.", folder)
        lock.acquire()
    except OSError as error:
        raise _cannot_write(folder, error, "Nothing was left behind") from error
    try:
        yield
    finally:
        _remove_lock(lock)
        lock.release()


@contextmanager
def new_folder(folder: Path, *, resume: bool = False) -> Iterator[Path]:
    """Yield a hidden folder that is renamed to `folder` when the block succeeds, and removed when it fails.

    With `resume` it is kept, and the next call continues with it. One process at a time can fill a folder.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    lock = FileLock(draft.with_suffix(".lock"), timeout=0, is_singleton=False)
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        with lock:
            try:
                if not resume:
                    shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(exist_ok=True)
                yield draft
                with suppress(OSError):
                    folder.rmdir()  # replaces an empty folder, never one with files
                draft.rename(folder)
            except BaseException:
                if not resume:
                    shutil.rmtree(draft, ignore_errors=True)
                raise
            finally:
                _remove_lock(lock)
    except Timeout as error:
        raise RevisitError(f"Another process is writing {folder}; wait until it ends.") from error
    except OSError as error:
        left = "Complete files were kept" if resume else "Nothing was left behind"
        raise _cannot_write(folder, error, left) from error


# -- lines ----------------------------------------------------------------------------------------------------------


def encode(value: Mapping[str, Any]) -> bytes:
    """Return an object as a line with a checksum."""
    line = {**value, CHECKSUM: digest(value)[:CHECKSUM_LENGTH]}
    return json.dumps(line, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the object of a line; raise ValueError if the checksum does not match."""
    value = json.loads(line)
    if not isinstance(value, dict) or value.pop(CHECKSUM, None) != digest(value)[:CHECKSUM_LENGTH]:
        raise ValueError("the checksum does not match")
    return value


def scan_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield every whole line of a file with its object, or None if it is damaged."""
    with open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                yield line, decode(line)
            except (ValueError, RecursionError):
                yield line, None


def read_lines(path: Path, keep: Callable[[dict[str, Any]], Any] = lambda value: value) -> tuple[list[Any], int, int]:
    """Return the objects in a file, the number of damaged lines, and the number of bytes before an unfinished last line.

    `keep` returns what to keep of an object.
    """
    objects, damaged, size = [], 0, 0
    for line, value in scan_lines(path):
        size += len(line)
        if value is None:
            damaged += 1
        else:
            objects.append(keep(value))
    return objects, damaged, size


class LineFile:
    """A file of JSON objects that only this process can append to; opening it in another process raises an error.

    Attributes:
        objects: The objects that the file had when it was opened, or what `keep` returned for them.
        damaged: The number of lines that were skipped.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], Any] = lambda value: value) -> None:
        self.path = path
        make_folder(path.parent)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | FLAGS
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise disk_error(error, path) from error
        try:
            if fcntl:  # the system releases the lock when the process dies
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.objects, self.damaged, self._size = read_lines(path, keep)
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

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Store all of the objects, or none."""
        data = b"".join(map(encode, objects))
        try:
            view = memoryview(data)
            while view:  # a write may be short
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError as error:
            os.ftruncate(self._descriptor, self._size)  # back to the end of a whole line; needs no space
            advice = "Everything stored so far is intact; fix that and run the same command again to resume"
            raise disk_error(error, self.path, advice) from error
        self._size += len(data)

    def close(self) -> None:
        """Close the file, so that other processes can open it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
