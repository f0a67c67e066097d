"""The defects that an audit of the servers found, each as one attempt: prints what happens, as a table.

    PYTHONPATH=tests python tests/faults/reproduce.py                this version
    PYTHONPATH=other/tests:other/src python tests/faults/reproduce.py      another one

Words after the script's name choose attempts. Traffic goes to 127.0.0.1 only; a few minutes.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from chat_requests import JSON, odd_settings, question
from running import Server, save_model, serving
from slow_clients import HEAD, half_open

CHAT = "/v1/chat/completions"
Attempt = Callable[[Server], str]


def health(server: Server, seconds: float = 10) -> str:
    try:
        return str(httpx.get(server.url + "/health", timeout=seconds).status_code)
    except httpx.TransportError as error:
        return type(error).__name__


def costly(**fields: Any) -> Attempt:
    """Status, time, size of the answer and growth of one request."""

    def attempt(server: Server) -> str:
        before, began = server.held().memory, time.monotonic()
        try:
            reply = httpx.post(server.url + CHAT, json=question(0, **fields), timeout=60)
            told = f"{reply.status_code} after {time.monotonic() - began:.1f} s, {len(reply.content):,} bytes"
        except httpx.TransportError as error:
            told = f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
        return f"{told}, memory +{server.held().memory - before:,.0f} MB, /health {health(server)}"

    return attempt


def statuses(bodies: list[bytes], path: str = CHAT, **headers: str) -> Attempt:
    def attempt(server: Server) -> str:
        found: dict[str, int] = {}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for body in bodies:
                try:
                    status = str(client.post(path, content=body, headers={**JSON, **headers}).status_code)
                except httpx.TransportError as error:
                    status = type(error).__name__
                found[status] = found.get(status, 0) + 1
        return ", ".join(f"{count} × {status}" for status, count in sorted(found.items()))

    return attempt


def slow(seconds: float) -> Attempt:
    def attempt(server: Server) -> str:
        connections = half_open(server.port, 20, random.Random(3))
        time.sleep(seconds)
        still = 0
        for connection in connections:
            connection.setblocking(False)
            try:
                while connection.recv(4096):  # a refusal, then the end
                    pass
            except BlockingIOError:
                still += 1
            except OSError:
                pass
            connection.close()
        return f"{still} of 20 half-sent requests open after {seconds:g} s"

    return attempt


def crowd(server: Server) -> str:
    connections = half_open(server.port, 250, random.Random(1))
    found = f"{len(connections)} connected, /health {health(server, 5)}"
    for connection in connections:
        connection.close()
    return found


def aborted(server: Server) -> str:
    def counted() -> float:
        lines = httpx.get(server.url + "/metrics", timeout=30).text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith('revisit_requests_total{status="500"'))

    before = counted()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
            time.sleep(0.1)
    time.sleep(1)
    return f"5 aborted, {counted() - before:.0f} counted as 500"


def get(path: str, **headers: str) -> Attempt:
    return lambda server: str(httpx.get(server.url + path, headers=headers, timeout=30).status_code)


CHAIN = {"method": "chain", "settings": {"methods": ["vcd"] * 300}}
# name -> (flags, file descriptors, what is tried)
ATTEMPTS: dict[str, tuple[tuple[str, ...], int | None, Attempt]] = {
    "15 MB of text": ((), None, costly(messages=[{"role": "user", "content": "word " * 3_000_000}])),
    "a field name of 15 MB": ((), None, costly(**{"n" * 15_000_000: 1})),
    "a chain of 300 methods": ((), None, costly(decoding=CHAIN)),
    "settings of random types": ((), None, statuses([odd_settings(random.Random(n))[0] for n in range(300)])),
    "20 half-sent requests": ((), None, slow(35)),
    "250 half-sent requests on 200 descriptors": ((), 200, crowd),
    "aborted uploads": ((), None, aborted),
    "Host: evil.example": ((), None, get("/v1/models", host="evil.example")),
    "Authorization: bearer KEY": (
        ("--api-key", "right"),
        None,
        get("/v1/models", authorization="bearer right"),
    ),
    "Authorization: KEY alone": (("--api-key", "right"), None, get("/v1/models", authorization="right")),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        for name, (flags, descriptors, attempt) in ATTEMPTS.items():
            if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
                continue
            with serving(model, *flags, descriptors=descriptors) as server:
                try:
                    told = attempt(server)
                except httpx.TransportError as error:
                    told = f"no answer: {type(error).__name__}"
            sys.stdout.write(json.dumps({"what": name, "happens": told}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
