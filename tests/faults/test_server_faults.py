"""A running server under hostile requests, slow clients and long use: no internal error, no growth, right answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
