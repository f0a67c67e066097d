"""Recorded requests with hostile settings and images: no internal error, and streams that end."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from chat_requests import mutated, odd_image, odd_settings
from corpus import recall, remember

import families
from revisit.methods.revisit import ReVisiT
from revisit.serve.app import Service, build
from revisit.serve.decoder import Decoder
from revisit.serve.limits import Limits


def recorded(dice: random.Random) -> bytes:
    """Return a hostile request with `record`."""
    body: Any = json.loads(dice.choice((mutated, odd_settings, odd_settings, odd_image))(dice)[0])
    choice = body.get("decoding")
    body["decoding"] = {**(choice if isinstance(choice, dict) else {}), "record": True}
    return json.dumps({**body, "stream": True}).encode()


async def ask_all(count: int, seed: int) -> tuple[Counter[int], list[bytes]]:
    """Send hostile requests; count their statuses, and return those that failed."""
    limits = Limits(new_tokens=8, prompt_tokens=300)
    service = Service(Decoder(*families.build("llava")), "tiny", ReVisiT(), limits, allow_record=True)
    statuses: Counter[int] = Counter()
    failures = []
    transport = httpx.ASGITransport(app=build(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=120) as client:
        requests = [recorded(random.Random(seed * 1_000_000 + number)) for number in range(count)]
        for body in [*recall("recorded"), *requests]:
            reply = await client.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            statuses[reply.status_code] += 1
            last = reply.text.strip().rpartition("\n\n")[2]
            ended = reply.status_code != 200 or last == "data: [DONE]" or last.startswith('data: {"error"')
            if reply.status_code >= 500 or not ended or "server_error" in last or "NaN" in reply.text:
                failures.append(body)
    service.close()
    for body in failures:
        remember("recorded", body)
    return statuses, failures


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_recorded_requests_cause_no_internal_error() -> None:
    statuses, failures = asyncio.run(ask_all(1_000, seed=5))
    print(f"\nrecorded: {dict(statuses)}")
    assert not failures, failures[0][-500:]


def test_sample_of_recorded_requests() -> None:
    statuses, failures = asyncio.run(ask_all(40, seed=6))
    assert not failures, failures[0][-500:]
    assert statuses[200]
    assert statuses[400]
