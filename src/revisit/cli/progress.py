"""Progress of a command, on stderr: on a terminal a bar for the whole run and one for the current log, elsewhere one line a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

from revisit.errors import Interrupted
from revisit.eval.log import LOGS
from revisit.eval.run import Reporter

LINE_EVERY = 60  # seconds, without a terminal


class Bars(Reporter):
    """A reporter that draws on a console, by default on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            *(TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()),
            *(TextColumn("left"), Remaining()),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            speed_estimate_period=300,
        )
        self.planned, self.number = 0, 0  # logs of the plan, and the current one, from 1
        self.title, self.total, self.done, self.stored = "", 0, 0, 0
        self.began = self.printed = 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def plan(self, logs: int, answers: int, stored: int) -> None:
        """Print the plan; draw a bar for all of it if there are several logs."""
        self._clear()
        self.note(f"{plural(logs, 'log')}, {plural(answers, 'answer')}, {stored:,} of them stored.")
        self.planned, self.number = logs, 0
        if logs > 1:
            self.progress.add_task("all", total=answers, completed=stored)

    def start(self, title: str, total: int, done: int) -> None:
        """Draw a new bar."""
        self.number += 1
        if self.number > self.planned:  # not part of the plan
            self._clear()
        self.title, self.total, self.done, self.stored = title, total, done, done
        self.began = self.printed = time.monotonic()
        self.progress.add_task(escape(title), total=total, completed=done)
        self._end()

    def advance(self, count: int) -> None:
        """Move the bars; without a terminal, print a line every minute."""
        self.done += count
        for task in self.progress.task_ids:
            self.progress.advance(task, count)
        if not self.console.is_terminal and time.monotonic() - self.printed > LINE_EVERY and self.done < self.total:
            self.printed = time.monotonic()
            place = f", {self.number} of {self.planned}" if self.planned > 1 else ""
            self.note(f"{self.title}: {self.done:,}/{self.total:,}{place}")
        self._end()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _end(self) -> None:
        """Replace the bar of finished work by a line."""
        if self.done < self.total:
            return
        self.progress.remove_task(self.progress.task_ids[-1])
        how = "already stored" if self.stored == self.total else f"in {duration(time.monotonic() - self.began)}"
        if self.total:
            self.note(f"✓ {self.title}: {self.done:,}/{self.total:,} {how}")

    def _clear(self) -> None:
        for task in self.progress.task_ids:
            self.progress.remove_task(task)


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


def duration(seconds: float) -> str:
    """Return a time for people: "27 s", "12 min", "3.5 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.1f} h"


def progress_bar() -> Progress:
    """Return a bar on stderr that disappears when the work is done; nothing at all if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Remaining())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
