"""The queue of requests, and the one thread that runs the model on batches of them.

Requests share a batch if they share a decoding method and all or none of them are checked; everything else is applied row by row.
Recorded requests are decoded alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from revisit.errors import RevisitError
from revisit.serve.errors import ApiError, server_error, shorten
from revisit.serve.limits import Limits
from revisit.serve.metrics import Metrics
from revisit.serve.replies import Json, Piece, Reply
from revisit.serve.requests import ChatRequest

logger = logging.getLogger(__name__)
Decode = Callable[[Sequence["Ticket"], int], None]


class Ticket:
    """One request between the web side, which awaits `events`, and the model's thread, which fills it.

    Events are pieces if the answer is streamed, then a reply or an error.
    """

    def __init__(self, request: ChatRequest, prompt: str, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.prompt = request, prompt
        self.arrived = time.monotonic()
        self.deadline = self.arrived + seconds
        self.events: asyncio.Queue[Piece | Reply | ApiError] = asyncio.Queue()
        self.first: float | None = None  # seconds to the first token
        self.finished = False
        self.pixels = sum(image.width * image.height for image in request.images)
        self.gone = False  # set by the web side when the client has left
        self._loop = loop

    @property
    def abandoned(self) -> bool:
        """Whether the client left or its time is over."""
        return self.gone or time.monotonic() > self.deadline

    def can_join(self, other: Ticket) -> bool:
        """Whether the two can be decoded in one batch."""
        mine, others = (
            (ticket.request.method, ticket.request.check is None, ticket.request.text is None, ticket.request.record)
            for ticket in (self, other)
        )
        return self is other or (mine == others and self.request.record is None)

    def show(self, text: str, record: Json | None = None) -> None:
        """Send text that is final, if the answer is streamed."""
        if self.first is None:
            self.first = time.monotonic() - self.arrived
        if self.request.stream and (text or record):
            self._send(Piece(text, record))

    def succeed(self, reply: Reply) -> None:
        self._end(reply)

    def fail(self, error: BaseException) -> None:
        """The error as the client will see it; details of anything unexpected stay in the server's log."""
        if isinstance(error, RevisitError):
            error = ApiError(400, shorten(str(error), 600))
        self._end(error if isinstance(error, ApiError) else server_error())

    def time_out(self) -> None:
        self.fail(ApiError(504, "The answer was not finished within the time allowed.", code="timeout"))

    def _end(self, last: Reply | ApiError) -> None:
        if not self.finished:
            self.finished = True
            self._send(last)

    def _send(self, event: Piece | Reply | ApiError) -> None:
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed
            self.gone = True


class Batcher:
    """The queue and the model's thread."""

    def __init__(self, decode: Decode, limits: Limits, metrics: Metrics) -> None:
        self.decode, self.limits, self.metrics = decode, limits, metrics
        self._waiting: deque[Ticket] = deque()
        self._ready = threading.Condition()
        self._stopping = False
        self._batch: list[Ticket] = []
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._batch)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket; refuses when the queue is full or the server is shutting down."""
        with self._ready:
            if self._stopping:
                raise ApiError(503, "The server is shutting down.")
            if len(self._waiting) >= self.limits.queue:
                raise ApiError(
                    429, f"{len(self._waiting)} requests are already waiting; try again later.", code="queue_full"
                )
            held = sum(other.pixels for other in (*self._waiting, *self._batch))
            if held and held + ticket.pixels > self.limits.held_pixels:
                raise ApiError(429, "Too many image pixels in waiting requests; try again later.", code="queue_full")
            self._waiting.append(ticket)
            self._ready.notify()

    def stop(self, timeout: float | None = None) -> None:
        """Take no new tickets, finish all that are waiting, and end the thread."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join(timeout)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if batch:
                self._run(batch)
            self._batch = []

    def _run(self, batch: list[Ticket]) -> None:
        self.metrics.batch.observe(len(batch))
        try:
            self.decode(batch, self.limits.prompt_tokens)
        except BaseException as error:  # the thread must outlive any batch
            self._recover(batch, error)
        for ticket in batch:
            if not ticket.finished:
                ticket.time_out()

    def _recover(self, batch: list[Ticket], error: BaseException) -> None:
        """After a failure, retry alone the requests that have sent no text: only one of them may be at fault."""
        if not isinstance(error, RevisitError):  # which the client sees itself
            logger.error("A batch of %d failed: %s: %s", len(batch), type(error).__name__, error, exc_info=error)
        for ticket in batch:
            if ticket.finished:
                continue
            if len(batch) > 1 and ticket.first is None:
                self._run([ticket])
            else:
                ticket.fail(error)

    def _next(self) -> list[Ticket] | None:
        """The next batch: the oldest request and those that can join it; None after the last."""
        with self._ready:
            while not self._waiting:
                if self._stopping:
                    return None
                self._ready.wait()
            first = self._waiting[0]
            until = time.monotonic() + self.limits.batch_wait
            while sum(ticket.can_join(first) for ticket in self._waiting) < self.limits.batch and not self._stopping:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._ready.wait(left)
            batch: list[Ticket] = []
            rest: deque[Ticket] = deque()
            for ticket in self._waiting:
                if ticket.abandoned:
                    if not ticket.gone:
                        ticket.time_out()
                    ticket.finished = True
                elif len(batch) < self.limits.batch and ticket.can_join(first):
                    batch.append(ticket)
                else:
                    rest.append(ticket)
            self._waiting, self._batch = rest, batch
            return batch
