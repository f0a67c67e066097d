"""`revisit compare`, `revisit view` and `revisit report`: results as tables and pages."""

from __future__ import annotations

from pathlib import Path

import typer

from revisit.errors import RevisitError, need
from revisit.eval.report.document import write
from revisit.eval.report.terminal import print_section
from revisit.io.files import inside, make_folder
from revisit.pages.document import check_writable, write_page

RUN = typer.Argument(..., help="The --out folder of `revisit eval`.")


def compare(
    run: Path = RUN,
    baseline: str = typer.Option(None, help="Method to compare with; by default greedy, if it was run."),
    metric: list[str] = typer.Option([], help="Show only this metric, or a pattern like 'coco_*/F1'. Repeatable."),
    out: Path = typer.Option(None, "--out", "-o", help="Output file: .md, .csv or .tex."),
) -> None:
    """Compare the methods of a run with paired tests and Holm's correction.

    Examples:

      revisit compare runs/first
      revisit compare runs/first --metric CHAIRi --metric F1 --out table.tex
    """
    from revisit.eval.compare import compare as compare_logs
    from revisit.eval.log import read_logs, unfinished
    from revisit.eval.report.comparisons import WRITERS, comparison_sections

    need("scipy", "statsmodels")
    if out is not None:
        if out.suffix.lower() not in WRITERS:
            raise RevisitError(f"The format of {out} is unknown: use a name that ends in {', '.join(WRITERS)}.")
        check_writable(out)
    logs = read_logs(run)
    if any(log.scores for log in logs) and (notice := unfinished(logs)):  # otherwise an error with the same notice
        print(notice)
    tables = compare_logs(logs, baseline, metric)
    if out is not None:
        print(f"Wrote {write_page(out, WRITERS[out.suffix.lower()](tables))}.")
        return
    for section in comparison_sections(tables):
        print_section(section)


def view(
    run: Path = RUN,
    out: Path = typer.Option(None, "--out", "-o", help="Folder for the page and the images; by default RUN/view."),
    data: Path = typer.Option(None, help="Folder with the images; by default the one that `revisit eval` read."),
) -> None:
    """Write a page to browse the samples of a run.

    It shows each image and question with the correct answer and the answers of all methods, and can be filtered by benchmark, by
    text, by methods that disagree, and by the method that is wrong. No server is needed.

    Example: revisit view runs/first
    """
    from revisit.eval.log import read_logs, unfinished
    from revisit.eval.report.sample_browser import view as write_page

    logs = read_logs(run)
    page = write_page(logs, out or inside(run, "view"), data)
    if notice := unfinished(logs):
        print(notice)
    print(f"Wrote {page}; open it in a browser.")


def report(
    folder: Path = typer.Argument(..., help="Folder with results of `eval`, `ablate` and `analyze`, at any depth."),
    out: Path = typer.Option(
        None, "--out", "-o", help="Folder for report.html, report.md and figures/; by default the folder itself."
    ),
) -> None:
    """Write a report on all results in a folder, in HTML and Markdown, with figures.

    Example: revisit report runs
    """
    need("scipy", "statsmodels", "matplotlib")
    if not folder.is_dir():  # before torch is imported
        raise RevisitError(f"{folder} is not a folder; give the --out folder of `revisit eval`, `ablate` or `analyze`.")
    from revisit.paper.report import INCOMPLETE, build

    document = build(folder)
    for section in document.sections:
        if section.title == INCOMPLETE:
            print_section(section)
    html, markdown = write(document, make_folder(out or folder))[:2]
    print(f"Wrote {html} ({html.stat().st_size / 1e6:.2g} MB) and {markdown}; figures: {len(document.figures())}.")
