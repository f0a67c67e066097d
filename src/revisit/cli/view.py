"""`revisit view`: browse the samples of an evaluation."""

from __future__ import annotations

from pathlib import Path

import typer


def view(
    run: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    out: Path = typer.Option(None, "--out", "-o", help="Folder for the page and the pictures; by default RUN/view."),
) -> None:
    """Write a page with every sample of a run: picture, question, correct answer, and answers side by side.

    Open the file in a browser; no server is needed. You can filter samples by benchmark, by "methods disagree", by the
    method that is wrong, and by text.

    Example: revisit view runs/first
    """
    from revisit.evaluation.store import read_results, unfinished
    from revisit.report.sample_browser import build

    page = build(run, out or run / "view")
    if notice := unfinished(read_results(run)):
        print(notice)
    print(f"Wrote {page}; open it in a browser.")
