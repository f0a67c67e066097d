"""`revisit view`: browse the samples of an evaluation."""

from __future__ import annotations

from pathlib import Path

import typer


def view(
    run: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    out: Path = typer.Option(None, "--out", "-o", help="Folder for the page and the images; by default RUN/view."),
) -> None:
    """Write a page with every sample of a run: image, question, correct answer, and answers side by side.

    Open the file in a browser; no server is needed. You can filter samples by benchmark, by "methods disagree", by the
    method that is wrong, and by text.

    Example: revisit view runs/first
    """
    from revisit.eval.log import read_logs, unfinished
    from revisit.eval.report.sample_browser import view as write_page

    logs = read_logs(run)
    page = write_page(logs, out or run / "view")
    if notice := unfinished(logs):
        print(notice)
    print(f"Wrote {page}; open it in a browser.")
