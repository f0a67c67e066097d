"""The web side: routes, limits that need the connection, and the way in and out of the model's queue."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from revisit import methods
from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.serve.batcher import Batcher, Ticket
from revisit.serve.limits import Limits
from revisit.serve.metrics import Metrics
from revisit.serve.protocol import (
    FORMATS,
    Ask,
    Refusal,
    Reply,
    chunk,
    completion,
    event,
    last_chunk,
    read_body,
    read_messages,
    read_request,
)

if TYPE_CHECKING:
    from revisit.serve.decoder import Decoder

PICTURE_THREADS = 4  # requests whose pictures are decoded at once


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
        allow_url: bool = False,
        log: Callable[[str], None] = print,
    ) -> None:
        self.decoder, self.name, self.method, self.limits = decoder, name, method, limits
        self.api_key, self.allow_url = api_key, allow_url
        self.metrics = Metrics()
        self.batcher = Batcher(decoder.decode, limits, self.metrics, log)
        self.metrics.gauges["revisit_queue_length"] = ("Requests waiting for the model.", lambda: self.batcher.waiting)
        self.metrics.gauges["revisit_running"] = ("Requests being decoded.", lambda: self.batcher.running)
        self._pictures, self._fetches = asyncio.Semaphore(PICTURE_THREADS), asyncio.Semaphore(PICTURE_THREADS)
        self._admitted = 0  # requests past the door and not yet queued: their bodies are in memory

    # -- the way in -----------------------------------------------------------------------------------------------

    def authorise(self, request: Request) -> None:
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), self.api_key.encode()):
            raise Refusal(401, "The API key is missing or wrong.", code="invalid_api_key")

    async def body(self, request: Request) -> bytes:
        """The request's body, of bounded size and in bounded time."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "The content type must be application/json.")
        limit = self.limits.body_bytes
        too_large = Refusal(413, f"The request is larger than the {limit:,} bytes allowed.", code="body_too_large")
        declared = request.headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            raise too_large
        parts: list[bytes] = []

        async def receive() -> None:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)

        try:
            await asyncio.wait_for(receive(), self.limits.body_seconds)
        except asyncio.TimeoutError:
            raise Refusal(408, "The request did not arrive in time.") from None
        return b"".join(parts)

    async def admit(self, request: Request) -> Ticket:
        """A queued ticket for a request, or a refusal."""
        if self.batcher.waiting + self._admitted >= self.limits.queue + PICTURE_THREADS:
            raise Refusal(429, "Too many requests are waiting; try again later.", code="queue_full")
        self._admitted += 1
        try:
            body = await asyncio.to_thread(read_body, await self.body(request))
            async with self._gate(body):
                ask, prompt = await asyncio.to_thread(self._read, body)
            ticket = Ticket(ask, prompt, self.limits.seconds, asyncio.get_running_loop())
            self.batcher.submit(ticket)
            return ticket
        finally:
            self._admitted -= 1

    def _gate(self, body: Mapping[str, Any]) -> AbstractAsyncContextManager[Any]:
        """What bounds the work on a request's pictures; those that are fetched do not keep the others waiting."""
        sources = read_messages(body.get("messages"))[1]
        if any(source.startswith(("http://", "https://")) for source in sources):
            return self._fetches
        return self._pictures if sources else nullcontext()

    def _read(self, body: Mapping[str, Any]) -> tuple[Ask, str]:
        ask = read_request(
            body,
            model=self.name,
            default=self.method,
            limits=self.limits,
            fetch=self._fetch if self.allow_url else None,
            make=lambda name, **settings: methods.recommended(name, self.decoder.model, **settings),
        )
        try:
            prompt = self.decoder.prompt(ask)
            length = self.decoder.text_length(prompt)
        except RevisitError as error:
            raise Refusal(400, str(error), param="messages") from None
        except Exception as error:  # chat templates raise what they like about roles they do not know
            raise Refusal(
                400, f"The model's chat template refuses this conversation: {error}", param="messages"
            ) from None
        if length > self.limits.prompt_tokens:
            raise Refusal(
                400,
                f"The prompt has {length} tokens; at most {self.limits.prompt_tokens} are allowed.",
                param="messages",
            )
        return ask, prompt

    def _fetch(self, url: str, max_pixels: int) -> Any:
        from revisit.serve.remote import fetch_public

        return fetch_public(url, max_pixels=max_pixels, max_bytes=self.limits.body_bytes, formats=FORMATS)

    # -- the way out ----------------------------------------------------------------------------------------------

    async def answer(self, ticket: Ticket, request: Request) -> Response:
        """The whole answer; a client that leaves takes its row out of the batch."""
        asked = time.monotonic()
        while True:
            if time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                if await request.is_disconnected():
                    ticket.gone = True
                    return Response(status_code=499)
            try:
                kind, value = await asyncio.wait_for(ticket.events.get(), 1.0)
            except asyncio.TimeoutError:
                continue
            if kind == "error":
                raise value
            if kind == "reply":
                self.note(ticket, value)
                return JSONResponse(completion(ticket.ask, value, self.name))

    async def stream(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answer as server-sent events; errors after the first are events too, because the status is sent."""
        ask = ticket.ask
        try:
            yield event(chunk(ask, self.name, {"role": "assistant", "content": ""}))
            while True:
                kind, value = await ticket.events.get()
                if kind == "text":
                    yield event(chunk(ask, self.name, {"content": value}))
                elif kind == "error":
                    self.metrics.count("revisit_requests_total", status=str(value.status))
                    yield event(value.body())
                    return
                else:
                    self.note(ticket, value)
                    yield event(chunk(ask, self.name, {}, value.finish))
                    if ask.usage_chunk:
                        yield event(last_chunk(ask, self.name, value))
                    yield b"data: [DONE]\n\n"
                    return
        finally:
            ticket.gone = True  # a client that left early stops its row

    def note(self, ticket: Ticket, reply: Reply) -> None:
        """Count a finished request."""
        method = str(reply.counters["method"])
        count = self.metrics.count
        count("revisit_requests_total", status="200")
        count("revisit_prompt_tokens_total", reply.prompt_tokens)
        count("revisit_generated_tokens_total", reply.tokens)
        for name in ("steps", "applied", "changed"):
            count(f"revisit_{name}_{'steps_' if name != 'steps' else ''}total", reply.counters[name], method=method)
        self.metrics.observe(self.metrics.seconds, time.monotonic() - ticket.arrived)
        if ticket.first is not None:
            self.metrics.observe(self.metrics.first_token, ticket.first)


def build(service: Service) -> FastAPI:
    """The application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.stop)

    app = FastAPI(title="revisit", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> JSONResponse:
        service.metrics.count("revisit_requests_total", status=str(refusal.status))
        headers = {"retry-after": "1"} if refusal.status in (429, 503) else {}
        if refusal.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        return JSONResponse(refusal.body(), refusal.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown_place(request: Request, error: HTTPException) -> JSONResponse:
        return await refuse(
            request, Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
        )

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, Refusal(500, "The server failed on this request; its log says why."))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        service.authorise(request)
        ticket = await service.admit(request)
        if ticket.ask.stream:
            return StreamingResponse(
                service.stream(ticket), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        return await service.answer(ticket, request)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        service.authorise(request)
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        service.authorise(request)
        if name != service.name:
            raise Refusal(
                404, f"There is no model {name!r} here; this server has {service.name!r}.", code="model_not_found"
            )
        return _model(service)

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.batcher.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> PlainTextResponse:
        service.authorise(request)
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "revisit"}
