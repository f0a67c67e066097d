"""`revisit export`: runs in formats that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import typer


def export(
    run: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    to: Literal["inspect", "json"] = typer.Option(..., help="inspect: logs of inspect_ai; json: results.json."),
    out: Path = typer.Option(None, "--out", "-o", help="Folder to write to; by default RUN/inspect, or RUN for json."),
) -> None:
    """Export a run: for `inspect view`, with images, scores and decoding counters, or all numbers as results.json.

    Example: revisit export runs/first --to inspect
    """
    from revisit.eval.log import read_logs
    from revisit.eval.report import inspect_log
    from revisit.eval.report.results import write_results
    from revisit.explain.files import make_folder

    logs = read_logs(run)
    if to == "json":
        print(f"Wrote {write_results(make_folder(out or run), logs)}.")
        return
    files, notes = inspect_log.export(logs, out or run / "inspect")
    for note in notes:
        typer.echo(note, err=True)
    print(f"Wrote {len(files)} logs to {files[0].parent}; open them with: inspect view --log-dir {files[0].parent}")
