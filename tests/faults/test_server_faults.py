"""A running server under hostile requests, slow clients and long use: no internal error, no growth, right answers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_requests import JSON, hostile, question, valid
from corpus import recall, remember
from running import Held, Server, save_model, serving
from slow_clients import SlowClients, half_open

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = tmp_path_factory.mktemp("limits") / "limits.yaml"
    limits.write_text("header_seconds: 2\nbody_seconds: 4\nnew_tokens: 16\n")
    with serving(model, "--limits", str(limits)) as running:
        yield running


def text_of(reply: httpx.Response) -> str:
    """The answer's text, of a whole reply or of a streamed one."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", data[-1]
    pieces = [json.loads(line)["choices"] for line in data[:-1]]
    return "".join(choices[0]["delta"].get("content", "") for choices in pieces if choices)


def answers_alone(server: Server, bodies: list[bytes]) -> dict[bytes, str]:
    """What each request is answered when nothing else is asked."""
    found = {}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for body in dict.fromkeys(bodies):
            found[body] = text_of(client.post(CHAT, content=body, headers=JSON))
    return found


class Outcome:
    """What came of many requests sent at once."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.valid: Counter[int] = Counter()
        self.wrong: list[tuple[bytes, str]] = []
        self.failures: list[bytes] = []
        self.seconds: list[float] = []

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


async def send_all(server: Server, jobs: list[tuple[bytes, dict[str, str], str | None]], clients: int) -> Outcome:
    """Send the requests from so many clients; those with an expected answer are valid."""
    outcome, waiting = Outcome(), iter(jobs)

    async def client() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            for body, headers, expected in waiting:
                began = time.monotonic()
                try:
                    reply = await http.post(CHAT, content=body, headers=headers)
                except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):
                    reply = await http.post(CHAT, content=body, headers=headers)  # an idle connection was closed
                if expected is None:
                    outcome.statuses[reply.status_code] += 1
                    if reply.status_code >= 500:
                        outcome.failures.append(body)
                    continue
                outcome.seconds.append(time.monotonic() - began)
                outcome.valid[reply.status_code] += 1
                if reply.status_code != 200 or text_of(reply) != expected:
                    outcome.wrong.append((body, reply.text))

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcome


def flat(before: Held, after: Held) -> bool:
    """Whether nothing grew by more than a tenth."""
    pairs = (
        (before.memory, after.memory),
        (before.descriptors, after.descriptors),
        (before.threads, after.threads),
    )
    return all(end <= 1.1 * start for start, end in pairs)


def mixed(server: Server, malformed: int, good: int, slow: int, seed: int) -> tuple[Outcome, Held, Held]:
    """Malformed and valid requests in random order beside slow clients, and what the server held before and after."""
    dice = random.Random(seed)
    bodies = [json.dumps(valid(random.Random(dice.randrange(60)))).encode() for _ in range(good)]
    expected = answers_alone(server, bodies)
    jobs: list[tuple[bytes, dict[str, str], str | None]] = [(body, JSON, expected[body]) for body in bodies]
    jobs += [(body, JSON, None) for body in recall("chat")]
    jobs += [(*hostile(random.Random(dice.randrange(2**40))), None) for _ in range(malformed)]
    dice.shuffle(jobs)
    warm = max(200, len(jobs) // 10)
    asyncio.run(send_all(server, jobs[:warm], 32))
    before = server.held()
    with SlowClients(server.port, slow, seed):
        outcome = asyncio.run(send_all(server, jobs, 32))
    time.sleep(6)  # slow clients' connections end
    return outcome, before, server.held()


def check(outcome: Outcome, before: Held, after: Held) -> None:
    for body in outcome.failures:
        remember("chat", body)
    assert not outcome.failures, outcome.failures[0][-500:]
    assert not outcome.wrong, outcome.wrong[0]
    assert set(outcome.valid) == {200}
    assert flat(before, after), (before, after)


def report(name: str, outcome: Outcome, before: Held, after: Held) -> None:
    """Shown by pytest -s (and in the summary of a failure)."""
    print(
        f"\n{name}: malformed {dict(outcome.statuses)}; valid {dict(outcome.valid)}, wrong {len(outcome.wrong)}, "
        f"p99 {outcome.p99:.2f} s; before {before}; after {after}"
    )


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_ten_thousand_malformed_and_two_thousand_valid_beside_a_hundred_slow_clients(server: Server) -> None:
    outcome, before, after = mixed(server, malformed=10_000, good=2_000, slow=100, seed=19)
    report("mixed", outcome, before, after)
    check(outcome, before, after)


@pytest.mark.slow
def test_a_sample_of_the_mixed_load(server: Server) -> None:
    outcome, before, after = mixed(server, malformed=150, good=50, slow=20, seed=20)
    report("sample", outcome, before, after)
    assert not outcome.failures, outcome.failures[0][-500:]
    assert not outcome.wrong, outcome.wrong[0]


def test_health_beside_250_half_open_connections_on_200_descriptors(model: Path) -> None:
    with serving(model, descriptors=200) as server:
        connections = half_open(server.port, 250, random.Random(1))
        for _ in range(5):
            assert httpx.get(server.url + "/health", timeout=5).status_code == 200
        assert httpx.post(server.url + CHAT, json=question(0), timeout=60).status_code == 200
        for connection in connections:
            connection.close()


def raw_requests(dice: random.Random, count: int) -> Iterator[bytes]:
    """Bytes that are an HTTP request, nearly one, or nothing of the kind."""
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
    """The status lines that raw requests are answered with; some are only closed, when their time is over."""

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


def test_a_sample_of_raw_requests(server: Server) -> None:
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
def test_fifteen_megabytes_cost_neither_time_nor_memory(server: Server, body: dict[str, Any]) -> None:
    before = server.held()
    began = time.monotonic()
    reply = httpx.post(server.url + CHAT, json=body, timeout=120)
    assert reply.status_code == 400
    assert len(reply.content) < 1000
    assert time.monotonic() - began < 20
    assert server.held().memory - before.memory < 300
