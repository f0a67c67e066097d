"""Rows of a batch share weights and nothing else: what becomes of one request changes nothing that another client gets."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import families
from revisit.methods.revisit import ReVisiT
from revisit.models.types import Model
from revisit.serve.app import Service
from revisit.serve.batcher import Ticket
from revisit.serve.decoder import Decoder
from revisit.serve.detokenizer import IncrementalDetokenizer
from revisit.serve.errors import ApiError
from revisit.serve.limits import Limits
from revisit.serve.replies import Piece, Reply
from servers import messages

pytest.importorskip("llguidance")
LIMITS = Limits(batch=6, new_tokens=40, image_pixels=20_000)


def schema(value: Any) -> dict[str, Any]:
    whole = {"type": "object", "properties": {"seen": value}, "required": ["seen"], "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "seen", "schema": whole}}}


CIRCLE = {"allOf": [{"$ref": "#/properties/seen"}]}  # compiles; the parser gives up at the first token of the value
FAILING = {"max_tokens": 30, **schema(CIRCLE)}
BROKEN = "text that cannot be decoded"
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.2, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"n": 2},
    {"stop": ["e", "se"]},
    {"messages": messages(None)},
    {"decoding": {"method": "greedy"}, "logprobs": True},
    {"decoding": {"method": "vcd"}},
    {"check": True},
    {"temperature": 1.0, **schema({"type": "integer", "maximum": 99})},
    {"temperature": 1.0, "logprobs": True, **schema({"type": "string"})},
    schema({"type": "boolean"}),
    schema(CIRCLE),
    {"stop": [BROKEN]},
)


class Client:
    """Receives the events of a ticket, in place of an event loop."""

    def __init__(self, service: Service, fields: dict[str, Any]) -> None:
        self.fields = fields
        body = json.dumps({"model": "tiny", "stream": True, "seed": 1, **fields}).encode()
        self.ticket = Ticket(*service.read(bytearray(body)), 1e6, self)  # type: ignore[arg-type]
        self.late = False
        self.pieces: list[Piece] = []
        self.end: Reply | ApiError | None = None

    def call_soon_threadsafe(self, _: object, event: Piece | Reply | ApiError) -> None:
        assert self.end is None or self.late
        self.ended_at = time.monotonic()
        if isinstance(event, Piece):
            self.pieces.append(event)
        else:
            self.end = event

    def text(self, row: int) -> str:
        return "".join(piece.text for piece in self.pieces if piece.row == row)

    def logprobs(self, row: int) -> list[Any]:
        return [entry for piece in self.pieces if piece.row == row for entry in piece.logprobs]

    def assert_equal_so_far(self, alone: Client) -> None:
        for row in range(self.ticket.request.chat.n):
            assert alone.text(row).startswith(self.text(row))
            for entry, wanted in zip(self.logprobs(row), alone.logprobs(row), strict=False):
                assert entry["token"] == wanted["token"]
                assert entry["logprob"] == pytest.approx(wanted["logprob"], abs=1e-3)

    def assert_equal(self, alone: Client) -> None:
        self.assert_equal_so_far(alone)
        assert [*map(self.text, range(16))] == [*map(alone.text, range(16))]
        if isinstance(alone.end, Reply):
            assert isinstance(self.end, Reply), self.end
            assert self.end.usage == alone.end.usage
            assert self.end.decoding == alone.end.decoding
            for choice, wanted in zip(self.end.choices, alone.end.choices, strict=True):
                assert (choice.text, choice.finish) == (wanted.text, wanted.finish)
        else:
            assert isinstance(self.end, ApiError)
            assert alone.end is not None
            assert self.end.body() == alone.end.body()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    found = Service(Decoder(*families.build("llava")), "tiny", ReVisiT(alpha=0.01), LIMITS)
    yield found
    found.close()


@contextmanager
def before_steps(model: Model, act: Callable[[int], object]) -> Iterator[None]:
    """Call a function with the number of each forward pass before it."""
    count = iter(range(10**9))
    hook = model.register_forward_pre_hook(lambda *_: act(next(count)) and None)  # type: ignore[attr-defined]
    yield
    hook.remove()


def run(service: Service, clients: Sequence[Client], act: Callable[[int], object] = lambda step: None) -> None:
    with before_steps(service.decoder.model, act):
        service.batcher._run([client.ticket for client in clients])


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        pytest.param({"max_tokens": 3, **schema({"type": "boolean"})}, None, id="length"),
        pytest.param({"max_tokens": 30, "stop": ["se"], **schema({"type": "boolean"})}, None, id="stop text"),
        pytest.param({"max_tokens": 30, **schema({"type": "string"})}, 6, id="client leaves"),
        pytest.param(FAILING, None, id="circular schema"),
    ],
)
def test_a_schema_row_that_ends_or_fails_changes_no_other_row(
    service: Service, fields: dict[str, Any], leaves: int | None
) -> None:
    def clients() -> tuple[Client, Client]:
        return (
            Client(service, {"messages": messages(1), "max_tokens": 20}),
            Client(service, {"messages": messages(2), **fields}),
        )

    alone, other = clients()
    for client in (alone, other):
        run(service, [client])
    steps = []

    def act(step: int) -> None:
        steps.append(step)
        left.ticket.gone = left.ticket.gone or step == leaves

    kept, left = clients()
    run(service, [left, kept], act)
    kept.assert_equal(alone)
    if leaves is None:
        left.assert_equal(other)
    assert len(steps) == 20  # one batch, not decoded again
    if fields is FAILING:
        assert isinstance(left.end, ApiError)
        assert left.end.status == 400
        assert "circle" in left.end.message
        assert "Parser" not in json.dumps(left.end.body())


# -- random schedules --------------------------------------------------------------------------------------------------


class Schedule:
    """Clients that arrive, leave, time out and fail at random steps of the model."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service, self.dice = service, random.Random(seed)
        self.arrivals = sorted((self.dice.randrange(20), n) for n in range(self.dice.randrange(2, 9)))
        self.clients: list[Client] = []
        self.ends: dict[Client, tuple[int, bool]] = {}
        self.steps = 0

    def arrive(self) -> None:
        kind = self.dice.choices(KINDS, [1] * (len(KINDS) - 2) + [2, 2])[0]
        fields = {
            "messages": messages(self.dice.randrange(1, 4)),
            "max_tokens": self.dice.choice((1, 3, 12, 30)),
            **kind,
        }
        client = Client(self.service, fields)
        if self.dice.random() < 0.3:
            self.ends[client] = self.steps + self.dice.randrange(20), self.dice.random() < 0.7
        self.clients.append(client)
        self.service.batcher.waiting.append(client.ticket)

    def act(self, _: int = 0) -> None:
        self.steps += 1
        while self.arrivals and self.arrivals[0][0] <= self.steps:
            self.arrivals.pop(0)
            self.arrive()
        for client, (step, leaves) in self.ends.items():
            if step <= self.steps:
                client.late = True
                client.ticket.gone |= leaves
                client.ticket.deadline = 0.0

    def run(self) -> None:
        batcher = self.service.batcher
        while self.arrivals or batcher.waiting:
            self.act()
            if batcher.waiting and (batch := batcher._next()):
                batcher.running = batch
                with before_steps(self.service.decoder.model, self.act):
                    batcher._run(batch)


