"""`revisit report`: everything measured below a folder, as one page and as markdown."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.errors import need


def report(
    folder: Path = typer.Argument(..., help="Folder with the outputs of `eval`, `ablate` and `analyze`, at any depth."),
    out: Path = typer.Option(
        None, "--out", "-o", help="Where to write report.html, report.md and figures/; by default the folder itself."
    ),
) -> None:
    """Write a report of everything measured in a folder, as HTML and markdown with figures.

    Example: revisit report runs
    """
    need("scipy", "statsmodels", "matplotlib")
    from revisit.eval.report.document import write
    from revisit.explain.files import make_folder
    from revisit.paper.report import build

    document = build(folder)
    files = write(document, make_folder(out or folder))
    print(
        f"Wrote {files[0]} ({files[0].stat().st_size / 1e6:.2g} MB) and {files[1]}; figures: {len(document.figures())}."
    )
