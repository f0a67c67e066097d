"""`revisit demo`: the main job on the embedded model, greedy and ReVisiT side by side."""

from __future__ import annotations

import typer


def demo() -> None:
    """Describe a picture with and without ReVisiT, on the embedded model."""
    raise SystemExit("The embedded model is not here yet.")


def register(app: typer.Typer) -> None:
    app.command()(demo)
