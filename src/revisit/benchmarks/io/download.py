"""Files by HTTP: interrupted downloads resume, every file is checked, and none appears before it is complete.

A file grows as `NAME.part` and gets its name when it is whole: as long as the server said, with the SHA-256 that is known,
or at least a picture. Free disk space is compared with what is to come before anything is written.
"""

from __future__ import annotations

import http.client
import logging
import shutil
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from revisit.benchmarks.io.drafts import picture_ending
from revisit.benchmarks.io.files import file_digest
from revisit.errors import RevisitError

log = logging.getLogger(__name__)

ATTEMPTS = 5
PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
TIMEOUT = 60.0
CHUNK = 1 << 20
CONNECTIONS = 8
BUSY = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[int], None]  # called with the number of files that are there


@dataclass(frozen=True)
class Remote:
    """A file to download: its place below the data folder, its addresses in the order to try them, and what it must be."""

    path: str
    urls: tuple[str, ...]
    sha256: str = ""  # of the content, where it is known
    size: int = 0  # in bytes, about, for the check of disk space
    members: tuple[str, ...] = ()  # of a zip archive: only these are kept, in its folder, and the archive is removed

    @property
    def results(self) -> tuple[str, ...]:
        """What is there in the end, below the data folder."""
        folder = PurePosixPath(self.path).parent
        return tuple(str(folder / PurePosixPath(member).name) for member in self.members) or (self.path,)


def mirrored(remote: Remote, mirror: str | None) -> Remote:
    """The same file from another server, which keeps `https://host/path` at `MIRROR/host/path`."""
    if mirror is None:
        return remote
    urls = tuple(f"{mirror.rstrip('/')}/{url.partition('://')[2]}" for url in remote.urls)
    return replace(remote, urls=urls)


def fetch_all(remotes: Iterable[Remote], folder: Path, progress: Progress | None = None) -> None:
    """Every file, below `folder`; those that are there already are left alone. Raises after the first that cannot be had."""
    remotes = list(remotes)
    waiting = [r for r in remotes if not all((folder / place).exists() for place in r.results)]
    check_space(folder, sum(r.size * (2 if r.path.endswith(".zip") else 1) - _so_far(r, folder) for r in waiting))
    done = len(remotes) - len(waiting)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(fetch, remote, folder) for remote in waiting]
        try:
            for job in jobs:
                job.result()
                done += 1
                if progress is not None:
                    progress(done)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _so_far(remote: Remote, folder: Path) -> int:
    part = _part(folder / remote.path)
    return part.stat().st_size if part.is_file() else 0


def check_space(folder: Path, needed: int) -> None:
    """Raises before anything is written if `needed` bytes do not fit where `folder` is."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RevisitError(
            f"{folder} needs {_megabytes(needed)} more, and the disk has {_megabytes(free)} left; make room or choose "
            "another folder."
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def fetch(remote: Remote, folder: Path) -> None:
    """One file: downloaded or gone on with, checked, unpacked, and only then under its name."""
    target = folder / remote.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _part(target)
    _download(remote, part)
    _check(remote, part)
    if remote.members:
        _unpack(remote, part, target.parent)
        part.unlink()
    else:
        part.replace(target)


def _part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def _download(remote: Remote, part: Path) -> None:
    """From the first address that has the file."""
    for number, url in enumerate(remote.urls, 1):
        try:
            return _transfer(url, part)
        except FileNotFoundError as error:
            if number == len(remote.urls):
                where = " or ".join(remote.urls)
                raise RevisitError(
                    f"{where} is not there (status 404); the server may have moved its files."
                ) from error
    return None


def _transfer(url: str, part: Path) -> None:
    """The whole content of `url` in `part`, going on where an earlier attempt, or an earlier run, stopped."""
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            return _continue(url, part)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    raise FileNotFoundError(url) from error
                if error.code == 416:  # what is there is longer than the file: not its beginning
                    part.unlink(missing_ok=True)
                elif error.code not in BUSY:
                    raise RevisitError(f"{url} was refused with status {error.code}.") from error
                problem = f"status {error.code}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
        log.info("%s broke off (%s); going on.", url, problem)
    raise RevisitError(
        f"{url} could not be downloaded after {ATTEMPTS} attempts ({problem}); run the same command again to resume."
    )


def _continue(url: str, part: Path) -> None:
    start = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "revisit-decoding"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        if reply.status != 206:  # the server sends everything
            start = 0
        expected = start + int(reply.headers.get("Content-Length", -start))
        with part.open("r+b" if start else "wb") as file:
            file.seek(start)
            shutil.copyfileobj(reply, file, CHUNK)
        if expected and part.stat().st_size != expected:
            raise ConnectionError(f"{part.stat().st_size} of {expected} bytes")


def _check(remote: Remote, part: Path) -> None:
    """Removes and refuses what is not the file that was asked for."""
    try:
        if remote.sha256:
            found = file_digest(part)
            if found != remote.sha256:
                raise RevisitError(f"its SHA-256 is {found[:12]}…, not {remote.sha256[:12]}…")
        elif remote.path.endswith(".zip"):
            if not zipfile.is_zipfile(part):
                raise RevisitError("it is no zip archive")
        else:
            picture_ending(part, "what was sent")
    except RevisitError as error:
        part.unlink()
        reason = str(error).rstrip(".")
        raise RevisitError(
            f"{remote.urls[0]} did not arrive as expected ({reason}) and was removed; run the same command again."
        ) from error


def _unpack(remote: Remote, archive: Path, folder: Path) -> None:
    """The wanted members, whose checksums the archive knows."""
    try:
        with zipfile.ZipFile(archive) as opened:
            for member in remote.members:
                target = folder / PurePosixPath(member).name
                with opened.open(_entry(opened, member)) as source, _part(target).open("wb") as file:
                    shutil.copyfileobj(source, file, CHUNK)
                _part(target).replace(target)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, KeyError, EOFError) as error:
        archive.unlink()
        raise RevisitError(
            f"{remote.urls[0]} is damaged ({error}) and was removed; run the same command again."
        ) from error


def _entry(archive: zipfile.ZipFile, member: str) -> str:
    """The member's name in the archive: as given, or in another folder."""
    names = archive.namelist()
    if member in names:
        return member
    base = PurePosixPath(member).name
    same = [name for name in names if PurePosixPath(name).name == base]
    if len(same) != 1:
        raise KeyError(f"it has {len(same)} files named {base}")
    return same[0]