@pytest.fixture
def idle(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service whose queue is emptied by the test; a request that stops at BROKEN fails after its fifth token."""

    def failing(self: IncrementalDetokenizer, token: int) -> str:
        if BROKEN in self.stops and len(self.tokens) > 4:
            raise BaseException("what another client wrote")  # as a panic in Rust
        return feed(self, token)

    feed = IncrementalDetokenizer.feed
    monkeypatch.setattr(IncrementalDetokenizer, "feed", failing)
    found = Service(service.decoder, "tiny", service.method, LIMITS)
    found.batcher.stop()
    yield found
    found.close()


@pytest.mark.parametrize("outer", ["greedy", "revisit", "vcd", "pai", "memvr", "sid"])
def test_short_requests_are_answered_while_a_long_one_is_decoded(idle: Service, outer: str) -> None:
    fields = [{"messages": messages(1), "max_tokens": 40, "decoding": {"method": outer}}]
    for more in ({}, {"decoding": {"method": "pai"}}, {"check": True}, schema({"type": "boolean"})):
        fields.append({"messages": messages(2), "max_tokens": 4, **more})
    alone, (long, *short) = ([Client(idle, one) for one in fields] for _ in range(2))
    for client in alone:
        run(idle, [client])
    queue = [client.ticket for client in short]

    def act(step: int) -> None:
        if step > 5 and queue:
            idle.batcher._resumed = 0.0
            idle.batcher.waiting.append(queue.pop())

    idle.batcher.running = [long.ticket]
    run(idle, [long], act)
    for client, wanted in zip([long, *short], alone, strict=True):
        client.assert_equal(wanted)
        assert client.ended_at <= long.ended_at
    assert idle.batcher.running == [long.ticket]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 412), marks=pytest.mark.faults)])
def test_random_schedules_cross_no_rows(idle: Service, seeds: range) -> None:
    alone: dict[str, Client] = {}
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(idle, seed)
        schedule.run()
        for client in schedule.clients:
            key = json.dumps(client.fields)
            if key not in alone:
                alone[key] = Client(idle, client.fields)
                idle.batcher._run([alone[key].ticket])
            try:
                if client.late and not (isinstance(client.end, Reply) or isinstance(alone[key].end, ApiError)):
                    client.assert_equal_so_far(alone[key])
                    assert isinstance(client.end, ApiError)
                    assert client.end.status == 504
                    outcomes["left"] += 1
                elif client.late and isinstance(client.end, ApiError):
                    assert client.end.status in (504, alone[key].end.status)  # type: ignore[union-attr]
                    outcomes["left or failed"] += 1
                else:
                    client.assert_equal(alone[key])
                    outcomes["answered" if isinstance(client.end, Reply) else "failed"] += 1
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {client.fields['max_tokens']} tokens, {key[-200:]}") from error
    print(f"\n{len(seeds)} schedules: {dict(outcomes)}")
    assert {"answered", "failed", "left"} <= outcomes.keys()
