"""Downloads over HTTP: every file is verified and appears only when it is complete."""

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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from revisit.errors import RevisitError
from revisit.io.files import file_digest

ATTEMPTS = 5
PAUSE = 0.5  # seconds before the second attempt, doubled for each further one
TIMEOUT = 60.0
CONNECTIONS = 8

Progress = Callable[[int], None]  # called with the number of files, or of rows, so far


@dataclass(frozen=True)
class Remote:
    """A file to download: its path below the data folder, and its URLs in the order to try them."""

    path: str
    urls: tuple[str, ...]
    members: tuple[str, ...] = ()  # files of a zip archive to unpack into its folder; the archive is removed
    sha256: str = ""  # of its content; empty if it is unknown

    @property
    def results(self) -> tuple[str, ...]:
        """The files that remain, below the data folder."""
        folder = PurePosixPath(self.path).parent
        return tuple(str(folder / member) for member in self.members) or (self.path,)


def fetch_all(remotes: Iterable[Remote], folder: Path, progress: Progress | None = None) -> None:
    """Download every file that is not yet below `folder`; raise RevisitError at the first that cannot be downloaded."""
    missing = [r for r in remotes if not all((folder / path).exists() for path in r.results)]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(fetch, remote, folder) for remote in missing]
        try:
            for done, job in enumerate(jobs, 1):
                job.result()
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
        raise RevisitError(f"{' or '.join(remote.urls)} was not found; the files may have moved.")
    try:
        if remote.sha256 and (digest := file_digest(part)) != remote.sha256:
            raise RevisitError(f"its SHA-256 is {digest[:12]}…, not {remote.sha256[:12]}…")
        if remote.members:
            _unpack(part, remote.members, target.parent)
        else:
            part.replace(target)
    except (RevisitError, zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        reason = str(error).rstrip(".")
        raise RevisitError(
            f"{remote.urls[0]} did not arrive as expected ({reason}) and was removed; run the same command again."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _download(url: str, part: Path) -> bool:
    """Write the content of `url` to `part`; return False if there is no such file."""
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "revisit-decoding"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply, part.open("wb") as file:
                shutil.copyfileobj(reply, file, 1 << 20)
                expected = int(reply.headers.get("Content-Length", file.tell()))
                if file.tell() != expected:
                    raise ConnectionError(f"{file.tell()} of {expected} bytes")
            return True
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (404, 410):
                    return False
                problem = f"status {error.code}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    part.unlink(missing_ok=True)
    raise RevisitError(
        f"{url} could not be downloaded after {ATTEMPTS} attempts ({problem}); run the same command again to resume."
    )


def _unpack(path: Path, members: Iterable[str], folder: Path) -> None:
    """Unpack members of an archive, whichever of its folders they are in; zipfile verifies their checksums."""
    with zipfile.ZipFile(path) as archive:
        names = {PurePosixPath(name).name: name for name in archive.namelist()}
        for member in members:
            part = folder / f"{member}.part"
            with archive.open(names[member]) as source, part.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            part.replace(folder / member)
