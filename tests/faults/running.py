"""`revisit serve` in a process of its own, and the resources it holds."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

import families


@dataclass(frozen=True)
class Held:
    """Resident megabytes, open descriptors and threads of a process."""

    memory: float
    descriptors: int
    threads: int

    def within(self, other: Held) -> bool:
        """Return whether nothing exceeds the other by more than a tenth."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(mine <= 1.1 * theirs for mine, theirs in pairs)


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.port = int(url.rsplit(":", 1)[1])

    def held(self) -> Held:
        place = Path(f"/proc/{self.process.pid}")
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        return Held(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir(place / "fd")), int(status["Threads"]))


def save_model(folder: Path) -> Path:
    """Save a tiny random LLaVA."""
    model, processor = families.build("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    """Run `revisit serve` on a free port until the block ends."""

    def end_with_parent() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    process = subprocess.Popen(
        [sys.executable, "-m", "revisit", "serve", "-m", str(model), "--name", "tiny", "--port", "0", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=end_with_parent,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if " at http://" in line:
                url = line.partition(" at ")[2].split()[0].removesuffix("/v1")
                break
        else:
            raise AssertionError("the server did not start: " + "".join(lines))
        threading.Thread(target=lambda: list(process.stdout or ()), daemon=True).start()  # a full pipe would stop it
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                httpx.get(url + "/health", timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield Server(process, url)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
