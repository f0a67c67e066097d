"""The routes of the server, and the path of a request to the queue and back."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.serve.batcher import Batcher, Event, Ticket, timed_out
from revisit.serve.errors import ApiError, excerpt, server_error
from revisit.serve.front import Front, Metrics
from revisit.serve.limits import LOOPBACK, Limits
from revisit.serve.replies import Json, Piece, Reply, chunk, completion, encode, event, first_chunks, last_chunks
from revisit.serve.requests import ChatRequest, PromisedServer, parse_body, read_request, unknown_model
from revisit.serve.schema import ChatBody, CheckBody

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from revisit.serve.decoder import Decoder

HOST = re.compile(r"(\[(?P<ip>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:\d{1,5})?")
READERS = 32  # threads that check requests and decode their images; large images wait in them for each other
LARGE = 1 << 20  # bytes; larger bodies are checked one after the other


class Unread(JSONResponse):
    """The answer to a request whose body was not read: what is sent of it is dropped, or the client would see a reset connection.

    A client that goes on for too long is cut off by its connection.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.body"})


class Service:
    """One model behind the routes."""

    def __init__(
        self,
        decoder: Decoder,
        name: str,
        method: Method,
        limits: Limits,
        *,
        api_key: str | None = None,
        hosts: Collection[str] = LOOPBACK,
        origins: Sequence[str] = (),
        promised: PromisedServer | None = None,
    ) -> None:
        self.decoder, self.name, self.method, self.limits = decoder, name, method, limits
        self.promised = promised
        self.api_key, self.hosts, self.origins = api_key, hosts, origins
        self.page: str | None = None  # served at / by `revisit ui`, whose requests may be recorded
        self.batcher = Batcher(partial(decoder.decode, prompt_limit=limits.prompt_tokens), limits)
        decoder.between_tokens = self.batcher.run_shorter
        self._readers, self._large = ThreadPoolExecutor(READERS, "reader"), ThreadPoolExecutor(1, "large")
        self._bodies: dict[int, bytearray] = {}  # of the requests that are being received or checked, by id()

    @property
    def held_bytes(self) -> int:
        """The memory held for requests: bodies that arrive or are being checked, and prompts and images of the others."""
        return self.batcher.held_bytes + sum(map(len, [*self._bodies.values()]))

    def close(self) -> None:
        """Abandon all requests and end the threads."""
        self.batcher.stop()
        for pool in (self._readers, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def check_host(self, request: Request) -> None:
        """Reject unknown names in the Host header, with which pages of other sites could reach a local server (DNS rebinding)."""
        header = request.headers.get("host", "")
        found = HOST.fullmatch(header.lower())
        name = found["ip"] or found["name"] if found else ""
        if "*" not in self.hosts and name not in self.hosts:
            quoted = repr(excerpt(header, 100))
            message = f"This server does not accept the host {quoted}; its operator can add it with --allow-host."
            raise ApiError(403, message, code="unknown_host")

    def check_access(self, request: Request) -> None:
        """Reject unknown host names, and requests without the header `Authorization: Bearer KEY`."""
        self.check_host(request)
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        key = sent.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""
        if self.api_key is not None and not hmac.compare_digest(key, self.api_key.encode()):  # in constant time
            message = "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key")

    async def answer(self, request: Request, kind: type[ChatBody | CheckBody]) -> Response:
        """Return the answer, whole or as a stream; errors before the first piece set the status of the response."""
        self.check_access(request)
        ticket, first = await self._admit(request, kind), None
        request.state.method = ticket.request.method.name
        try:
            first = await self._first_event(ticket, request)
        finally:
            ticket.gone = not isinstance(first, Piece)  # the answer is finished, or the client has left
        if isinstance(first, ApiError):
            raise first
        if ticket.request.chat.stream:
            return StreamingResponse(
                self._stream(ticket, first, request.state),
                media_type="text/event-stream",
                headers={"cache-control": "no-store"},
            )
        assert isinstance(first, Reply)  # only streamed answers come in pieces
        request.state.reason, request.state.usage = first.choices[0].finish, first.usage
        return Response(encode(completion(ticket.request, first)), media_type="application/json")

    async def _admit(self, request: Request, kind: type[ChatBody | CheckBody]) -> Ticket:
        """Receive and check a request, and queue it."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The content type must be application/json.")
        if {"content-length", "transfer-encoding"} <= {*request.headers}:  # h11 believes the second; a proxy may not
            raise ApiError(400, "A request must not have both Content-Length and Transfer-Encoding; remove one.")
        self._check_queue()
        self._check_body(int(request.headers.get("content-length", 0)))  # digits: h11 rejects anything else
        try:
            chat, prompt = await asyncio.wait_for(self._receive(request, kind), self.limits.read_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, "The request could not be received and checked in time; try again later.") from None
        ticket = Ticket(chat, prompt, self.limits.seconds, asyncio.get_running_loop())
        self._check_queue()
        self._check_memory(ticket.held_bytes)
        self.batcher.submit(ticket)
        return ticket

    def _check_queue(self) -> None:
        if len(self.batcher.waiting) >= self.limits.queue:
            raise ApiError(429, "Too many requests are waiting; try again later.", code="queue_full")

    def _check_body(self, size: int) -> None:
        if size > self.limits.body_bytes:
            message = f"The request is larger than the {self.limits.body_bytes:,} bytes allowed."
            raise ApiError(413, message, code="body_too_large")

    def _check_memory(self, own: int) -> None:
        """Reject a request that holds `own` bytes if that is too much beside the others."""
        others = self.held_bytes
        if others and others + own > self.limits.held_bytes:
            raise ApiError(429, "Too much data in waiting requests; try again later.", code="queue_full")

    async def _receive(self, request: Request, kind: type[ChatBody | CheckBody]) -> tuple[ChatRequest, str]:
        """Receive a body and check it in another thread; its bytes count from their arrival until that thread is done with them."""
        body = bytearray()

        def drop(_: object = None) -> None:
            del self._bodies[id(body)]
            body.clear()

        self._bodies[id(body)] = body
        try:
            async for part in request.stream():
                self._check_body(len(body) + len(part))
                self._check_memory(len(part))
                body.extend(part)
            request.state.received = True
            reading = (self._large if len(body) > LARGE else self._readers).submit(self.read, body, kind)
        except BaseException:
            drop()
            raise
        reading.add_done_callback(drop)
        return await asyncio.wrap_future(reading)

    def read(self, body: bytearray, kind: type[ChatBody | CheckBody] = ChatBody) -> tuple[ChatRequest, str]:
        """Check a body and decode its images; return the request and its prompt.

        Runs in several threads at once, so it must not use the tokenizer: the model's thread switches its padding.
        """
        parsed = parse_body(body, kind, self.name)
        chat, text = (parsed.question(), parsed.text) if isinstance(parsed, CheckBody) else (parsed, None)
        model, scale = self.decoder.model, self.decoder.scale
        request = read_request(
            chat, text, default=self.method, limits=self.limits, model=model, scale=scale, promised=self.promised
        )
        if request.record and self.page is None:
            raise ApiError(400, "This server does not record steps; `revisit ui` does.", param="decoding.record")
        try:
            prompt = self.decoder.prompt(request)
        except RevisitError as error:
            raise ApiError(400, str(error), param="messages" if text is None else "prompt") from None
        return replace(request, chat=chat.without_messages()), prompt

    async def _first_event(self, ticket: Ticket, request: Request) -> Event:
        while True:
            left = ticket.deadline - time.monotonic()
            try:
                return await asyncio.wait_for(ticket.events.get(), max(0.0, min(1.0, left)))
            except asyncio.TimeoutError:
                if left <= 0:
                    return timed_out()
                if await request.is_disconnected():
                    raise ClientDisconnect from None

    async def _stream(self, ticket: Ticket, current: Event, state: State) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, beginning with `current`; errors are events, too."""
        request = ticket.request
        state.reason = "left"
        try:
            for first in first_chunks(request):
                yield event(first)
            while isinstance(current, Piece):
                yield event(chunk(request, current))
                try:
                    current = await asyncio.wait_for(ticket.events.get(), max(0.0, ticket.deadline - time.monotonic()))
                except asyncio.TimeoutError:
                    current = timed_out()
            if isinstance(current, ApiError):
                state.reason = current.reason
                yield event(current.body())
                return
            state.reason, state.usage = current.choices[0].finish, current.usage
            for last in last_chunks(request, current):
                yield event(last)
            yield b"data: [DONE]\n\n"
        finally:
            ticket.gone = True  # a client that leaves early ends its row


