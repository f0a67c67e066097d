"""A mixed load on a running server: valid and malformed requests, several methods, beams, streams, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from chat_requests import JSON, hostile, question, valid
from corpus import recall
from running import Held, Server

CHAT = "/v1/chat/completions"
CLIENTS = 12
# Long answers, whose clients leave: a beam search, a description before the first token, a stream.
LONG: tuple[dict[str, Any], ...] = (
    {"max_tokens": 60, "decoding": {"method": "opera", "settings": {"beams": 4, "candidates": 8}}},
    {"max_tokens": 1, "decoding": {"method": "code", "settings": {"description_tokens": 300}}},
    {"max_tokens": 64, "decoding": {"method": "vcd"}, "stream": True},
)
TOO_MUCH: dict[str, Any] = {
    "max_tokens": 64,
    "decoding": {"method": "opera", "settings": {"beams": 64, "candidates": 64}},
}


@dataclass
class Outcome:
    """The answers to a load."""

    statuses: Counter[int] = field(default_factory=Counter)  # of malformed and excessive requests
    valid: Counter[int] = field(default_factory=Counter)
    left: int = 0  # clients that did not wait for their answer
    wrong: list[tuple[bytes, str]] = field(default_factory=list)  # valid requests with another answer than alone
    failures: list[bytes] = field(default_factory=list)  # requests with an internal error
    lost: list[tuple[bytes, str]] = field(default_factory=list)  # requests without any answer
    seconds: list[float] = field(default_factory=list)  # of valid requests
    peak: float = 0.0  # megabytes

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        return (
            f"valid {dict(self.valid)}, wrong {len(self.wrong)}, malformed {dict(sorted(self.statuses.items()))}, "
            f"left {self.left}, lost {len(self.lost)}, median {ordered[len(ordered) // 2]:.2f} s, "
            f"slowest {ordered[-1]:.2f} s, peak {self.peak:.0f} MB"
        )


def text_of(reply: httpx.Response) -> str:
    """Return the text of a whole or streamed answer."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", data[-1]
    pieces = [json.loads(line)["choices"] for line in data[:-1]]
    return "".join(choices[0]["delta"].get("content", "") for choices in pieces if choices)


class Load:
    """Seeded requests to one server."""

    def __init__(self, server: Server, seed: int, different: int = 40) -> None:
        self.server, self.dice = server, random.Random(seed)
        bodies = {json.dumps(valid(random.Random(number))).encode() for number in range(different)}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            self.alone = {body: text_of(client.post(CHAT, content=body, headers=JSON)) for body in sorted(bodies)}

    def run(self, seconds: float) -> Outcome:
        """Send requests from several clients for so long, after those of the corpus."""
        outcome, until = Outcome(), time.monotonic() + seconds
        kept = recall("chat")
        with self._watch(outcome):
            asyncio.run(self._clients(outcome, kept, lambda: time.monotonic() < until))
        return outcome

    def latency(self, count: int = 15) -> float:
        """Return the median seconds of a small request that is sent alone."""
        body, times = json.dumps(question(1, max_tokens=4)).encode(), []
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            for _ in range(count):
                began = time.monotonic()
                assert client.post(CHAT, content=body, headers=JSON).status_code == 200
                times.append(time.monotonic() - began)
        return sorted(times)[count // 2]

    async def _clients(self, outcome: Outcome, kept: list[bytes], go_on: Callable[[], bool]) -> None:
        async def client() -> None:
            fresh = httpx.Limits(max_keepalive_connections=0)  # no race with the end of an idle connection
            async with httpx.AsyncClient(base_url=self.server.url, timeout=120, limits=fresh) as http:
                while kept or go_on():
                    kind = self.dice.random()
                    if kept:
                        await self._malformed(http, outcome, kept.pop(), JSON)
                    elif kind < 0.45:
                        await self._valid(http, outcome)
                    elif kind < 0.60:
                        await self._leaving(http, outcome)
                    elif kind < 0.65:
                        await self._malformed(http, outcome, json.dumps(question(1, **TOO_MUCH)).encode(), JSON)
                    else:
                        await self._malformed(http, outcome, *hostile(random.Random(self.dice.randrange(2**40))))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _valid(self, http: httpx.AsyncClient, outcome: Outcome) -> None:
        body = self.dice.choice(list(self.alone))
        began = time.monotonic()
        reply = await self._answer(http, outcome, body, JSON)
        outcome.seconds.append(time.monotonic() - began)
        if reply is not None:
            outcome.valid[reply.status_code] += 1
            if reply.status_code != 200 or text_of(reply) != self.alone[body]:
                outcome.wrong.append((body, reply.text))

    async def _malformed(self, http: httpx.AsyncClient, outcome: Outcome, body: bytes, headers: dict[str, str]) -> None:
        reply = await self._answer(http, outcome, body, headers)
        if reply is not None:
            outcome.statuses[reply.status_code] += 1
            if reply.status_code >= 500:
                outcome.failures.append(body)

    async def _leaving(self, http: httpx.AsyncClient, outcome: Outcome) -> None:
        fields = self.dice.choice(LONG)
        try:
            wait = self.dice.uniform(0.05, 1.0)
            reply = await asyncio.wait_for(http.post(CHAT, json=question(self.dice.randrange(6), **fields)), wait)
            outcome.statuses[reply.status_code] += 1
        except asyncio.TimeoutError:
            outcome.left += 1

    async def _answer(
        self, http: httpx.AsyncClient, outcome: Outcome, body: bytes, headers: dict[str, str]
    ) -> httpx.Response | None:
        try:
            return await http.post(CHAT, content=body, headers=headers)
        except httpx.HTTPError as error:
            outcome.lost.append((body, repr(error)))
            return None

    def _watch(self, outcome: Outcome) -> _Watch:
        return _Watch(self.server, outcome)


class _Watch:
    """Samples the server's memory."""

    def __init__(self, server: Server, outcome: Outcome) -> None:
        self.server, self.outcome, self.stop = server, outcome, threading.Event()
        self.thread = threading.Thread(target=self._sample)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _sample(self) -> None:
        while not self.stop.wait(0.5):
            self.outcome.peak = max(self.outcome.peak, self.server.held().memory)


def settled(server: Server, wanted: Held, seconds: float = 20) -> Held:
    """Wait until a server holds no more than this, or so many seconds; return what it holds."""
    until = time.monotonic() + seconds
    while not (held := server.held()).within(wanted) and time.monotonic() < until:
        time.sleep(0.5)
    return held
