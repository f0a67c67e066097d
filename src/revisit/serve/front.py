"""Around all routes: the size of headers, and one log line and the metrics of each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from revisit.serve.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER_BYTES = 64 << 10
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
logger = logging.getLogger("revisit.access")


class Metrics:
    """What `GET /metrics` reports."""

    def __init__(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "revisit_requests", "Finished requests.", ["route", "status", "method", "reason"], registry=registry
        )
        self.seconds = Histogram(
            "revisit_request_seconds", "Time to the end of a response.", ["route"], buckets=SECONDS, registry=registry
        )
        self.tokens = Counter("revisit_tokens", "Tokens of answered requests.", ["kind"], registry=registry)
        for name, (about, value) in gauges.items():
            Gauge(f"revisit_{name}", about, registry=registry).set_function(value)


class Front:
    """ASGI middleware around all others. Routes leave what is known of a request in its state: `method`, `reason`, `usage`."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500
        state = scope.setdefault("state", {})

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        try:
            if size > HEADER_BYTES:
                error = ApiError(431, f"The headers have more than {HEADER_BYTES:,} bytes.", code="headers_too_large")
                state["reason"] = error.reason
                await JSONResponse(error.body(), error.status)(scope, receive, watched)
            else:
                await self.app(scope, receive, watched)
        finally:
            self._note(scope, status, time.monotonic() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        state, route = scope["state"], getattr(scope.get("route"), "path", "other")
        method, reason = state.get("method", "-"), state.get("reason", "-")
        client, path = (scope["client"] or ("-",))[0], scope["path"].encode("unicode_escape").decode()[:100]
        logger.info("%s %s %s %d %s %s %.3f s", client, scope["method"], path, status, method, reason, seconds)
        self.metrics.requests.labels(route, status, method, reason).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        for kind in ("prompt", "completion"):
            self.metrics.tokens.labels(kind).inc(state.get("usage", {}).get(f"{kind}_tokens", 0))
