"""The web side of the server: its routes, and the way of a request to the queue and back."""

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.explain.checkable import check_text, word_test
from revisit.serve.access import LOOPBACK, check_host, check_key
from revisit.serve.batcher import Batcher, Event, Ticket, timed_out
from revisit.serve.errors import ApiError, printable, server_error
from revisit.serve.limits import Limits
from revisit.serve.metrics import Metrics
from revisit.serve.replies import Json, Piece, Reply, chunk, completion, event, last_chunk
from revisit.serve.requests import ChatRequest, parse_body, read_request, unknown_model
from revisit.serve.schema import ChatBody, CheckBody

if TYPE_CHECKING:
    from revisit.serve.decoder import Decoder

logger = logging.getLogger(__name__)
READERS = 4  # requests that are checked, and whose images are decoded, at once
CLIENT_LEFT = 499
WELCOME = """<!doctype html><meta charset="utf-8"><title>ReVisiT</title>
<body style="max-width: 44rem; margin: 3rem auto; font: 1rem/1.5 system-ui, sans-serif">
<h1>ReVisiT</h1>
<p>This server answers OpenAI chat requests with the model <code>{model}</code>, decoded by <code>{method}</code>.</p>
<pre>curl {url}v1/chat/completions -H 'content-type: application/json' \\
  -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'</pre>
<p><code>POST /v1/chat/completions</code> · <code>POST /v1/check</code> · <a href="/v1/models">/v1/models</a> ·
<a href="/v1/schema">/v1/schema</a> · <a href="/health">/health</a> · <a href="/metrics">/metrics</a></p>
<p>For a page to try images and methods, run <code>revisit ui</code>.</p>
"""


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
        allow_record: bool = False,
    ) -> None:
        self.decoder, self.name, self.method, self.limits = decoder, name, method, limits
        self.api_key, self.hosts, self.allow_record = api_key, hosts, allow_record
        self.page: str | None = None  # what is shown at / in place of the welcome page
        self.metrics = Metrics()
        self.batcher = Batcher(decoder.decode, limits, self.metrics)
        self.metrics.waiting.set_function(lambda: self.batcher.waiting)
        self.metrics.running.set_function(lambda: self.batcher.running)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self._reading = 0  # requests that are received or checked
        self._reading_bytes = 0

    def close(self) -> None:
        """Abandon what is left and end the threads."""
        self.batcher.stop()
        self._readers.shutdown(wait=False, cancel_futures=True)

    # -- requests ------------------------------------------------------------------------------------------------

    def check_access(self, request: Request) -> None:
        check_host(request, self.hosts)
        check_key(request, self.api_key)

    async def admit(self, request: Request, kind: type[ChatBody | CheckBody] = ChatBody) -> Ticket:
        """Receive and check a request, and queue it."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The content type must be application/json.")
        if self.batcher.waiting + self._reading >= self.limits.queue:
            raise ApiError(429, "Too many requests are waiting; try again later.", code="queue_full")
        size = self._declared_bytes(request)
        self._check_memory(size)
        self._reading += 1
        self._reading_bytes += size
        try:
            chat_request, prompt = await asyncio.wait_for(self._read(request, kind), self.limits.read_seconds)
        except asyncio.TimeoutError:
            raise ApiError(408, "The request could not be received and checked in time; try again later.") from None
        finally:
            self._reading -= 1
            self._reading_bytes -= size
        ticket = Ticket(chat_request, prompt, self.limits.seconds, asyncio.get_running_loop())
        self._check_memory(ticket.image_bytes)
        self.batcher.submit(ticket)
        return ticket

    def _check_memory(self, more: int) -> None:
        held = self.batcher.held_bytes + self._reading_bytes
        if held and held + more > self.limits.held_bytes:
            raise ApiError(429, "Too much data in waiting requests; try again later.", code="queue_full")

    def _declared_bytes(self, request: Request) -> int:
        """Return the size that a request declares, or the largest size if it declares none."""
        declared = request.headers.get("content-length", "")  # digits: h11 rejects anything else
        size = int(declared) if declared else self.limits.body_bytes
        if size > self.limits.body_bytes:
            raise self._too_large()
        return size

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"The request is larger than the {self.limits.body_bytes:,} bytes allowed.", code="body_too_large"
        )

    async def _read(self, request: Request, kind: type[ChatBody | CheckBody]) -> tuple[ChatRequest, str]:
        body = bytearray()
        async for part in request.stream():
            body.extend(part)
            if len(body) > self.limits.body_bytes:
                raise self._too_large()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self.read, bytes(body), kind)

    def read(self, body: bytes, kind: type[ChatBody | CheckBody] = ChatBody) -> tuple[ChatRequest, str]:
        """Check a body and decode its images; return the request and its prompt.

        Runs in several threads at once, so it must not use the tokenizer: the model's thread switches its padding.
        """
        if kind is CheckBody:
            question = parse_body(body, CheckBody, self.name)
            chat, text = question.question(), question.text
        else:
            chat, text = parse_body(body, ChatBody, self.name), None
        if chat.decoding is not None and chat.decoding.record and not self.allow_record:
            raise ApiError(400, "This server does not record steps; `revisit ui` does.", param="decoding.record")
        param = "text"
        try:
            if text is not None:
                check_text(text)
            param = "words"
            if chat.check is not None:
                word_test(chat.check.words)
            request = read_request(chat, text, default=self.method, limits=self.limits, model=self.decoder.model)
            param = "messages"
            return request, self.decoder.prompt(request)
        except RevisitError as error:
            raise ApiError(400, str(error), param=param) from None

    # -- answers ------------------------------------------------------------------------------------------------

    async def respond(self, ticket: Ticket, request: Request) -> Response:
        """Return the answer, whole or as a stream; errors before the first piece have a status of their own."""
        first: Event | None = None
        try:
            first = await self._first_event(ticket, request)
        finally:
            ticket.gone = not isinstance(first, Piece)  # the answer is finished, or nobody waits for it any more
        if isinstance(first, ApiError):
            raise first
        if ticket.request.stream:
            return StreamingResponse(
                self.stream(ticket, first), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        assert isinstance(first, Reply)  # only streamed answers come in pieces
        self.count(ticket, first)
        return JSONResponse(completion(ticket.request, first, self.name))

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

    async def stream(self, ticket: Ticket, got: Event) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events, beginning with the first; errors are events, too."""
        request = ticket.request
        try:
            yield event(chunk(request, self.name, {"role": "assistant", "content": ""}))
            while isinstance(got, Piece):
                yield event(chunk(request, self.name, {"content": got.text}, record=got.record))
                try:
                    got = await asyncio.wait_for(ticket.events.get(), max(0.0, ticket.deadline - time.monotonic()))
                except asyncio.TimeoutError:
                    got = timed_out()
            if isinstance(got, ApiError):
                self.metrics.answered(got.status)
                yield event(got.body())
                return
            self.count(ticket, got)
            yield event(chunk(request, self.name, {}, got))
            if request.usage_chunk:
                yield event(last_chunk(request, self.name, got))
            yield b"data: [DONE]\n\n"
        finally:
            ticket.gone = True  # a client that leaves early ends its row

    def count(self, ticket: Ticket, reply: Reply) -> None:
        """Count a finished request."""
        metrics, method = self.metrics, reply.method
        metrics.answered(200)
        metrics.prompt_tokens.inc(reply.prompt_tokens)
        metrics.generated_tokens.inc(reply.tokens)
        metrics.steps.labels(method).inc(reply.counters["steps"])
        metrics.applied_steps.labels(method).inc(reply.counters["applied"])
        metrics.changed_steps.labels(method).inc(reply.counters["changed"])
        metrics.seconds.observe(time.monotonic() - ticket.arrived)
        if ticket.first is not None:
            metrics.first_token.observe(ticket.first)


