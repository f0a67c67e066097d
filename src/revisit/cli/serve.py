"""`revisit serve` and `revisit ui`: an OpenAI-compatible chat endpoint, and the interactive page on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from revisit.cli import options
from revisit.settings import API_KEY as API_KEY_VARIABLE

if TYPE_CHECKING:
    from revisit.serve.limits import Limits

HOST = typer.Option("127.0.0.1", help="Address to listen on; other machines need an API key.")
API_KEY = typer.Option(None, envvar=API_KEY_VARIABLE, help="API key that clients must send.")
ALLOW_HOST = typer.Option([], "--allow-host", help="Another host name to accept, '*' for any. Repeatable.")
LIMITS = typer.Option(
    [], "--limits", metavar="NAME=NUMBER", help="Another limit, such as new_tokens=2048 (docs/security.md). Repeatable."
)


def read_limits(assignments: list[str]) -> Limits:
    """Return the limits of a server, changed by these."""
    from revisit.registry import parse_assignments
    from revisit.serve.limits import Limits

    return Limits.read(parse_assignments(assignments, "--limits name=number"), "--limits")


def serve(
    model: str = options.MODEL,
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    host: str = HOST,
    port: int = typer.Option(8000, min=0, max=65535),
    name: str = typer.Option(None, help="Name of the model in requests; by default --model."),
    api_key: str = API_KEY,
    anonymous: bool = typer.Option(False, "--anonymous", help="Accept other machines without a key."),
    allow_host: list[str] = ALLOW_HOST,
    limits: list[str] = LIMITS,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Serve a model to OpenAI clients; each request can choose its method.

    Requests without a method use --method. A request names its own in the field decoding; with the openai client:
    extra_body={"decoding": {"method": "revisit", "settings": {"alpha": 0.001}}}.

    Examples:

      revisit serve

      revisit serve --model llava-hf/llava-1.5-7b-hf --device-map auto --set alpha=1e-5 --port 8080
    """
    from revisit.serve.server import serve as run

    name_of_method, settings = options.chosen_method(method, set_)
    run(
        model,
        host=host,
        port=port,
        method=name_of_method,
        settings=settings,
        limits=read_limits(limits),
        api_key=api_key,
        anonymous=anonymous,
        allow_hosts=allow_host,
        name=name,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_incomplete=allow_incomplete,
    )


def ui(
    model: str = options.MODEL,
    host: str = HOST,
    port: int = typer.Option(7861, min=0, max=65535),
    api_key: str = API_KEY,
    allow_host: list[str] = ALLOW_HOST,
    limits: list[str] = LIMITS,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
) -> None:
    """Serve a page for the browser: drop an image, ask, and compare methods.

    Example:

      revisit ui --model tiny
    """
    from revisit.serve.server import serve as run

    run(
        model,
        host=host,
        port=port,
        page=True,
        limits=read_limits(limits),
        api_key=api_key,
        allow_hosts=allow_host,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
