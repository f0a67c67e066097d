"""The queue of requests, and the one thread that runs the model on batches of them.

Requests share a batch if they have the same decoding method, and if all or none of them are checked or recorded; other options
apply row by row.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence

from revisit.errors import RevisitError
from revisit.serve.errors import ApiError, server_error
from revisit.serve.limits import Limits
from revisit.serve.replies import Piece, Reply
from revisit.serve.requests import ChatRequest
from revisit.video.clip import frame_count, pixel_count

logger = logging.getLogger(__name__)
BATCH_WAIT = 0.01  # seconds that a batch waits for further requests
SHORTER = 4  # times less work than the running batch: such requests need not wait until it ends
END_WAIT = 5.0  # seconds to wait for the model's thread at shutdown
Event = Piece | Reply | ApiError
Decode = Callable[[Sequence["Ticket"]], None]


class Abandoned(Exception):
    """Raised in a forward pass when no client waits for the batch any more."""


class Ticket:
    """One request between the event loop, which awaits `events`, and the model's thread, which sends them.

    Events are pieces if the answer is streamed, then a reply or an error.
    """

    def __init__(self, request: ChatRequest, prompt: str, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.prompt = request, prompt
        self.deadline = time.monotonic() + seconds
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.sent = False  # whether a piece of the answer was sent
        self.finished = False
        self.gone = False  # set when nobody waits for the answer any more
        pixels = sum(map(pixel_count, request.images))
        self.pixels = pixels
        self.held_bytes = 3 * pixels + sum(map(sys.getsizeof, (prompt, request.text, request.grammar)))
        self._loop = loop

    @property
    def abandoned(self) -> bool:
        """Whether the client has left or the time limit has passed."""
        return self.gone or time.monotonic() > self.deadline

    @property
    def batch_key(self) -> object:
        """Requests with equal keys can share a batch."""
        request = self.request
        lengths = frozenset(map(frame_count, request.images))
        return request.method, request.chat.check is None, request.text is None, request.record, lengths

    def stream(self, piece: Piece) -> None:
        """Send text that later tokens cannot change, if the client requested a stream."""
        if self.request.chat.stream and (piece.text or piece.logprobs or piece.thought):
            self.sent = True
            self._send(piece)

    def finish(self, last: Reply | BaseException) -> None:
        """Send the reply or the error, unless one was sent; details of unexpected errors stay in the server's log."""
        if isinstance(last, RevisitError):
            last = ApiError(400, str(last))
        if not self.finished:
            self.finished = True
            self._send(last if isinstance(last, (Reply, ApiError)) else server_error())

    def _send(self, event: Event) -> None:
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed
            self.gone = True


def timed_out() -> ApiError:
    """Return the error for an answer that took too long."""
    return ApiError(504, "The answer was not finished within the time allowed.", code="timeout")


def interrupted() -> ApiError:
    """Return the error for a stream that ended because its batch failed."""
    return ApiError(500, "The answer was interrupted by an internal error; send the request again.")


class Batcher:
    """The queue of requests, and the thread that runs the model."""

    def __init__(self, decode: Decode, limits: Limits) -> None:
        self.decode, self.limits = decode, limits
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []  # the batch
        self._ready = threading.Condition()
        self._stopping = False
        self._resumed = 0.0  # until then, the running batch is not interrupted; infinite while it is
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    @property
    def held_bytes(self) -> int:
        """The memory of queued and running requests."""
        with self._ready:
            return sum(ticket.held_bytes for ticket in (*self.waiting, *self.running))

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket."""
        with self._ready:
            if self._stopping:
                raise ApiError(503, "The server is shutting down.")
            self.waiting.append(ticket)
            self._ready.notify()

    def stop(self, timeout: float = END_WAIT) -> None:
        """Abandon all tickets and end the thread; return after `timeout` seconds at the latest."""
        with self._ready:
            self._stopping = True
            for ticket in (*self.waiting, *self.running):
                ticket.gone = True
            self._ready.notify()
        self._thread.join(timeout)

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if batch:
                self._run(batch)
            self.running = []

    def _run(self, batch: list[Ticket]) -> None:
        try:
            self.decode(batch)
        except Abandoned:
            pass
        except BaseException as error:  # the thread must outlive any batch
            self._recover(batch, error)
        for ticket in batch:
            ticket.finish(timed_out())  # no effect on finished tickets

    def _recover(self, batch: list[Ticket], error: BaseException) -> None:
        """Report the error of a request that ran alone. In a batch it may be the fault of one, so retry the others alone."""
        if not isinstance(error, RevisitError):  # clients get the message of a RevisitError
            logger.error("A batch of %d failed: %s: %s", len(batch), type(error).__name__, error, exc_info=error)
        error.__traceback__ = None  # its frames hold the batch's tensors
        for ticket in batch:
            if len(batch) == 1:
                ticket.finish(error)
            elif ticket.sent:  # its text cannot be withdrawn, and the error may tell about another client's request
                ticket.finish(interrupted())
            elif not ticket.finished:
                self._run([ticket])

    def run_shorter(self) -> None:
        """Answer waiting requests that are much shorter than the running batch before it goes on, for at most half of the time."""
        began = time.monotonic()
        if not self.waiting or began < self._resumed:
            return
        with self._ready:
            longest, outer = max(ticket.request.work for ticket in self.running), self.running
            batch = self._take([ticket for ticket in self.waiting if ticket.request.work * SHORTER <= longest])
            self.running = [*outer, *batch]
        if batch:
            self._resumed = math.inf
            self._run(batch)
            self._resumed = 2 * time.monotonic() - began
        self.running = outer

    def _next(self) -> list[Ticket] | None:
        """Wait for the next batch. Return None when the thread should end."""
        with self._ready:
            while not self.waiting:
                if self._stopping:
                    return None
                self._ready.wait()
            first = self.waiting[0]
            until = time.monotonic() + BATCH_WAIT
            while not self._stopping:
                joining = (ticket for ticket in self.waiting if ticket.batch_key == first.batch_key)
                left = until - time.monotonic()
                if left <= 0 or sum(ticket.request.chat.n for ticket in joining) >= self._size(first):
                    break
                self._ready.wait(left)
            self.running = self._take(self.waiting)
            return self.running

    def _size(self, first: Ticket) -> int:
        """Return how many rows like those of a request fit into a batch."""
        return max(1, self.limits.batch // first.request.method.own_beams)

    def _take(self, candidates: Sequence[Ticket]) -> list[Ticket]:
        """Remove the oldest of these requests, and those that can join it, from the queue; return them."""
        batch: list[Ticket] = []
        size = pixels = 0  # left; the processor needs several times the memory of its images
        for ticket in candidates:
            rows = ticket.request.chat.n
            if ticket.abandoned:
                ticket.finish(timed_out())
            elif not batch:
                size, pixels = self._size(ticket), self.limits.image_pixels
            elif ticket.batch_key != batch[0].batch_key or rows > size or rows * ticket.pixels > pixels:
                continue
            if not ticket.finished:
                batch.append(ticket)
                size, pixels = size - rows, pixels - rows * ticket.pixels
        self.waiting = [ticket for ticket in self.waiting if not (ticket.finished or ticket in batch)]
        return batch
