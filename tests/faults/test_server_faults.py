"""A running server under a mixed load: valid and hostile requests, several methods, beams, streams, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from corpus import recall, remember
from PIL import Image

from chat_requests import hostile, question, valid
from revisit.serve.limits import Limits
from servers import Running, data_uri, serving

JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
CLIENTS = 12
# Long answers, whose clients leave: a beam search, a description before the first token, a stream.
LONG: tuple[dict[str, Any], ...] = (
    {"max_tokens": 60, "decoding": {"method": "opera", "settings": {"beams": 4, "candidates": 8}}},
    {"max_tokens": 1, "decoding": {"method": "code", "settings": {"description_tokens": 300}}},
    {"max_tokens": 64, "decoding": {"method": "vcd"}, "stream": True},
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(Limits(read_seconds=10, seconds=60, new_tokens=64)) as running:
        yield running


def text_of(reply: httpx.Response) -> str:
    """Return the text of a whole or streamed answer."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    data = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]", data[-1]
    pieces = [json.loads(line)["choices"] for line in data[:-1]]
    return "".join(choices[0]["delta"].get("content", "") for choices in pieces if choices)


async def send(server: Running, count: int, seed: int) -> Counter[str]:
    """Send requests from several clients, those of the corpus first; count what came of each kind."""
    dice, found = random.Random(seed), Counter[str]()
    bodies = [json.dumps(valid(random.Random(number))).encode() for number in range(8)]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        alone = {body: text_of(client.post(CHAT, content=body, headers=JSON)) for body in bodies}
    jobs = [("hostile", body) for body in recall("chat")]
    for _ in range(count):
        long = json.dumps(question(dice.randrange(6), **dice.choice(LONG))).encode()
        kinds = {
            "valid": dice.choice(bodies),
            "leaving": long,
            "hostile": hostile(random.Random(dice.randrange(2**40))),
        }
        jobs += dice.choices(list(kinds.items()), (45, 15, 40))
    left = iter(jobs)

    async def client() -> None:
        fresh = httpx.Limits(max_keepalive_connections=0)  # no race with the end of an idle connection
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=fresh) as http:
            for kind, body in left:
                patience = dice.uniform(0.05, 1.0) if kind == "leaving" else None
                try:
                    reply = await asyncio.wait_for(http.post(CHAT, content=body, headers=JSON), patience)
                except asyncio.TimeoutError:
                    found["left"] += 1
                    continue
                if reply.status_code >= 500:
                    remember("chat", body)
                assert reply.status_code < 500, body[-500:]
                if kind == "valid":
                    assert (reply.status_code, text_of(reply)) == (200, alone[body])
                found[f"{kind} {reply.status_code}"] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return found


def resident() -> float:
    """Return the megabytes of memory of this process; 0 where /proc is missing."""
    place = Path("/proc/self/status")
    return int(place.read_text().partition("VmRSS:")[2].split()[0]) / 1024 if place.exists() else 0.0


@pytest.mark.parametrize(
    "count", [pytest.param(60, marks=pytest.mark.slow), pytest.param(1500, marks=pytest.mark.faults)]
)
def test_mixed_load_has_no_internal_error_and_right_answers(server: Running, count: int) -> None:
    """Methods, beams, streams, clients that leave and malformed requests; afterwards memory and threads are as before."""
    asyncio.run(send(server, 60, seed=0))
    memory, threads = resident(), threading.active_count()
    found = asyncio.run(send(server, count, seed=count))
    print(f"\n{dict(sorted(found.items()))}; {memory:.0f} MB before, {resident():.0f} MB after")
    assert resident() < memory + 100
    assert threading.active_count() <= threads + 3
    assert found["valid 200"]
    assert found["hostile 400"]


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_and_threads_are_back_after_large_images(server: Running) -> None:
    """120 images of 27 MB; their requests are answered, and neither they nor threads stay."""
    body = question(0, max_tokens=1)
    large = data_uri(Image.effect_noise((3000, 3000), 50).convert("RGB"), "JPEG")
    body["messages"][0]["content"][0]["image_url"]["url"] = large

    def ask(_: int) -> int:
        return httpx.post(server.url + CHAT, json=body, timeout=120).status_code

    assert [ask(0), ask(1)] == [200, 200]
    memory, threads = resident(), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(120))) == {200}
    print(f"\n{memory:.0f} MB before, {resident():.0f} MB after")
    assert resident() < memory + 300
    assert threading.active_count() <= threads + 3  # readers that start when they are needed
