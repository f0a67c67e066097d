"""`revisit ui`: the interactive page."""

from __future__ import annotations

import typer

from revisit import settings
from revisit.cli.limit_flags import with_limit_flags
from revisit.errors import need
from revisit.serve.limits import UI_LIMITS, Limits


@with_limit_flags(UI_LIMITS)
def ui(
    limits: Limits,
    model: list[str] = typer.Option(
        ["tiny"], "--model", "-m", help="Models to choose from: local folders or hub ids; may be repeated."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; beyond this machine the page needs a key."),
    port: int = typer.Option(7861, min=0, max=65535),
    api_key: str = typer.Option(None, envvar=settings.API_KEY, help="The page's key; made up where one is needed."),
    allow_host: list[str] = typer.Option(
        [], "--allow-host", help="Another name this page answers to, '*' for any; may be repeated."
    ),
) -> None:
    """Open a page in the browser: drop an image, ask, and watch methods answer side by side.

    Example:

      revisit ui --model tiny
    """
    need("fastapi", "uvicorn", "prometheus_client")
    from revisit.models.loading import load_config
    from revisit.serve.ui import serve

    for name in model:
        load_config(name)  # a wrong name is said now, not at the first question
    serve(
        model,
        host,
        port,
        limits=limits,
        api_key=api_key,
        allow_hosts=allow_host,
        announce=lambda text: typer.echo(text),
    )


def register(app: typer.Typer) -> None:
    app.command()(ui)
