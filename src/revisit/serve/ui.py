"""The interactive page: drop an image, ask, watch the answers of several methods grow side by side.

It is for one person on one machine. It listens on loopback unless told otherwise, answers only requests that name its
own host (so that no other web page can reach it through the browser), and keeps the last few images and answers in
memory, nowhere else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import queue
import threading
import time
import typing
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from revisit.errors import RevisitError

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.explain.record import Decode

MOST_BYTES = 64 << 20  # of an uploaded file
MOST_METHODS = 4
LONGEST = 1024  # tokens
KEPT = 8  # images and answers
PROMPT = "Please describe this image in detail."
T = TypeVar("T")


class Shelf(Generic[T]):
    """The last few things, by a name that cannot be guessed."""

    def __init__(self, size: int = KEPT) -> None:
        self.size, self.things = size, OrderedDict[str, T]()
        self.lock = threading.Lock()

    def put(self, thing: T) -> str:
        name = uuid.uuid4().hex
        with self.lock:
            self.things[name] = thing
            while len(self.things) > self.size:
                self.things.popitem(last=False)
        return name

    def get(self, name: str) -> T | None:
        with self.lock:
            return self.things.get(name)


@dataclass(frozen=True)
class Ask:
    """One question, checked."""

    image: Image
    prompt: str
    model: str
    methods: tuple[Method, ...]
    max_new_tokens: int


@dataclass
class Room:
    """What the page works with: models (one loaded at a time), images and answers of the last minutes."""

    models: tuple[str, ...]
    loader: Callable[[str], tuple[Any, Any]]
    images: Shelf[Image] = field(default_factory=Shelf)
    runs: Shelf[Decode] = field(default_factory=Shelf)
    turn: threading.Lock = field(default_factory=threading.Lock)  # one question at a time
    loaded: tuple[str, Any, Any] | None = None

    def model(self, name: str) -> tuple[Any, Any]:
        """(model, processor); held under `turn`."""
        if self.loaded is None or self.loaded[0] != name:
            self.loaded = None  # let go of the old one first: two may not fit
            self.loaded = (name, *self.loader(name))
        return self.loaded[1], self.loaded[2]

    def read(self, body: bytes) -> Ask:
        """A request as a question, or one sentence that says what is wrong with it."""
        from revisit import methods
        from revisit.errors import unknown

        try:
            data = json.loads(body)
            image_id, prompt, model = str(data["image"]), str(data["prompt"]), str(data["model"])
            wanted = [(str(m["name"]), dict(m.get("settings") or {})) for m in data["methods"]]
            length = int(data.get("max_new_tokens", 128))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RevisitError("The request is not what this page sends.") from None
        image = self.images.get(image_id)
        if image is None:
            raise RevisitError("The image is no longer in memory; choose it again.")
        if not prompt.strip():
            raise RevisitError("The question is empty; say what to ask.")
        if model not in self.models:
            raise unknown("model", model, self.models)
        if not 1 <= len(wanted) <= MOST_METHODS:
            raise RevisitError(f"Choose one to {MOST_METHODS} methods, not {len(wanted)}.")
        if not 1 <= length <= LONGEST:
            raise RevisitError(f"An answer may have 1 to {LONGEST} tokens, not {length}.")
        about = described(model)
        made = (methods.recommended(name, about, **settings) for name, settings in wanted)
        return Ask(image, prompt, model, tuple(made), length)


class Steps:
    """A transformers streamer that hands on every chosen token with what the trace recorded about it."""

    def __init__(self, tokenizer: Any, trace: Any, send: Callable[[Any], None]) -> None:
        from revisit.explain.record import TokenTexts

        self.tokenizer, self.trace, self.send = tokenizer, trace, send
        self.reader, self.count, self.prompt_seen = TokenTexts(tokenizer), 0, False

    def put(self, value: Any) -> None:
        if not self.prompt_seen:  # the first call is the prompt
            self.prompt_seen = True
            return
        from revisit.explain.record import step_of

        for token in value.flatten().tolist():
            records = self.trace.rows[0].records
            record = records[self.count] if self.count < len(records) else None
            self.send(step_of(self.tokenizer, token, self.reader.add(token), record, self.trace.method))
            self.count += 1

    def end(self) -> None:
        pass


class Job:
    """One question being answered: a thread per method, one queue of events, and a way to stop."""

    def __init__(self, room: Room, ask: Ask) -> None:
        self.room, self.ask = room, ask
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._guard, args=(self._run,), daemon=True)
        self.thread.start()

    def send(self, kind: str, **data: Any) -> None:
        self.events.put((kind, data))

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        """An error ends the question with a sentence, not the thread with a traceback."""
        try:
            work(*args)
        except RevisitError as error:
            self.send("error", text=str(error))
            self.stopped.set()
        except Exception as error:
            self.send("error", text=f"The model could not answer: {type(error).__name__}: {error}")
            self.stopped.set()

    def _run(self) -> None:
        if not self.room.turn.acquire(blocking=False):
            self.send("wait", text="Another question is being answered; this one is next.")
            while not self.room.turn.acquire(timeout=0.2):
                if self.stopped.is_set():
                    return
        try:
            self._answer()
        finally:
            self.room.turn.release()

    def _answer(self) -> None:
        from revisit.explain.page import images_payload
        from revisit.explain.record import Answer, Decode, label, layout_of
        from revisit.models.prompts import prepare

        ask = self.ask
        if self.room.loaded is None or self.room.loaded[0] != ask.model:
            self.send("wait", text=f"Loading {ask.model}…")
        model, processor = self.room.model(ask.model)
        inputs = prepare(processor, [ask.prompt], [[ask.image]], model.device)
        layout = layout_of(model, processor, [ask.image], inputs)
        described = [{"name": method.name, **method.settings()} for method in ask.methods]
        blank: list[dict[str, Any]] = [
            {"label": label(d), "far": d.get("select") == "max", "n": layout.tokens, "maps": "", "steps": []}
            for d in described
        ]
        self.send("scene", **images_payload([ask.image], layout), answers=blank)
        answers: list[Answer | None] = [None] * len(ask.methods)
        threads = [
            threading.Thread(
                target=self._guard, args=(self._one, number, model, processor, inputs, answers), daemon=True
            )
            for number in range(len(ask.methods))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = [answer for answer in answers if answer is not None]
        if len(done) == len(answers) and not self.stopped.is_set():
            decode = Decode([ask.image], ask.prompt, ask.model, layout, done)
            differs = [[n for n, step in enumerate(answer.steps) if step.differs] for answer in done]
            self.send("done", run=self.room.runs.put(decode), differs=differs)

    def _one(self, number: int, model: Any, processor: Any, inputs: Any, answers: list[Any]) -> None:
        import base64

        import torch
        from transformers import StoppingCriteriaList

        from revisit.decoding.loop import generate
        from revisit.decoding.trace import Trace
        from revisit.explain.page import step_payload
        from revisit.explain.record import answer_of
        from revisit.models.prompts import new_tokens

        def send(step: Any) -> None:
            entry, row = step_payload(step)
            self.send("step", answer=number, step=entry, map=None if row is None else base64.b64encode(row).decode())

        def stop(input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((len(input_ids),), self.stopped.is_set(), device=input_ids.device)

        trace = Trace(record=True)
        started = time.perf_counter()
        output = generate(
            model,
            **inputs,
            method=self.ask.methods[number],
            trace=trace,
            streamer=Steps(processor.tokenizer, trace, send),
            stopping_criteria=StoppingCriteriaList([stop]),  # type: ignore[list-item]
            max_new_tokens=self.ask.max_new_tokens,
            do_sample=False,
        )
        seconds = time.perf_counter() - started
        answers[number] = answer_of(processor, new_tokens(output, inputs)[0].tolist(), trace, seconds=seconds)
        self.send("finished", answer=number, seconds=seconds, text=answers[number].text)

    async def stream(self) -> AsyncIterator[str]:
        """The events as text/event-stream; whoever stops reading stops the work."""
        try:
            while True:
                try:
                    kind, data = await asyncio.to_thread(self.events.get, True, 0.5)
                except queue.Empty:
                    if not self.thread.is_alive() and self.events.empty():
                        return
                    yield ": still here\n\n"
                    continue
                yield f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
                if kind in ("done", "error"):
                    return
        finally:
            self.stopped.set()


def create_app(
    models: typing.Sequence[str] = ("tiny",), loader: Callable[[str], tuple[Any, Any]] | None = None
) -> FastAPI:
    """The page and what it asks for."""
    from revisit.explain.page import render
    from revisit.models.images import read_image
    from revisit.models.loading import load
    from revisit.pages.document import data_uri

    room = Room(tuple(models), loader or load)
    app = FastAPI(title="ReVisiT", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.room = room

    def refuse(text: str, status: int = 400) -> JSONResponse:
        return JSONResponse({"error": text}, status)

    def keep(image: Image) -> JSONResponse:
        return JSONResponse({"id": room.images.put(image), "w": image.width, "h": image.height, "src": data_uri(image)})

    @app.middleware("http")
    async def same_origin(request: Request, call_next: Any) -> Response:
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            return refuse("Requests from other pages are not answered.", 403)
        if not _is_own(host, app.state.hosts):
            return refuse("This page answers only under its own address.", 403)
        response: Response = await call_next(request)
        response.headers["Cache-Control"] = "no-store"
        return response

    app.state.hosts = ("127.0.0.1", "localhost", "[::1]")

    @app.get("/")
    async def index() -> HTMLResponse:
        return HTMLResponse(page(room.models))

    @app.post("/api/image")
    async def image(request: Request, name: str = "image") -> Response:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > MOST_BYTES:
                return refuse(f"The file is larger than the {MOST_BYTES >> 20} MB that are taken.", 413)
            parts.append(part)
        try:
            opened = await asyncio.to_thread(read_image, b"".join(parts), name)
        except RevisitError as error:
            return refuse(str(error))
        return await asyncio.to_thread(keep, opened)

    @app.post("/api/sample")
    async def sample() -> Response:
        try:
            return await asyncio.to_thread(lambda: keep(sample_scene()))
        except RevisitError as error:
            return refuse(str(error))

    @app.post("/api/run")
    async def run(request: Request) -> Response:
        body = await request.body()
        try:
            ask = room.read(body)
        except RevisitError as error:
            return refuse(str(error))
        return StreamingResponse(Job(room, ask).stream(), media_type="text/event-stream")

    @app.get("/api/page/{name}")
    async def saved(name: str) -> Response:
        decode = room.runs.get(name)
        if decode is None:
            return refuse("That answer is no longer in memory; ask again.", 404)
        text = await asyncio.to_thread(render, decode)
        return HTMLResponse(text, headers={"Content-Disposition": 'attachment; filename="revisit.html"'})

    return app


def _is_own(host: str, allowed: typing.Sequence[str]) -> bool:
    """Whether a Host header names one of our addresses, whatever the port."""
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name in allowed


def sample_scene() -> Image:
    """A new scene of the kind that the embedded model knows."""
    import random

    try:
        from revisit.tiny.scenes import render, scene
    except ImportError:
        raise RevisitError("Sample images need the scenes' pictures: pip install 'revisit-decoding[tiny]'.") from None
    return render(scene("unusual", 0, random.randrange(100_000)))


def page(models: typing.Sequence[str]) -> str:
    """The page itself, with everything it needs inside."""
    from revisit.pages.document import script_page

    setup = {
        "models": list(models),
        "methods": {name: method_settings(described(name)) for name in models},
        "start": ["revisit", "greedy"],
        "prompt": PROMPT,
        "longest": LONGEST,
        "bytes": MOST_BYTES,
        "samples": True,
    }
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    )
    start = """document.getElementById("buttons").append(themeButton());
