"""Files by HTTP: interrupted downloads resume, every file is checked, and none appears before it is complete.

A file grows as `NAME.part` and gets its name when it is complete: its length is what the server announced, its SHA-256 is the known
one, and without a known one an archive or an image can at least be opened.
"""

from __future__ import annotations

import http.client
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

from revisit.errors import RevisitError
from revisit.eval.benchmarks.io.drafts import ENDINGS, image_ending
from revisit.explain.files import file_digest

ATTEMPTS = 5
PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
TIMEOUT = 60.0
CONNECTIONS = 8
BUSY = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[int], None]  # called with the number of files, or of rows, so far


@dataclass(frozen=True)
class Remote:
    """A file to download: its path below the data folder, its addresses in the order to try them, and how it is checked."""

    path: str
    urls: tuple[str, ...]
    sha256: str = ""  # of the content, where it is known
    members: tuple[str, ...] = ()  # of a zip archive: only these are kept, in its folder, and the archive is removed

    @property
    def results(self) -> tuple[str, ...]:
        """The files that remain, below the data folder."""
        folder = PurePosixPath(self.path).parent
        return tuple(str(folder / member) for member in self.members) or (self.path,)


def mirrored(remote: Remote, mirror: str | None) -> Remote:
    """Return the same file on another server, which has `https://host/path` at `MIRROR/host/path`."""
    if mirror is None:
        return remote
    urls = tuple(f"{mirror.rstrip('/')}/{url.partition('://')[2]}" for url in remote.urls)
    return replace(remote, urls=urls)


def fetch_all(remotes: Iterable[Remote], folder: Path, progress: Progress | None = None) -> None:
    """Download every file that is not yet below `folder`; raise RevisitError at the first that cannot be downloaded."""
    remotes = list(remotes)
    waiting = [r for r in remotes if not all((folder / place).exists() for place in r.results)]
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


def fetch(remote: Remote, folder: Path) -> None:
    """Download, check and unpack one file."""
    target = folder / remote.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    if not any(_download(url, part) for url in remote.urls):
        raise RevisitError(
            f"{' or '.join(remote.urls)} was not found (status 404); the server may have moved its files."
        )
    try:
        _check(remote, part)
        if remote.members:
            _unpack(part, remote.members, target.parent)
            part.unlink()
        else:
            part.replace(target)
    except (RevisitError, zipfile.BadZipFile, zlib.error, RuntimeError, KeyError, EOFError) as error:
        part.unlink()
        reason = str(error).rstrip(".")
        raise RevisitError(
            f"{remote.urls[0]} did not arrive as expected ({reason}) and was removed; run the same command again."
        ) from error


def _download(url: str, part: Path) -> bool:
    """Complete `part` with the content of `url`, from where an earlier attempt or run stopped; False if there is no such file."""
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            _transfer(url, part)
            return True
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 404:
                    return False
                if error.code == 416:  # the part is longer than the file, so it is not its beginning
                    part.unlink(missing_ok=True)
                elif error.code not in BUSY:
                    raise RevisitError(f"{url} failed with status {error.code}.") from error
                problem = f"status {error.code}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    raise RevisitError(
        f"{url} could not be downloaded after {ATTEMPTS} attempts ({problem}); run the same command again to resume."
    )


def _transfer(url: str, part: Path) -> None:
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
            shutil.copyfileobj(reply, file, 1 << 20)
        if expected and part.stat().st_size != expected:
            raise ConnectionError(f"{part.stat().st_size} of {expected} bytes")


def _check(remote: Remote, part: Path) -> None:
    """Raise RevisitError for a wrong SHA-256, or for an image that cannot be opened."""
    if remote.sha256:
        found = file_digest(part)
        if found != remote.sha256:
            raise RevisitError(f"its SHA-256 is {found[:12]}…, not {remote.sha256[:12]}…")
    elif PurePosixPath(remote.path).suffix in ENDINGS.values():
        image_ending(part, "what was sent")


def _unpack(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Write the wanted members of a zip archive, whichever of its folders they are in; zipfile checks their checksums."""
    with zipfile.ZipFile(archive) as opened:
        names = {PurePosixPath(name).name: name for name in opened.namelist()}
        for member in members:
            part = folder / f"{member}.part"
            with opened.open(names[member]) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            part.replace(folder / member)
