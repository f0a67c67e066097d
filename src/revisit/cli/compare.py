"""`revisit compare`: the methods of a run side by side, tested on the same items."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from revisit.errors import RevisitError, need, unknown


def compare(
    folder: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    baseline: str = typer.Option(None, help="Method to compare with; by default greedy, if it was run."),
    metric: list[str] = typer.Option([], help="Only these metrics; patterns such as 'coco_*/F1' work. Repeatable."),
    resamples: int = typer.Option(4999, min=99, help="Resamples of the statistical tests."),
    format_: str = typer.Option(None, "--format", "-f", help="markdown, csv, latex or html."),
    out: Path = typer.Option(None, "--out", "-o", help="Output file; .md, .csv, .tex or .html sets the format."),
) -> None:
    """Compare the methods of a run, with paired tests and Holm's correction.

    Examples:

      revisit compare runs/first

      revisit compare runs/first --metric CHAIRi --metric F1 --out table.tex
    """
    from revisit.evaluation.comparison import compare_folder
    from revisit.evaluation.store import read_results, unfinished
    from revisit.pages.document import check_writable
    from revisit.report.comparisons import SUFFIXES, WRITERS, comparison_sections
    from revisit.report.terminal import print_section

    need("scipy", "statsmodels")
    kind = format_ or (SUFFIXES.get(out.suffix.lower()) if out else "markdown")
    if kind is None:
        raise RevisitError(
            f"The format of {out} is unknown: use a name that ends in {', '.join(SUFFIXES)}, or pass --format."
        )
    if kind not in WRITERS:
        raise unknown("format", kind, WRITERS)
    if out is not None:
        check_writable(out)
    if notice := unfinished(read_results(folder)):
        print(notice, file=sys.stdout if format_ is None and out is None else sys.stderr)
    wanted = [part.strip() for entry in metric for part in entry.split(",")]
    tables = compare_folder(folder, baseline, wanted, resamples)
    if out is None and format_ is None:
        for section in comparison_sections(tables):
            print_section(section)
        return
    text = WRITERS[kind](tables)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RevisitError(f"Cannot write {out}: {error.strerror}; choose another --out.") from error
    print(f"Wrote {out}.")
