"""Limits on connections: how many, and how long a slow one may take.

uvicorn limits idle connections and the size of headers. It does not limit the time to send headers and bodies or to
read an answer, nor the number of connections without a complete request; this module does, on top of its HTTP protocol.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from revisit.errors import RevisitError
from revisit.serve.limits import Limits
from revisit.serve.metrics import Metrics

logger = logging.getLogger(__name__)
OWN_FILES = 64  # descriptors kept free for the model, threads and logs
HEADER_BYTES = 64 << 10


class ConnectionGuard:
    """The open connections. At the limit, a new one displaces the oldest without a complete request.

    So slow clients cannot lock out others. Complete requests are bounded by the queue.
    """

    def __init__(self, limits: Limits, metrics: Metrics | None = None) -> None:
        self.limits, self.metrics = limits, metrics or Metrics()
        self.backlog, self.most = room(limits)
        self.open: dict[GuardedProtocol, None] = {}  # oldest first
        self.metrics.connections.set_function(lambda: len(self.open))

    def admit(self, connection: GuardedProtocol) -> None:
        """Accept a connection, or close it if there is no room."""
        if len(self.open) >= self.most:
            oldest = next((other for other in self.open if other.incomplete), None)
            if oldest is None:
                connection.give_up("too many connections")
                return
            oldest.give_up("displaced")
            del self.open[oldest]
        self.open[connection] = None

    def forget(self, connection: GuardedProtocol) -> None:
        """A connection is closed."""
        self.open.pop(connection, None)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with time limits for headers, body and reading the answer, inside a guard's bounds."""

    guard: ConnectionGuard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.guard.admit(self)
        if not transport.is_closing():
            self._start("headers", self.guard.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.forget(self)
        for name in list(self._timers):
            self._stop(name)
        super().connection_lost(exc)

    @property
    def busy(self) -> bool:
        """Whether a request has arrived, at least its headers, and is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def incomplete(self) -> bool:
        """Whether no complete request is waiting for its answer."""
        return not self.busy or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        if not self.busy and "headers" not in self._timers:
            self._start("headers", self.guard.limits.header_seconds)
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop("headers")
        if self.conn.their_state is not h11.SEND_BODY:
            self._stop("body")
        elif "body" not in self._timers:
            self._start("body", self.guard.limits.body_seconds + 1)  # the application says 408 first

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start("answer", self.guard.limits.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("answer")

    def _start(self, name: str, seconds: float) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, self.give_up, f"slow {name}")

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def give_up(self, reason: str) -> None:
        """Close without waiting for the client."""
        self.guard.metrics.refused_connections.labels(reason).inc()
        logger.debug("closed a connection: %s", reason)
        self.transport.abort()


def room(limits: Limits) -> tuple[int, int]:
    """(backlog, connections): what the process's file descriptors leave room for, at most what the limits say."""
    try:
        import resource
    except ImportError:  # Windows
        return 128, limits.connections
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return 128, limits.connections
    backlog = min(128, files // 4)
    most = min(limits.connections, files - OWN_FILES - backlog)
    if most < 1:
        raise RevisitError(
            f"Only {files} open files are allowed, too few for a server; raise the limit (ulimit -n 1024)."
        )
    return backlog, most


def configure(app: ASGIApp, limits: Limits, metrics: Metrics | None = None, **options: Any) -> uvicorn.Config:
    """uvicorn's settings for an application within these limits."""
    guard = ConnectionGuard(limits, metrics)
    protocol = type("Protocol", (GuardedProtocol,), {"guard": guard})
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="error",  # its warnings are about what clients send, as often as they like
        timeout_graceful_shutdown=int(limits.seconds) + 5,
        timeout_keep_alive=max(1, round(limits.idle_seconds)),
        backlog=guard.backlog,
        h11_max_incomplete_event_size=HEADER_BYTES,
        server_header=False,
        proxy_headers=False,
        **options,
    )
