"""Progress of a command, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.errors import Interrupted

if TYPE_CHECKING:
    from rich.progress import Progress

    from revisit.evaluation.plan import Plan
    from revisit.evaluation.runner import Reporter


@contextmanager
def reporter(quiet: bool, output: Path) -> Iterator[Reporter]:
    """Shows a run's progress on stderr: bars, lines in pipes, nothing with --quiet. Ctrl-C becomes one sentence about `output`."""
    from revisit.evaluation.progress import Bars
    from revisit.evaluation.runner import Reporter

    with nullcontext(Reporter()) if quiet else Bars() as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            if any(output.glob("cells/*/answers.jsonl")):
                sentence = f"Stopped. Finished answers are in {output}; rerun the command to resume."
            else:
                sentence = "Stopped before the first answer."
            raise Interrupted(sentence) from None


def print_plan(plan: Plan) -> None:
    """The cells of a plan as a table, with how much of each is stored."""
    from revisit.evaluation.plan import plan_text
    from revisit.evaluation.runner import check_files, planned_cells
    from revisit.report.document import Section, Table
    from revisit.report.terminal import print_section

    check_files(plan)
    cells = planned_cells(plan)
    heads = ("Model", "Method", "Benchmark", *(["Seed"] if len(plan.seeds) > 1 else []), "Stored", "Items")
    rows = [
        (
            c.model,
            c.method,
            c.benchmark,
            *([str(c.seed)] if len(plan.seeds) > 1 else []),
            f"{c.stored:,}",
            f"{c.items:,}",
        )
        for c in cells
    ]
    unknown = "" if any(cell.seconds for cell in cells) else " The time is estimated once there are answers."
    caption = f"{plan_text(cells)}.{unknown} Leave out --plan to run it; results go to {plan.output}."
    print_section(Section("Plan", [Table(heads, rows, caption, left=3)]))


def progress_bar() -> Progress:
    """A bar on stderr that disappears when the work is done; nothing at all if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
