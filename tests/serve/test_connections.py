"""Slow clients: how many, how long, and that /health is answered beside them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from test_app import Running, messages, post

import families
from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
from revisit.serve import connections
from revisit.serve.app import Service
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits

HEADERS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture
def server() -> Iterator[Running]:
    limits = Limits(
        connections=12,
        header_seconds=0.6,
        body_seconds=0.6,
        idle_seconds=1,
        write_seconds=0.6,
        default_new_tokens=4,
    )
    running = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), limits))
    yield running
    running.stop()


def connect(server: Running, data: bytes = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.sendall(data)
    return connection


def seconds_open(connection: socket.socket, drip: bytes = b"") -> float:
    """How long the server keeps a connection, to which bytes are sent one by one."""
    began = time.monotonic()
    connection.settimeout(0.1)
    while time.monotonic() - began < 10:
        try:
            if not connection.recv(1000):
                break
        except TimeoutError:
            if drip:
                with contextlib.suppress(OSError):
                    connection.sendall(drip)
        except OSError:
            break
    connection.close()
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", b"x"),
        (HEADERS + b"Content-Length: 1000\r\n\r\n{", b" "),
        (HEADERS + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n", b" "),  # a body nobody reads
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea", b"l"),  # half of a second request
    ],
)
def test_half_a_request_is_waited_for_only_so_long(server: Running, sent: bytes, drip: bytes) -> None:
    assert seconds_open(connect(server, sent), drip) < 6
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_does_not_read_its_answer_is_let_go(server: Running) -> None:
    """Requests follow each other on one connection, nothing is read, and the answers fill every buffer."""
    with connect(server) as connection:
        connection.settimeout(1)
        with contextlib.suppress(OSError):  # the server closed, or stopped reading
            for _ in range(20_000):
                connection.sendall(b"GET /v1/schema HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until = time.monotonic() + 60
        while server.connections() and time.monotonic() < until:
            time.sleep(0.1)
        assert server.connections() == 0


def test_health_is_answered_beside_more_half_open_connections_than_there_is_room_for(server: Running) -> None:
    half_open = [connect(server, HEADERS) for _ in range(60)]
    for _ in range(5):
        assert httpx.get(f"{server.url}/health", timeout=5).json() == {"status": "ok"}
    assert server.connections() <= 12
    for connection in half_open:
        connection.close()
    assert post(server, messages=messages(1), max_tokens=1).status_code == 200


def test_half_sent_bodies_lock_nobody_out(server: Running) -> None:
    bodies = [connect(server, HEADERS + b"Content-Length: 1000\r\n\r\n{") for _ in range(30)]
    assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
    assert post(server, messages=messages(1), max_tokens=1).status_code == 200
    assert server.connections() <= 12
    for connection in bodies:
        connection.close()


def test_bodies_in_memory_are_bounded_together() -> None:
    limits = Limits(held_bytes=2100, body_seconds=20)
    running = Running(Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), limits))
    try:
        bodies = [connect(running, HEADERS + b"Content-Length: 1000\r\n\r\n{") for _ in range(2)]
        time.sleep(0.2)
        assert post(running, messages=messages(1), max_tokens=1).status_code == 429
        for connection in bodies:
            connection.close()
        time.sleep(0.5)
        assert post(running, messages=messages(1), max_tokens=1).status_code == 200
    finally:
        running.stop()


def test_connections_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (200, 200))
    backlog, most = connections.room(Limits())
    assert backlog + most + connections.OWN_FILES <= 200
    assert most > 40
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(RevisitError, match="ulimit"):
        connections.room(Limits())
