"""The web side of the server: its routes, and requests on their way to the queue and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.explain.check import check_text, word_test
from revisit.serve.access import LOOPBACK, Bodies, check_host, check_key
from revisit.serve.batcher import Batcher, Ticket
from revisit.serve.errors import ApiError, server_error, shorten
from revisit.serve.limits import Limits
from revisit.serve.metrics import Metrics
from revisit.serve.replies import Json, Piece, Reply, chunk, completion, event, last_chunk
from revisit.serve.requests import ChatRequest, parse_chat, parse_check, read_request, unknown_model
from revisit.serve.schema import ChatBody, CheckBody

if TYPE_CHECKING:
    from revisit.serve.decoder import Decoder

logger = logging.getLogger(__name__)
READERS = 4  # requests that are checked, and whose images are decoded, at once
CLIENT_LEFT = 499
T = TypeVar("T")


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
        self.metrics = Metrics()
        self.batcher = Batcher(decoder.decode, limits, self.metrics)
        self.metrics.waiting.set_function(lambda: self.batcher.waiting)
        self.metrics.running.set_function(lambda: self.batcher.running)
        self._readers = ThreadPoolExecutor(READERS, "reader")
        self._bodies = Bodies(limits)
        self._admitted = 0  # requests that are being read

    def close(self) -> None:
        """Finish the queued requests and end the threads."""
        self.batcher.stop()
        self._readers.shutdown(wait=False, cancel_futures=True)

    # -- requests ------------------------------------------------------------------------------------------------

    def check_access(self, request: Request) -> None:
        check_host(request, self.hosts)
        check_key(request, self.api_key)

    async def admit(self, request: Request, *, check: bool = False) -> Ticket:
        """A queued ticket for a chat request, or for the check of a text; or `ApiError`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "The content type must be application/json.")
        if self.batcher.waiting + self._admitted >= self.limits.queue + READERS:
            raise ApiError(429, "Too many requests are waiting; try again later.", code="queue_full")
        self._admitted += 1
        try:
            async with self._bodies.read(request) as body:
                chat_request, prompt = await self._timed(lambda: self._parse(body, check))
            ticket = Ticket(chat_request, prompt, self.limits.seconds, asyncio.get_running_loop())
            self.batcher.submit(ticket)
            return ticket
        finally:
            self._admitted -= 1

    async def _timed(self, work: Callable[[], T]) -> T:
        """The result of work in a thread; work that has not started within the time limit is dropped."""
        try:
            return await asyncio.wait_for(
                asyncio.get_running_loop().run_in_executor(self._readers, work), self.limits.read_seconds
            )
        except asyncio.TimeoutError:
            raise ApiError(503, "The request could not be read in time; try again later.", code="busy") from None

    def _parse(self, body: bytes, check: bool) -> tuple[ChatRequest, str]:
        if check:
            return self.read(*parse_check(body, self.name, self.limits))
        return self.read(parse_chat(body, self.name, self.limits))

    def read(self, chat: ChatBody, text: str | None = None) -> tuple[ChatRequest, str]:
        """A valid body as a request and its prompt; with `text`, that is checked instead of an answer."""
        if text is not None:
            _refuse(lambda: check_text(text), "text")
        if (choice := chat.check) is not None:
            _refuse(lambda: word_test(choice.words), "words")
        if chat.decoding is not None and chat.decoding.record and not self.allow_record:
            raise ApiError(400, "This server does not record steps; `revisit ui` does.", param="decoding.record")
        request = read_request(chat, text, default=self.method, limits=self.limits, model=self.decoder.model)
        try:
            prompt = self.decoder.prompt(request)
            length = self.decoder.text_length(prompt + (text or ""))
        except RevisitError as error:
            raise ApiError(400, str(error), param="messages") from None
        except Exception as error:  # templates raise anything about unknown roles
            text = shorten(str(error))
            raise ApiError(
                400, f"The model's chat template rejects this conversation: {text}", param="messages"
            ) from None
        if length > self.limits.prompt_tokens:
            raise ApiError(
                400,
                f"The prompt has {length} tokens; at most {self.limits.prompt_tokens} are allowed.",
                param="messages",
            )
        return request, prompt

    # -- answers ------------------------------------------------------------------------------------------------

    async def answer(self, ticket: Ticket, request: Request) -> Response:
        """The answer in one piece; if the client leaves, its row ends."""
        while True:
            try:
                got = await asyncio.wait_for(ticket.events.get(), 1.0)
                break
            except asyncio.TimeoutError:
                if await request.is_disconnected():
                    ticket.gone = True
                    raise ClientDisconnect from None
        if isinstance(got, ApiError):
            raise got
        assert isinstance(got, Reply)  # only streamed answers come in pieces
        self.count(ticket, got)
        return JSONResponse(completion(ticket.request, got, self.name))

    async def stream(self, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answer as server-sent events; errors after the first are events too, because the status is sent."""
        request = ticket.request
        try:
            yield event(chunk(request, self.name, {"role": "assistant", "content": ""}))
            while True:
                got = await ticket.events.get()
                if isinstance(got, Piece):
                    yield event(chunk(request, self.name, {"content": got.text}, record=got.record))
                elif isinstance(got, ApiError):
                    self.metrics.answered(got.status)
                    yield event(got.body())
                    return
                else:
                    self.count(ticket, got)
                    yield event(chunk(request, self.name, {}, got))
                    if request.usage_chunk:
                        yield event(last_chunk(request, self.name, got))
                    yield b"data: [DONE]\n\n"
                    return
        finally:
            ticket.gone = True  # a client that left early stops its row

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
    """The application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    schemas = {"chat": ChatBody.model_json_schema(), "check": CheckBody.model_json_schema()}
    app = FastAPI(
        title="revisit", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        service.metrics.answered(error.status)
        headers = {"retry-after": "1"} if error.status in (429, 503) else {}
        if error.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown_place(request: Request, error: HTTPException) -> JSONResponse:
        method, path = shorten(request.method, 20), shorten(request.scope["path"], 100)
        return await refuse(request, ApiError(error.status_code, f"{method} {path}: {error.detail}."))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        service.metrics.answered(CLIENT_LEFT)
        return Response(status_code=CLIENT_LEFT)  # nobody reads it

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> JSONResponse:
        return await refuse(request, server_error())

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(request: Request) -> Response:
        service.check_access(request)
        ticket = await service.admit(request)
        if ticket.request.stream:
            return StreamingResponse(
                service.stream(ticket), media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        return await service.answer(ticket, request)

    @app.post("/v1/check", response_model=None)
    async def check(request: Request) -> Response:
        service.check_access(request)
        return await service.answer(await service.admit(request, check=True), request)

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
        """What a chat request may hold, or one to /v1/check, as a JSON schema."""
        service.check_access(request)
        return schemas[of]

    @app.get("/health")
    async def health() -> JSONResponse:
        alive = service.batcher.alive
        return JSONResponse({"status": "ok" if alive else "stopping"}, 200 if alive else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.check_access(request)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


def _refuse(test: Callable[[], object], field: str) -> None:
    """Turns what a test of a field raises into a refusal."""
    try:
        test()
    except RevisitError as error:
        raise ApiError(400, shorten(str(error)), param=field) from None


def _model(service: Service) -> Json:
    return {"id": service.name, "object": "model", "created": 0, "owned_by": "revisit"}
