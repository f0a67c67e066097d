"""`revisit compare`: the methods of a run side by side, tested on the same items."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.errors import RevisitError, need


def compare(
    folder: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    baseline: str = typer.Option(None, help="Method to compare with; by default greedy, if it was run."),
    metric: list[str] = typer.Option([], help="Only these metrics; patterns such as 'coco_*/F1' work. Repeatable."),
    out: Path = typer.Option(None, "--out", "-o", help="Output file; .md, .csv, .tex or .html sets the format."),
) -> None:
    """Compare the methods of a run, with paired tests and Holm's correction.

    Examples:

      revisit compare runs/first

      revisit compare runs/first --metric CHAIRi --metric F1 --out table.tex
    """
    from revisit.evaluation.comparison import compare_folder
    from revisit.evaluation.store import read_results, unfinished
    from revisit.pages.document import check_writable, write_page
    from revisit.report.comparisons import WRITERS, comparison_sections
    from revisit.report.terminal import print_section

    need("scipy", "statsmodels")
    if out is not None:
        if out.suffix.lower() not in WRITERS:
            raise RevisitError(f"The format of {out} is unknown: use a name that ends in {', '.join(WRITERS)}.")
        check_writable(out)
    if notice := unfinished(read_results(folder)):
        print(notice)
    wanted = [part.strip() for entry in metric for part in entry.split(",")]
    tables = compare_folder(folder, baseline, wanted)
    if out is not None:
        print(f"Wrote {write_page(out, WRITERS[out.suffix.lower()](tables))}.")
        return
    for section in comparison_sections(tables):
        print_section(section)
