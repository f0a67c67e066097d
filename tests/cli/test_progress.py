"""Progress of a run: the plan, one line a minute in pipes, tidy ends."""

from __future__ import annotations

import io

from rich.console import Console

from revisit.cli import progress
from revisit.cli.progress import Bars


def piped() -> tuple[Bars, io.StringIO]:
    out = io.StringIO()
    return Bars(Console(file=out, width=300)), out


def test_pipes_get_a_line_for_each_log_and_tidy_ends() -> None:
    bars, out = piped()
    with bars:
        bars.plan(3, 120, 40)
        bars.start("first", 40, 40)
        bars.start("second", 40, 0)
        for _ in range(8):
            bars.advance(5)
    assert [line.partition(" in ")[0] for line in out.getvalue().splitlines()] == [
        "3 logs, 120 answers, 40 of them stored.",
        "✓ first: 40/40 already stored",
        "✓ second: 40/40",
    ]


def test_a_bar_shows_the_rate_and_what_failed() -> None:
    out = io.StringIO()
    bar = progress.progress_bar(Console(file=out, width=120, force_terminal=True, force_interactive=False))
    task = bar.add_task("images", total=10, failed=0)
    for _ in range(3):
        bar.update(task, advance=1, failed=2)
        bar.refresh()
    (row,) = [bar.columns[3].render(bar.tasks[task]).plain]
    assert row.endswith("/s, 2 failed")