def build(service: Service) -> FastAPI:
    """Create the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    about: Json = {"id": service.name, "object": "model", "created": 0, "owned_by": "revisit"}
    app = FastAPI(
        title="revisit", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    batcher = service.batcher
    metrics = Metrics(
        {
            "waiting_requests": ("Requests in the queue.", lambda: len(batcher.waiting)),
            "running_requests": ("Requests in the batch that is being decoded.", lambda: len(batcher.running)),
            "held_bytes": ("Memory held for requests; see the limit of this name.", lambda: service.held_bytes),
        }
    )
    app.add_middleware(Front, metrics=metrics)
    if service.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=service.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    @app.exception_handler(ApiError)
    async def reject(request: Request, error: ApiError) -> JSONResponse:
        request.state.reason = error.reason
        headers = {"retry-after": "1"} if error.status in (429, 503) else {}
        if error.status == 408:
            headers["connection"] = "close"  # the rest of the body is not read
        unread = request.method == "POST" and error.status != 408 and not getattr(request.state, "received", False)
        return (Unread if unread else JSONResponse)(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown_route(request: Request, error: HTTPException) -> JSONResponse:
        route = excerpt(f"{request.method} {request.scope['path']}", 100)
        sentence = f"{route}: {error.detail}; chat requests go to POST /v1/chat/completions."
        return await reject(request, ApiError(error.status_code, sentence))

    @app.exception_handler(ClientDisconnect)
    async def client_left(request: Request, error: ClientDisconnect) -> Response:
        request.state.reason = "left"
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await reject(request, server_error())

    @app.get("/", response_model=None)
    async def index(request: Request) -> Response:
        service.check_host(request)
        if service.page is not None:
            # A policy in the page itself cannot keep other sites from framing it.
            headers = {"cache-control": "no-store", "content-security-policy": "frame-ancestors 'none'"}
            return HTMLResponse(service.page, headers=headers)
        routes = ["POST /v1/chat/completions", "POST /v1/check", "GET /v1/models", "GET /health", "GET /metrics"]
        return JSONResponse({"model": service.name, "method": service.method.name, "endpoints": routes})

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatBody)

    @app.post("/v1/check", response_model=None)
    async def check(request: Request) -> Response:
        return await service.answer(request, CheckBody)

    @app.get("/v1/models")
    async def models(request: Request) -> Json:
        service.check_access(request)
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        service.check_access(request)
        if name != service.name:
            raise unknown_model(name, service.name)
        return about

    @app.get("/metrics", response_model=None)
    async def report(request: Request) -> Response:
        service.check_access(request)
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.batcher.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    return app
