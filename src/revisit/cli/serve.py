"""`revisit serve`: an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import typer

from revisit import settings
from revisit.cli import options
from revisit.cli.generate import chosen_method
from revisit.cli.limit_flags import with_limit_flags
from revisit.serve.limits import Limits


@with_limit_flags()
def serve(
    limits: Limits,
    model: str = options.MODEL,
    method: str = typer.Option("revisit", help="Method for requests that name none; see `revisit methods`."),
    set_: list[str] = typer.Option([], "--set", help="A setting of that method, key=value; may be repeated."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other than loopback needs a key."),
    port: int = typer.Option(8000, min=0, max=65535),
    name: str = typer.Option(None, help="Name of the model in requests; the --model value unless given."),
    api_key: str = typer.Option(None, envvar=settings.API_KEY, help="Key that clients must send."),
    anonymous: bool = typer.Option(False, "--anonymous", help="Listen beyond this machine without a key."),
    allow_url: bool = options.ALLOW_URL,
    allow_host: list[str] = typer.Option(
        [], "--allow-host", help="Another name this server answers to, '*' for any; may be repeated."
    ),
    dtype: str = options.DTYPE,
    device_map: str = options.DEVICE_MAP,
    trust_remote_code: bool = options.TRUST_REMOTE_CODE,
    allow_incomplete: bool = options.ALLOW_INCOMPLETE,
) -> None:
    """Serve a model to any OpenAI client, with a decoding method per request.

    A request names its method in the field decoding; with the openai client:
    extra_body={"decoding": {"method": "revisit", "settings": {"alpha": 0.001}}}.

    Examples:

      revisit serve

      revisit serve --model llava-hf/llava-1.5-7b-hf --device-map auto --set alpha=1e-5 --port 8080
    """
    from revisit.serve.server import serve as run

    method, chosen = chosen_method(method, set_)
    run(
        model,
        host=host,
        port=port,
        method=method,
        settings=chosen,
        limits=limits,
        api_key=api_key,
        anonymous=anonymous,
        allow_url=allow_url,
        allow_hosts=allow_host,
        name=name,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
        allow_incomplete=allow_incomplete,
        announce=lambda text: typer.echo(text, err=True),
    )


def register(app: typer.Typer) -> None:
    app.command()(serve)
