"""Attacks on a running server: each gets its status, memory stays bounded, and a second client gets the right answer meanwhile."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from PIL import Image
from test_server_faults import CHAT, JSON, resident, text_of

from chat_requests import question
from revisit.serve.limits import Limits
from servers import Running, as_uri, serving

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CIRCLE = {"type": "object", "properties": {"a": {"allOf": [{"$ref": "#/properties/a"}]}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(Limits(body_bytes=8 << 20, held_bytes=64 << 20, read_seconds=10, seconds=60)) as running:
        yield running


def with_image(data: bytes, **fields: Any) -> bytes:
    body = question(0, max_tokens=2, **fields)
    body["messages"][0]["content"][0]["image_url"]["url"] = as_uri(data)
    return json.dumps(body).encode()


def padded(size: int) -> bytes:
    """Return a small image with as many bytes that no decoder reads."""
    whole = base64.b64decode(question(0)["messages"][0]["content"][0]["image_url"]["url"].partition(",")[2])
    piece = struct.pack(">I", size) + b"prVt" + bytes(size) + struct.pack(">I", zlib.crc32(b"prVt" + bytes(size)))
    return whole[:33] + piece + whole[33:]


def zeros(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side)).save(file, "PNG")
    return file.getvalue()


def post(server: Running, body: bytes, **headers: str) -> int:
    return httpx.post(server.url + CHAT, content=body, headers={**JSON, **headers}, timeout=120).status_code


def leaving(server: Running, body: bytes) -> int:
    with suppress(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, content=body, headers=JSON, timeout=0.2)
    return 499


def raw(server: Running, sent: bytes) -> int:
    """Send bytes and leave; return the status that came within a second, 0 if none."""
    with socket.create_connection(server.address) as connection:
        connection.sendall(sent)
        connection.settimeout(1)
        with suppress(TimeoutError):
            return int(connection.recv(12)[9:] or 0)
    return 0


LONG = {"max_tokens": 1024, "stop": ["never seen"]}
# name -> what one client does, and the statuses that it may get
ATTACKS: dict[str, tuple[Callable[[Running], int], set[int]]] = {
    "a schema that fails": (
        lambda server: post(
            server,
            json.dumps(
                question(0, max_tokens=30, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": CIRCLE}})
            ).encode(),
        ),
        {400},
    ),
    "a client that leaves": (lambda server: leaving(server, json.dumps(question(0, **LONG)).encode()), {499}),
    "bytes that are declared only": (lambda server: raw(server, HEAD + b"Content-Length: 8000000\r\n\r\n{"), {0}),
    "half a body": (lambda server: raw(server, HEAD + b"Content-Length: 8000000\r\n\r\n" + b" " * 4_000_000), {0, 429}),
    "two lengths": (
        lambda server: raw(server, HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"fff\r\n"),
        {400},
    ),
    "a padded image": (lambda server: post(server, with_image(padded(5_000_000))), {200, 408, 429}),
    "small values": (lambda server: post(server, b'{"model":"tiny","metadata":[' + b"0," * 3_000_000 + b"0]}"), {400}),
    "pixels of zeros": (lambda server: post(server, with_image(zeros(5000))), {200, 408, 429}),
    "a body that is too large": (lambda server: post(server, b" " * (9 << 20)), {413}),
    "long headers": (lambda server: post(server, b"{}", **{"x-long": "x" * 70_000}), {400, 431}),
    "another host": (lambda server: post(server, b"{}", host="127.0.0.1#.evil.com"), {400, 403}),
    "deep values": (lambda server: post(server, b'{"messages":' + b"[" * 100_000), {400}),
    "a damaged video": (
        lambda server: post(
            server,
            json.dumps(
                question(0, messages=[{"role": "user", "content": [{"type": "video_url", "video_url": "data:video/mp4;base64,AAAA"}]}])
            ).encode(),
        ),
        {400},
    ),
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.parametrize("name", ATTACKS)
def test_a_second_client_is_answered_during_an_attack(server: Running, name: str) -> None:
    act, allowed = ATTACKS[name]
    body = json.dumps(question(1)).encode()
    memory, over = resident(), threading.Event()
    peak, answers = memory, Counter[str]()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            peak = max(peak, resident())

    with ThreadPoolExecutor(9) as pool, ExitStack() as stack:
        wanted = text_of(httpx.post(server.url + CHAT, content=body, headers=JSON, timeout=60))
        pool.submit(watch)
        stack.callback(over.set)
        attackers = [pool.submit(act, server) for _ in range(16)]
        while not all(attacker.done() for attacker in attackers) or not answers:
            reply = httpx.post(server.url + CHAT, content=body, headers=JSON, timeout=60)
            answers["busy" if reply.status_code == 429 else text_of(reply)] += 1
        statuses = Counter(attacker.result() for attacker in attackers)
    print(f"\n{name}: {dict(statuses)}, {sum(answers.values())} answers, {peak - memory:.0f} MB more")
    assert set(answers) <= {wanted, "busy"}
    assert set(statuses) <= allowed
    assert peak < memory + 500
