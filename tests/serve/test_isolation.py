"""Rows of a batch share weights and nothing else: what becomes of one request changes nothing that another client gets."""

from __future__ import annotations

import json
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
from revisit.serve.errors import ApiError
from revisit.serve.limits import Limits
from revisit.serve.replies import Piece, Reply
from servers import messages

pytest.importorskip("llguidance")
LIMITS = Limits(batch=6, new_tokens=40)


def schema(value: Any) -> dict[str, Any]:
    whole = {"type": "object", "properties": {"seen": value}, "required": ["seen"], "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "seen", "schema": whole}}}


CIRCLE = {"allOf": [{"$ref": "#/properties/seen"}]}  # compiles; the parser gives up at the first token of the value
FAILING = {"max_tokens": 30, **schema(CIRCLE)}


class Client:
    """Receives the events of a ticket, in place of an event loop."""

    def __init__(self, service: Service, fields: dict[str, Any]) -> None:
        self.fields = fields
        body = json.dumps({"model": "tiny", "stream": True, "seed": 1, **fields}).encode()
        self.ticket = Ticket(*service.read(bytearray(body)), 1e6, self)  # type: ignore[arg-type]
        self.pieces: list[Piece] = []
        self.end: Reply | ApiError | None = None

    def call_soon_threadsafe(self, _: object, event: Piece | Reply | ApiError) -> None:
        assert self.end is None
        if isinstance(event, Piece):
            self.pieces.append(event)
        else:
            self.end = event

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def logprobs(self) -> list[Any]:
        return [entry for piece in self.pieces for entry in piece.logprobs]

    def assert_equal_so_far(self, alone: Client) -> None:
        assert alone.text.startswith(self.text)
        for entry, wanted in zip(self.logprobs, alone.logprobs, strict=False):
            assert entry["token"] == wanted["token"]
            assert entry["logprob"] == pytest.approx(wanted["logprob"], abs=1e-3)

    def assert_equal(self, alone: Client) -> None:
        self.assert_equal_so_far(alone)
        assert self.text == alone.text
        if isinstance(alone.end, Reply):
            assert isinstance(self.end, Reply), self.end
            assert (self.end.text, self.end.usage, self.end.finish) == (
                alone.end.text,
                alone.end.usage,
                alone.end.finish,
            )
            assert self.end.decoding == alone.end.decoding
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
