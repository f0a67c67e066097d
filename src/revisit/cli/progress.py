"""Progress of a command, on stderr: on a terminal a bar for the whole run and one for the current log, elsewhere one line a minute."""

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
        self.title, self.total, self.done, self.stored = "", 0, 0, 0
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
        for task in [task for task in self.progress.tasks if task.remaining == 0]:
            self.progress.remove_task(task.id)
        self.title, self.total, self.done, self.stored = title, total, done, done
        self.began = self.printed = time.monotonic()
        self.progress.add_task(escape(title), total=total, completed=done)
        self._end()

    def advance(self, count: int) -> None:
        """Move the bars; without a terminal, print a line every minute."""
        self.done += count
        for task in self.progress.task_ids:
            self.progress.advance(task, count)
        if self.progress.disable and time.monotonic() - self.printed > LINE_EVERY and self.done < self.total:
            self.printed = time.monotonic()
            self.note(f"{self.title}: {self.done:,}/{self.total:,}")
        self._end()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _end(self) -> None:
        """Replace the bar of finished work by a line."""
        if self.done < self.total:
            return
        self.progress.remove_task(self.progress.task_ids[-1])
        took = timedelta(seconds=round(time.monotonic() - self.began))
        if self.total:
            how = "already stored" if self.stored == self.total else f"in {took}"
            self.note(f"✓ {self.title}: {self.done:,}/{self.total:,} {how}")


@contextmanager
def reporter(quiet: bool, output: Path) -> Iterator[Reporter]:
    """Show a run's progress: bars, lines in pipes, nothing with --quiet. Ctrl-C becomes one sentence about `output`."""
    with nullcontext(Reporter()) if quiet else Bars() as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            if any((output / LOGS).glob("*.jsonl")):
                sentence = f"Stopped. Finished answers are in {output}; rerun the command to resume."
            else:
                sentence = "Stopped before the first answer."
            raise Interrupted(sentence) from None


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 answer", "2,208 answers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def progress_bar(console: Console | None = None) -> Progress:
    """Return bars on stderr that disappear when the work is done; nothing at all if stderr is not a terminal."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