def build(service: Service) -> FastAPI:
    """Create the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    schemas = {"chat": ChatBody.model_json_schema(), "check": CheckBody.model_json_schema()}
    app = FastAPI(
        title="revisit", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )

    @app.exception_handler(ApiError)
    async def reject(request: Request, error: ApiError) -> JSONResponse:
        service.metrics.answered(error.status)
        headers = {"retry-after": "1"} if error.status in (429, 503) else {}
        if error.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown_route(request: Request, error: HTTPException) -> JSONResponse:
        route = printable(f"{request.method} {request.scope['path']}", 100)
        return await reject(request, ApiError(error.status_code, f"{route}: {error.detail}."))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        service.metrics.answered(CLIENT_LEFT)
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await reject(request, server_error())

    @app.get("/")
    async def index(request: Request) -> HTMLResponse:
        check_host(request, service.hosts)
        if service.page is not None:
            return HTMLResponse(service.page, headers={"cache-control": "no-store"})
        names = {"model": service.name, "method": service.method.name, "url": request.base_url}
        return HTMLResponse(WELCOME.format(**{key: html.escape(str(value)) for key, value in names.items()}))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        service.check_access(request)
        return await service.respond(await service.admit(request), request)

    @app.post("/v1/check", response_model=None)
    async def check(request: Request) -> Response:
        service.check_access(request)
        return await service.respond(await service.admit(request, CheckBody), request)

    @app.get("/v1/models")
    async def models(request: Request) -> Json:
        service.check_access(request)
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Json:
        service.check_access(request)
        if name != service.name:
            raise unknown_model(name, service.name)
        return _model(service)

    @app.get("/v1/schema")
    async def schema(request: Request, of: Literal["chat", "check"] = "chat") -> Json:
        """Return the JSON schema of a chat request, or of one to /v1/check."""
        service.check_access(request)
        return schemas[of]

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.batcher.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.check_access(request)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _model(service: Service) -> Json:
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "revisit"}
