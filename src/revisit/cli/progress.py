"""Progress on stderr: on a terminal, bars for the whole run and for the current log; elsewhere, one line per minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from revisit.errors import Interrupted
from revisit.eval.log import LOGS
from revisit.eval.run import Reporter

LINE_EVERY = 60  # seconds, without a terminal


class Bars(Reporter):
    """A reporter that draws on a console, by default on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = progress_bar(console)
        self.began = self.printed = 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def plan(self, logs: int, answers: int, stored: int) -> None:
        """Print the plan; draw a bar for all of it if there are several logs."""
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        self.note(f"{plural(logs, 'log')}, {plural(answers, 'answer')}, {stored:,} of them stored.")
        if logs > 1:
            self.progress.add_task("all", total=answers, completed=stored)

    def start(self, title: str, total: int, done: int) -> None:
        """Draw a new bar."""
        for task in self.progress.tasks:
            if task.remaining == 0:
                self.progress.remove_task(task.id)
        self.began = self.printed = time.monotonic()
        self.progress.add_task(escape(title), total=total, completed=done, title=title, stored=done)
        self._show_lines()

    def advance(self, count: int) -> None:
        """Move the bars."""
        for task in self.progress.task_ids:
            self.progress.advance(task, count)
        self._show_lines()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show_lines(self) -> None:
        """Replace the bar of finished work by a line; without a terminal, print a line every minute."""
        task, now = self.progress.tasks[-1], time.monotonic()
        line = f"{task.fields['title']}: {task.completed:,.0f}/{task.total:,.0f}"
        if task.remaining == 0:
            self.progress.remove_task(task.id)
            stored = task.fields["stored"] == task.total
            how = "already stored" if stored else f"in {timedelta(seconds=round(now - self.began))}"
            if task.total:
                self.note(f"✓ {line} {how}")
        elif self.progress.disable and now - self.printed > LINE_EVERY:
            self.printed = now
            self.note(line)


@contextmanager
def reporter(quiet: bool, output: Path) -> Iterator[Reporter]:
    """Show the progress of a run unless `quiet` is set; turn Ctrl-C into one sentence about `output`."""
    with nullcontext(Reporter()) if quiet else Bars() as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            stored = any((output / LOGS).glob("*.jsonl"))
            resume = f"Stopped. Finished answers are in {output}; rerun the command to resume."
            raise Interrupted(resume if stored else "Stopped before the first answer.") from None


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 answer", "2,208 answers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def progress_bar(console: Console | None = None) -> Progress:
    """Return bars on stderr that disappear at the end, and are not drawn if stderr is not a terminal."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
