"""The queue, with a stand-in for the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from revisit.decoding.settings import Decoding
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.serve.batcher import Batcher, Ticket
from revisit.serve.errors import ApiError
from revisit.serve.limits import Limits
from revisit.serve.metrics import Metrics
from revisit.serve.replies import Piece, Reply
from revisit.serve.requests import ChatRequest

REPLY = Reply("x", "stop", 1, 1, "revisit")


def ticket(method: Any = None, seconds: float = 60, record: Any = None) -> Ticket:
    request = ChatRequest([], [], method or ReVisiT(), Decoding(max_new_tokens=5), stream=True, record=record)
    return Ticket(request, "", seconds, asyncio.get_running_loop())


async def outcome(one: Ticket) -> Any:
    return await asyncio.wait_for(one.events.get(), 20)


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


class Gate:
    """A decoder that waits to be let through, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Ticket]] = []
        self.open = threading.Event()

    def __call__(self, tickets: Sequence[Ticket], limit: int) -> None:
        self.batches.append(list(tickets))
        assert self.open.wait(20)
        for one in tickets:
            one.succeed(REPLY)


def test_requests_of_one_method_share_a_batch_and_others_wait_their_turn() -> None:
    async def test() -> None:
        gate = Gate()
        batcher = Batcher(gate, Limits(batch=3, batch_wait=0.2), Metrics())
        first = ticket(Greedy())
        batcher.submit(first)
        while not gate.batches:
            await asyncio.sleep(0.01)
        rest = [ticket(method) for method in (ReVisiT(), ReVisiT(alpha=0.1), ReVisiT(), ReVisiT(), ReVisiT())]
        for one in rest:
            batcher.submit(one)
        gate.open.set()
        assert all([await outcome(one) is REPLY for one in (first, *rest)])
        a, b, c, d, e = rest
        assert [list(batch) for batch in gate.batches] == [[first], [a, c, d], [b], [e]]
        batcher.stop(10)

    run(test)


def test_recorded_requests_are_decoded_alone() -> None:
    async def test() -> None:
        gate = Gate()
        gate.open.set()
        batcher = Batcher(gate, Limits(batch=3, batch_wait=0.2), Metrics())
        rest = [ticket(), ticket(record="steps"), ticket(), ticket(record="steps")]
        for one in rest:
            batcher.submit(one)
        assert all([await outcome(one) is REPLY for one in rest])
        a, b, c, d = rest
        assert [list(batch) for batch in gate.batches] == [[a, c], [b], [d]]
        batcher.stop(10)

    run(test)


def test_a_full_queue_refuses_and_stopping_finishes_what_was_begun() -> None:
    async def test() -> None:
        gate = Gate()
        batcher = Batcher(gate, Limits(queue=2, batch=1, batch_wait=0), Metrics())
        running = ticket()
        batcher.submit(running)
        while batcher.waiting:
            await asyncio.sleep(0.01)
        waiting = [ticket(), ticket()]
        for one in waiting:
            batcher.submit(one)
        with pytest.raises(ApiError) as caught:
            batcher.submit(ticket())
        assert caught.value.status == 429
        stopper = threading.Thread(target=batcher.stop)
        stopper.start()
        while batcher.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as caught:
            batcher.submit(ticket())
        assert caught.value.status == 503
        gate.open.set()
        assert [await outcome(one) for one in (running, *waiting)] == [REPLY] * 3
        stopper.join(10)
        assert not stopper.is_alive()

    run(test)


def test_a_batch_that_fails_is_reported_without_its_details_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        def decode(tickets: Sequence[Ticket], limit: int) -> None:
            if not caplog.records:
                raise RuntimeError("secret path")
            tickets[0].succeed(REPLY)

        batcher = Batcher(decode, Limits(batch_wait=0), Metrics())
        bad = ticket()
        batcher.submit(bad)
        error = await outcome(bad)
        assert error.status == 500
        assert "secret" not in error.message
        assert "secret path" in caplog.records[0].getMessage()
        good = ticket()
        batcher.submit(good)
        assert await outcome(good) is REPLY
        batcher.stop(10)

    run(test)


def test_a_request_whose_time_is_over_never_reaches_the_model() -> None:
    async def test() -> None:
        gate = Gate()
        batcher = Batcher(gate, Limits(batch=1, batch_wait=0), Metrics())
        running, late, left = ticket(Greedy()), ticket(seconds=0.01), ticket()
        for one in (running, late, left):
            batcher.submit(one)
        left.gone = True
        time.sleep(0.05)
        gate.open.set()
        assert await outcome(running) is REPLY
        assert (await outcome(late)).status == 504
        batcher.stop(10)
        assert gate.batches == [[running]]

    run(test)


def test_a_decoder_that_forgets_a_ticket_is_covered() -> None:
    async def test() -> None:
        batcher = Batcher(lambda tickets, limit: None, Limits(batch_wait=0), Metrics())
        one = ticket()
        batcher.submit(one)
        assert (await outcome(one)).status == 504
        batcher.stop(10)

    run(test)


def test_a_request_that_breaks_its_batch_breaks_no_other() -> None:
    async def test() -> None:
        gate, poison, begun = Gate(), ticket(), ticket()

        def decode(tickets: Sequence[Ticket], limit: int) -> None:
            if poison in tickets:
                if begun in tickets:
                    begun.show("x")
                raise RuntimeError("one of them")
            gate(tickets, limit)

        batcher = Batcher(decode, Limits(batch=4, batch_wait=0.3), Metrics())
        gate.open.set()
        good = [ticket(), ticket()]
        for one in (good[0], poison, begun, good[1]):
            batcher.submit(one)
        assert [await outcome(one) for one in good] == [REPLY, REPLY]
        assert (await outcome(poison)).status == 500
        assert await outcome(begun) == Piece("x")
        assert (await outcome(begun)).status == 500  # its first text is out and cannot be taken back
        batcher.stop(10)

    run(test)
