"""`revisit export`: runs in the form that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer


def export(
    run: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    to: Literal["inspect"] = typer.Option(..., help="What to write."),
    out: Path = typer.Option(None, "--out", "-o", help="Folder to write to; RUN/inspect by default."),
) -> None:
    """Write a run as inspect_ai logs for `inspect view`: one per model, method and benchmark, with pictures, scores and decoding facts.

    Example: revisit export runs/first --to inspect
    """
    from revisit.report import inspect_log

    logs, notes = inspect_log.export(run, out or run / "inspect")
    for note in notes:
        typer.echo(note, err=True)
    print(f"Wrote {len(logs)} logs to {logs[0].parent}; open them with: inspect view --log-dir {logs[0].parent}")
