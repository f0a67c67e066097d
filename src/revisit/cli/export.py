"""`revisit export`: runs and methods in the form that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer

from revisit.cli import options
from revisit.cli.generate import chosen_method
from revisit.errors import RevisitError


def export(
    run: Path = typer.Argument(None, help="The --out folder of `revisit eval`, with --to inspect."),
    to: Literal["inspect", "custom-generate"] = typer.Option(..., help="What to write."),
    out: Path = typer.Option(
        None,
        "--out",
        "-o",
        help="Folder to write to; RUN/inspect by default. A model's own folder makes a method its default.",
    ),
    method: str = options.METHOD,
    set_: list[str] = options.SET,
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an existing custom_generate folder."),
) -> None:
    """Write a run as inspect_ai logs, or a method as a folder for transformers.

    `--to inspect` writes one log per model, method and benchmark, with pictures, scores and decoding facts, for `inspect view`.
    `--to custom-generate` writes a folder for model.generate(..., custom_generate=FOLDER, trust_remote_code=True).

    Examples:

      revisit export runs/first --to inspect

      revisit export --to custom-generate --out my-method --set alpha=1e-3
    """
    if to == "inspect":
        from revisit.report import inspect_log

        if run is None:
            raise RevisitError("--to inspect needs a run: revisit export RUN --to inspect.")
        logs, notes = inspect_log.export(run, out or run / "inspect")
        for note in notes:
            typer.echo(note, err=True)
        print(f"Wrote {len(logs)} logs to {logs[0].parent}; open them with: inspect view --log-dir {logs[0].parent}")
        return
    from revisit import methods
    from revisit.integrations.custom_generate import write

    if run is not None or out is None:
        raise RevisitError("--to custom-generate takes no run and needs --out FOLDER.")
    name, settings = chosen_method(method, set_)
    for path in write(out, methods.get(name, **settings), settings=settings, overwrite=overwrite):
        print(path)
