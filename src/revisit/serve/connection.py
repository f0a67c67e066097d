"""uvicorn for these limits: its settings, its connections, and how it stops."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import math
import os
import signal
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG
from uvicorn.protocols.http.h11_impl import H11Protocol

from revisit.serve.front import HEADER_BYTES
from revisit.serve.limits import Limits

GRACE = 30.0  # seconds for accepted requests when the server is stopped


class Server(uvicorn.Server):
    """A server that a second Ctrl-C ends at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


class Connection(H11Protocol):
    """uvicorn's connection, aborted if the client takes longer than `patience` seconds to send a request or to read what was written."""

    def __init__(self, *args: Any, patience: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # call pause_writing whenever the client has something left to read
        self._wait_for("request", True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for("request", self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for("request", self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for("reader", True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_for("reader", False)

    def connection_lost(self, exc: Exception | None) -> None:
        for what in ("request", "reader"):
            self._wait_for(what, False)
        super().connection_lost(exc)

    def _wait_for(self, what: str, waiting: bool) -> None:
        """Start the client's time for something, or end it."""
        if waiting and what not in self._timers:
            self._timers[what] = self.loop.call_later(self._patience, self.transport.abort)
        elif not waiting and (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()


def configure(app: FastAPI, limits: Limits, **options: Any) -> uvicorn.Config:
    """Configure uvicorn for these limits; make glibc return the memory of large images when it is freed."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    logs = copy.deepcopy(LOGGING_CONFIG)  # one line per request, in uvicorn's format
    logs["loggers"]["uvicorn.error"]["level"] = "ERROR"
    logs["loggers"]["revisit.access"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return uvicorn.Config(
        app,
        # Once for the head of a request, and once for its body.
        http=partial(Connection, patience=2 * limits.read_seconds),  # type: ignore[arg-type]
        h11_max_incomplete_event_size=HEADER_BYTES,
        access_log=False,
        ws="none",
        log_config=logs,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=math.ceil(min(limits.seconds, GRACE)),
        server_header=False,
        proxy_headers=False,
        **options,
    )
