"""`revisit ui`: the interactive page."""

from __future__ import annotations

import typer

from revisit.errors import RevisitError


def ui(
    model: list[str] = typer.Option(
        ["tiny"], "--model", "-m", help="Models to choose from: local folders or hub ids; may be repeated."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; only this machine unless given."),
    port: int = typer.Option(7861, min=1, max=65535),
) -> None:
    """Open a page in the browser: drop an image, ask, and watch methods answer side by side.

    Example:

      revisit ui --model tiny
    """
    try:
        from revisit.serve.ui import serve
    except ImportError as error:
        raise RevisitError(f"The page needs a web server ({error}): pip install 'revisit-decoding[serve]'.") from None
    from revisit.models.loading import load_config

    for name in model:
        load_config(name)  # a wrong name is said now, not at the first question
    serve(model, host, port)


def register(app: typer.Typer) -> None:
    app.command()(ui)
