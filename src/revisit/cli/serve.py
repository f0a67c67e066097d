"""`revisit serve`: an OpenAI-compatible chat endpoint."""

from __future__ import annotations

import typer

from revisit.cli.generate import chosen_method


def serve(
    model: str = typer.Option("tiny", "--model", "-m", help="Local folder or hub id; 'tiny' is the embedded model."),
    method: str = typer.Option("revisit", help="Method for requests that name none; see `revisit methods`."),
    set_: list[str] = typer.Option([], "--set", help="A setting of that method, key=value; may be repeated."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; other than loopback needs a key."),
    port: int = typer.Option(8000, min=0, max=65535),
    name: str = typer.Option(None, help="Name of the model in requests; the --model value unless given."),
    api_key: str = typer.Option(None, envvar="REVISIT_API_KEY", help="Key that clients must send."),
    anonymous: bool = typer.Option(False, "--anonymous", help="Listen beyond this machine without a key."),
    allow_url: bool = typer.Option(False, "--allow-url", help="Fetch images from public http(s) URLs."),
    max_batch: int = typer.Option(16, min=1, help="Requests decoded together."),
    max_queue: int = typer.Option(512, min=1, help="Requests waiting; more are told to come back."),
    max_new_tokens: int = typer.Option(1024, min=1, help="Longest answer a request may ask for."),
    max_prompt_tokens: int = typer.Option(8192, min=1, help="Longest prompt, images included."),
    max_pixels: int = typer.Option(40_000_000, min=1, help="Largest image, in pixels."),
    max_body: int = typer.Option(16 << 20, min=1, help="Largest request, in bytes."),
    max_seconds: float = typer.Option(300.0, min=0.001, help="Longest wait for an answer."),
    dtype: str = typer.Option(None, help="float32, float16, bfloat16 or auto."),
    device_map: str = typer.Option(None, help="Passed to transformers, for example auto."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Allow code from the model's repository."
    ),
) -> None:
    """Serve a model to any OpenAI client, with a decoding method per request.

    Examples:

      revisit serve

      revisit serve --model llava-hf/llava-1.5-7b-hf --device-map auto --set alpha=1e-5 --port 8080
    """
    from revisit.serve.limits import Limits
    from revisit.serve.server import serve as run

    method, settings = chosen_method(method, set_)
    run(
        model,
        host=host,
        port=port,
        method=method,
        settings=settings,
        limits=Limits(
            body_bytes=max_body,
            image_pixels=max_pixels,
            prompt_tokens=max_prompt_tokens,
            new_tokens=max_new_tokens,
            default_new_tokens=min(256, max_new_tokens),
            queue=max_queue,
            batch=max_batch,
            seconds=max_seconds,
        ),
        api_key=api_key,
        anonymous=anonymous,
        allow_url=allow_url,
        name=name,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )


def register(app: typer.Typer) -> None:
    app.command()(serve)
