"""A running server under hostile requests, slow clients and long use: no internal error, no growth, right answers."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from chat_requests import question
from corpus import remember
from load import CHAT, Load, Outcome, settled
from running import Server, save_model, serving
from slow_clients import SlowClients


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = tmp_path_factory.mktemp("limits") / "limits.yaml"
    limits.write_text("read_seconds: 10\nseconds: 60\nnew_tokens: 64\n")
    with serving(save_model(tmp_path_factory.mktemp("model")), "--limits", str(limits)) as running:
        yield running


def check(outcome: Outcome) -> None:
    """Assert that every request was answered, and every valid one rightly."""
    for body in outcome.failures:
        remember("chat", body)
    assert not outcome.failures, outcome.failures[0][-500:]
    assert not outcome.lost, outcome.lost[0]
    assert not outcome.wrong, outcome.wrong[0]
    assert set(outcome.valid) == {200}


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_nothing_is_left_of_two_minutes_of_mixed_load(server: Server) -> None:
    load = Load(server, seed=19)
    check(load.run(20))  # caches fill, and torch's memory
    before, latency = server.held(), load.latency()
    with SlowClients(server.port, 20, seed=19):
        outcome = load.run(120)
    after = settled(server, before)
    print(f"\nload: {outcome}; before {before}, {latency:.3f} s; after {after}, {load.latency():.3f} s")
    check(outcome)
    assert outcome.left > 10
    assert max(outcome.seconds) < 30  # no request holds the model for long
    assert after.within(before), (before, after)
    assert load.latency() < 2 * latency + 0.1


@pytest.mark.slow
def test_sample_of_the_mixed_load(server: Server) -> None:
    with SlowClients(server.port, 5, seed=20):
        outcome = Load(server, seed=20, different=8).run(8)
    print(f"\nsample: {outcome}")
    check(outcome)


def raw_requests(dice: random.Random, count: int) -> Iterator[bytes]:
    """Yield bytes that are an HTTP request, nearly one, or not at all."""
    methods_ = (b"GET", b"POST", b"HEAD", b"OPTIONS", b"get", b"BREW", b"\x00")
    paths = (
        b"/",
        b"/health",
        b"/health/",
        b"/v1/models",
        b"/v1/models/x%00",
        b"/v1/chat/completions",
        b"//",
        b"/%ff",
        b"*",
        b"http://x/",
    )
    hosts = (b"127.0.0.1", b"[x", b"[::1]:99999999", b"a b", b"\xff", b"evil.example", b":", b"%", b"localhost:x")
    headers = (
        b"Content-Length: 5",
        b"Content-Length: -1",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 99999999999999999999999",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Content-Type: application/json",
        b"Authorization: Bearer \xe9",
        b"Upgrade: websocket\r\nConnection: upgrade",
        b"Upgrade: h2c\r\nConnection: upgrade",
        b"Expect: 100-continue",
        b"Cookie: a=b; revisit_key=\xff",
        b"X: " + b"y" * 70_000,
    )
    for _ in range(count):
        lines = [
            b"%s %s HTTP/%s" % (dice.choice(methods_), dice.choice(paths), dice.choice((b"1.1", b"1.0", b"2", b"9")))
        ]
        lines.append(b"Host: " + dice.choice(hosts))
        lines += dice.sample(headers, dice.randrange(4))
        whole = b"\r\n".join([*lines, b"", dice.choice((b"", b"{}", b"5\r\nhello\r\n0\r\n\r\n", dice.randbytes(30)))])
        if dice.random() < 0.3:
            changed = bytearray(whole)
            for _ in range(3):
                changed[dice.randrange(len(changed))] = dice.randrange(256)
            whole = bytes(changed)
        yield whole


def send_raw(server: Server, count: int, seed: int) -> Counter[str]:
    """Count the status lines of the answers to raw requests; some connections are only closed."""

    def send(data: bytes) -> str:
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                status = connection.recv(12).decode("latin-1")
            except OSError:
                status = "closed"
            assert not status.startswith("HTTP/1.1 50"), data
            return status or "closed"

    with ThreadPoolExecutor(16) as pool:
        return Counter(pool.map(send, raw_requests(random.Random(seed), count)))


def test_sample_of_raw_requests(server: Server) -> None:
    assert send_raw(server, 200, seed=1)["HTTP/1.1 400"]


@pytest.mark.faults
def test_raw_requests(server: Server) -> None:
    print(f"\nraw: {dict(send_raw(server, 3_000, seed=2))}")


@pytest.mark.parametrize(
    "body",
    [
        question(0, messages=[{"role": "user", "content": "word " * 3_000_000}]),
        question(0, **{"n" * 15_000_000: 1}),
        question(0, decoding={"method": "chain", "settings": {"methods": ["vcd"] * 300}}),
        question(0, x=[0] * 5_000_000),
    ],
    ids=["text", "name", "chain", "list"],
)
def test_large_bodies_are_rejected_in_bounded_time_and_memory(server: Server, body: dict[str, Any]) -> None:
    before = server.held()
    began = time.monotonic()
    reply = httpx.post(server.url + CHAT, json=body, timeout=120)
    assert reply.status_code == 400
    assert len(reply.content) < 1000
    assert time.monotonic() - began < 20
    assert server.held().memory - before.memory < 300
