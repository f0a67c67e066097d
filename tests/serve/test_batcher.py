"""The queue, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from revisit.decoding.settings import Decoding
from revisit.methods.greedy import Greedy
from revisit.methods.opera import OPERA
from revisit.methods.revisit import ReVisiT
from revisit.serve import batcher as batcher_module
from revisit.serve.batcher import Batcher, Ticket
from revisit.serve.errors import ApiError
from revisit.serve.limits import Limits
from revisit.serve.replies import Choice, Piece, Reply
from revisit.serve.requests import ChatRequest
from revisit.serve.schema import ChatBody

REPLY = Reply([Choice("x", "stop", 1)], 1)
pytestmark = pytest.mark.anyio
QUESTION = {"model": "m", "messages": [{"role": "user", "content": "?"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def long_batch_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make requests that are submitted together share a batch, however slow the machine is."""
    monkeypatch.setattr(batcher_module, "BATCH_WAIT", 0.2)


def ticket(method: Any = None, seconds: float = 60, record: bool = False, stream: bool = True, work: int = 1) -> Ticket:
    decoding = {"record": True} if record else None
    chat = ChatBody.model_validate({**QUESTION, "stream": stream, "decoding": decoding})
    request = ChatRequest(chat, [], method or ReVisiT(), Decoding(max_new_tokens=5), work=work)
    return Ticket(request, "", seconds, asyncio.get_running_loop())


async def outcome(one: Ticket) -> Any:
    return await asyncio.wait_for(one.events.get(), 20)


class Gate:
    """A decoder that waits for `open` and records its batches."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Ticket]] = []
        self.open = threading.Event()

    def __call__(self, tickets: Sequence[Ticket]) -> None:
        self.batches.append(list(tickets))
        assert self.open.wait(20)
        for one in tickets:
            one.finish(REPLY)


async def batches_of(tickets: Sequence[Ticket], size: int) -> list[list[int]]:
    """Decode tickets that wait together; return the batches as numbers of tickets."""
    gate, running = Gate(), ticket(Greedy())
    batcher = Batcher(gate, Limits(batch=size))
    batcher.submit(running)
    while not gate.batches:
        await asyncio.sleep(0.01)
    for one in tickets:
        batcher.submit(one)
    gate.open.set()
    assert [await outcome(one) for one in tickets] == [REPLY] * len(tickets)
    batcher.stop()
    return [[tickets.index(one) for one in batch] for batch in gate.batches[1:]]


@pytest.mark.parametrize(
    ("requests", "size", "batches"),
    [
        pytest.param([{}, {"method": ReVisiT(alpha=0.1)}, {}, {}, {}], 3, [[0, 2, 3], [1], [4]], id="methods"),
        pytest.param([{}, {"record": True}, {}, {"record": True}], 3, [[0, 2], [1, 3]], id="recorded"),
        pytest.param([{"method": OPERA(beams=4)}] * 3, 8, [[0, 1], [2]], id="each beam is a row"),
    ],
)
async def test_equal_requests_share_a_batch(requests: Any, size: int, batches: list[list[int]]) -> None:
    assert await batches_of([ticket(**request) for request in requests], size) == batches


async def test_shorter_requests_get_at_most_half_of_the_time() -> None:
    long, times = ticket(work=100), {True: 0.0, False: 0.0}
    shorter = [ticket(work=25) for _ in range(200)]

    def decode(tickets: Sequence[Ticket]) -> None:
        for _ in range(100 if tickets == [long] else 5):
            time.sleep(0.005)
            times[tickets == [long]] += 0.005
            batcher.run_shorter()
        for one in tickets:
            one.finish(REPLY)

    batcher = Batcher(decode, Limits(batch=1))
    batcher.submit(long)
    for one in shorter:
        batcher.submit(one)
    assert await outcome(long) == REPLY
    assert 0.2 < times[False] < 0.7
    batcher.stop()


async def test_stop_returns_at_its_deadline_while_the_model_runs() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits(batch=1))
    running, waiting = ticket(), ticket()
    for one in (running, waiting):
        batcher.submit(one)
    while not gate.batches:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    batcher.stop(0.2)
    assert time.monotonic() - began < 5
    assert running.abandoned
    assert not batcher.alive
    with pytest.raises(ApiError) as caught:
        batcher.submit(ticket())
    assert caught.value.status == 503
    gate.open.set()
    batcher.stop()
    assert gate.batches == [[running]]  # the model never ran the waiting one


async def test_errors_hide_their_details_and_the_next_batch_runs(caplog: pytest.LogCaptureFixture) -> None:
    def decode(tickets: Sequence[Ticket]) -> None:
        if not caplog.records:
            raise RuntimeError("secret path")
        tickets[0].finish(REPLY)

    batcher = Batcher(decode, Limits())
    bad, good = ticket(), ticket()
    batcher.submit(bad)
    error = await outcome(bad)
    assert error.status == 500
    assert "secret" not in error.message
    assert "secret path" in caplog.records[0].getMessage()
    batcher.submit(good)
    assert await outcome(good) is REPLY
    batcher.stop()


async def test_late_requests_do_not_reach_the_model() -> None:
    gate = Gate()
    batcher = Batcher(gate, Limits(batch=1))
    running, late, left = ticket(Greedy()), ticket(seconds=0.01), ticket()
    for one in (running, late, left):
        batcher.submit(one)
    left.gone = True
    await asyncio.sleep(0.05)
    gate.open.set()
    assert await outcome(running) is REPLY
    assert (await outcome(late)).status == 504
    batcher.stop()
    assert gate.batches == [[running]]


async def test_unanswered_tickets_time_out() -> None:
    batcher = Batcher(lambda tickets: None, Limits())
    one = ticket()
    batcher.submit(one)
    assert (await outcome(one)).status == 504
    batcher.stop()


async def test_a_failing_request_affects_no_client_that_has_received_nothing() -> None:
    gate, poison, streamed, whole = Gate(), ticket(), ticket(), ticket(stream=False)

    def decode(tickets: Sequence[Ticket]) -> None:
        if poison in tickets:
            for one in set(tickets) & {streamed, whole}:
                one.stream(Piece("x"))
            raise RuntimeError("one of them")
        gate(tickets)

    batcher = Batcher(decode, Limits(batch=5))
    gate.open.set()
    good = [ticket(), ticket()]
    for one in (good[0], poison, streamed, whole, good[1]):
        batcher.submit(one)
    assert [await outcome(one) for one in (*good, whole)] == [REPLY] * 3
    assert (await outcome(poison)).status == 500
    assert await outcome(streamed) == Piece("x")
    assert (await outcome(streamed)).status == 500  # its first text cannot be withdrawn
    batcher.stop()
