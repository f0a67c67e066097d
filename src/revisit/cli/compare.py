"""`revisit compare`: the methods of a run side by side, tested on the same items."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.errors import RevisitError, need


def compare(
    folder: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    baseline: str = typer.Option(None, help="Method to compare with; by default greedy, if it was run."),
    metric: list[str] = typer.Option([], help="Only these metrics; patterns such as 'coco_*/F1' work. Repeatable."),
    out: Path = typer.Option(None, "--out", "-o", help="Output file: .md, .csv or .tex."),
) -> None:
    """Compare the methods of a run, with paired tests and Holm's correction.

    Examples:

      revisit compare runs/first

      revisit compare runs/first --metric CHAIRi --metric F1 --out table.tex
    """
    from revisit.eval.compare import compare as compare_logs
    from revisit.eval.log import read_logs, unfinished
    from revisit.eval.report.comparisons import WRITERS, comparison_sections
    from revisit.eval.report.terminal import print_section
    from revisit.explain.document import check_writable, write_page

    need("scipy", "statsmodels")
    if out is not None:
        if out.suffix.lower() not in WRITERS:
            raise RevisitError(f"The format of {out} is unknown: use a name that ends in {', '.join(WRITERS)}.")
        check_writable(out)
    logs = read_logs(folder)
    if any(log.scores for log in logs) and (notice := unfinished(logs)):  # otherwise an error with the same notice
        print(notice)
    tables = compare_logs(logs, baseline, metric)
    if out is not None:
        print(f"Wrote {write_page(out, WRITERS[out.suffix.lower()](tables))}.")
        return
    for section in comparison_sections(tables):
        print_section(section)
