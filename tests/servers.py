"""A server in a thread of this process, and requests for it."""

from __future__ import annotations

import base64
import functools
import io
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from PIL.Image import Image

import families
from revisit.decoding.method import Method
from revisit.methods.revisit import ReVisiT
from revisit.serve.app import Service, build
from revisit.serve.connection import configure
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits


class Running:
    """A server that is running."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.server = uvicorn.Server(configure(build(service), service.limits, host="127.0.0.1", port=0))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.address: tuple[str, int] = self.server.servers[0].sockets[0].getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        """Send a request; fields that are None are left out."""
        sent = {name: value for name, value in {"model": "tiny", **fields}.items() if value is not None}
        return httpx.post(self.url + path, json=sent, timeout=60)


@contextmanager
def serving(
    limits: Limits | None = None, method: Method | None = None, decoder: Decoder | None = None, **options: Any
) -> Iterator[Running]:
    """Serve a tiny random LLaVA, or another decoder, under the name "tiny"."""
    decoder = decoder or Decoder(*families.build("llava"))
    running = Running(Service(decoder, "tiny", method or ReVisiT(), limits or Limits(), **options))
    try:
        yield running
    finally:
        running.server.should_exit = True
        running.thread.join(30)


def heed_signals() -> None:
    """Undo that a test run in the background or under nohup ignores signals."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `revisit serve` with a tiny random LLaVA; yield the process and the base address of its API."""
    for part in families.build("llava"):
        part.save_pretrained(folder)
    command = [sys.executable, "-m", "revisit", "serve", "-m", str(folder), "--name", "tiny", "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if " at http://" in line)
            yield process, line.partition(" at ")[2].split()[0]
        finally:
            process.kill()


def data_uri(image: Image, form: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return as_uri(buffer.getvalue(), form)


def as_uri(file: bytes, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{base64.b64encode(file).decode()}"


@functools.cache
def bomb(width: int, height: int) -> bytes:
    """Return a small gray PNG file whose header declares this size; its data is complete only for strips."""

    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = piece(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = piece(b"IDAT", zlib.compress(bytes(min(height * (width + 1), 10_000_000))))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + piece(b"IEND", b"")


def uri(seed: int) -> str:
    return data_uri(families.image(seed))


def messages(seed: int | None, text: str = "What is this?") -> Any:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if seed is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": uri(seed)}})
    return [{"role": "user", "content": parts}]
