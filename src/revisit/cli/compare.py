"""`revisit compare`: the methods of a run side by side, tested on the same items."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.errors import need


def compare(
    folder: Path = typer.Argument(..., help="The --out folder of `revisit eval`."),
    baseline: str = typer.Option(None, help="Method to compare with; by default greedy, if it was run."),
    metric: list[str] = typer.Option([], help="Only these metrics; patterns such as 'coco_*/F1' work. Repeatable."),
) -> None:
    """Compare the methods of a run, with paired tests and Holm's correction.

    Examples:

      revisit compare runs/first

      revisit compare runs/first --metric CHAIRi --metric F1 > table.md
    """
    from revisit.eval.compare import compare as compare_logs
    from revisit.eval.log import read_logs, unfinished
    from revisit.eval.report.comparisons import comparison_sections
    from revisit.eval.report.terminal import print_section

    need("scipy", "statsmodels")
    logs = read_logs(folder)
    if any(log.scores for log in logs) and (notice := unfinished(logs)):  # otherwise an error with the same notice
        print(notice)
    for section in comparison_sections(compare_logs(logs, baseline, metric)):
        print_section(section)