window.studio = new Studio(document.getElementById("main"), JSON.parse(document.getElementById("data").textContent));"""
    return script_page(
        "ReVisiT",
        setup,
        styles=["viewer.css", "ui.css"],
        scripts=["viewer.js", "ui.js"],
        start=start,
        meta="Ask about an image; see which patch spoke.",
        policy=policy,
    )


@functools.cache
def described(model: str) -> Any:
    """What recommendations look at; the model's family alone where its files are not there."""
    from revisit.models.loading import describe_model

    try:
        return describe_model(model)
    except RevisitError:
        return model


def method_settings(model: Any) -> list[dict[str, Any]]:
    """Every method with its settings, those recommended for a model where there are any, as the page shows them."""
    from revisit import methods

    found = []
    for name in methods.names():
        cls = methods.find(name)
        try:
            defaults = methods.recommended(name, model).settings()
        except (RevisitError, TypeError):  # needs settings that a page cannot guess
            continue
        hints = typing.get_type_hints(cls)
        settings = [_setting(f.name, hints[f.name], defaults[f.name]) for f in dataclasses.fields(cls)]
        found.append({"name": name, "summary": cls.summary, "settings": settings})
    return found


def _setting(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """How one setting is asked for: by a choice, a flag or a text; alpha below 1 by a slider over powers of ten."""
    entry: dict[str, Any] = {"name": name, "kind": "text", "default": _text(default)}
    if typing.get_origin(hint) is typing.Literal:
        entry |= {"kind": "choice", "choices": [str(choice) for choice in typing.get_args(hint)]}
    elif hint is bool:
        entry["kind"] = "flag"
    elif name == "alpha" and isinstance(default, float) and 0 < default <= 0.1:
        entry["slider"] = True
    return entry


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def serve(models: typing.Sequence[str], host: str = "127.0.0.1", port: int = 7861) -> None:
    """Serve the page until interrupted."""
    import uvicorn

    from revisit.serve.server import listen

    with listen(host, port) as listening:
        app = create_app(models)
        if host not in app.state.hosts:
            app.state.hosts = (*app.state.hosts, host)
        print(f"The page is at http://{host}:{port} (Ctrl-C ends it).", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
