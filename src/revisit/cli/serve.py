"""`revisit serve` and `revisit ui`: an OpenAI-compatible chat endpoint, and an interactive page on top of it."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.cli import options
from revisit.registry import parse_assignments
from revisit.serve.limits import Limits
from revisit.settings import API_KEY as API_KEY_VARIABLE

HOST = typer.Option("127.0.0.1", help="Address to listen on; an API key is required if other machines can reach it.")
API_KEY = typer.Option(None, envvar=API_KEY_VARIABLE, help="API key that clients must send.")
ALLOW_HOST = typer.Option([], help="Host name to accept besides this machine's, or '*' for any. Repeatable.")
ALLOW_ORIGIN = typer.Option(
    [], metavar="URL", help="Origin of web pages that may call the server from a browser, or '*' for any. Repeatable."
)
LIMITS = typer.Option(
    [], metavar="NAME=NUMBER", help="Change a limit, for example new_tokens=2048 (see docs/security.md). Repeatable."
)


def read_limits(assignments: list[str]) -> Limits:
    """Return the default limits with these changes."""
    return Limits.read(parse_assignments(assignments, "--limits name=number"), "--limits")


def serve(
    context: typer.Context,
    model: str = options.MODEL,
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    host: str = HOST,
    port: int = typer.Option(8000, min=0, max=65535, help="Port to listen on; 0 selects a free one."),
    name: str = typer.Option(None, help="Name of the model in requests; by default the value of --model."),
    api_key: str = API_KEY,
    anonymous: bool = typer.Option(False, "--anonymous", help="Let other machines connect without an API key."),
    allow_host: list[str] = ALLOW_HOST,
    allow_origin: list[str] = ALLOW_ORIGIN,
    limits: list[str] = LIMITS,
    risk: float = options.RISK,
    calibration: Path = options.CALIBRATION,
    any_calibration: bool = options.ANY_CALIBRATION,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Serve a model through an OpenAI-compatible API.

    Requests use --method unless they name another method. With the openai client, pass
    extra_body={"decoding": {"method": "revisit", "settings": {"alpha": 0.001}}}.

    Examples:

      revisit serve
      revisit serve --model llava-hf/llava-1.5-7b-hf --device-map auto --set alpha=1e-5 --port 8080
    """
    from revisit.serve.server import serve as run

    arguments = {key: value for key, value in context.params.items() if key != "set_"}
    arguments["method"], settings = options.chosen_method(method, set_)
    method_named = options.named(context, "method")
    run(**arguments | {"settings": settings, "limits": read_limits(limits), "method_named": method_named})


def ui(
    context: typer.Context,
    model: str = options.MODEL,
    host: str = HOST,
    port: int = typer.Option(7861, min=0, max=65535, help="Port to listen on; 0 selects a free one."),
    api_key: str = API_KEY,
    allow_host: list[str] = ALLOW_HOST,
    limits: list[str] = LIMITS,
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
) -> None:
    """Serve a web page: drop an image, ask a question, and compare methods.

    Example: revisit ui --model photo
    """
    from revisit.serve.server import serve as run

    run(**context.params | {"limits": read_limits(limits)}, page=True)
