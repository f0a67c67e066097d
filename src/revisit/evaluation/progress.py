"""A run on the terminal: one bar per cell with rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed
from rich.progress import TimeRemainingColumn as Remaining
from rich.text import Text

from revisit.evaluation.runner import Reporter


class Rate(ProgressColumn):
    """Answers per second."""

    def render(self, task: Task) -> Text:
        """The rate over the last moments, or over the whole task once it is done."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.1f}/s" if speed else "–/s", style="cyan")


class Bars(Reporter):
    """A `Reporter` that draws on the console given (standard error, as a rule)."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            Rate(),
            Elapsed(),
            TextColumn("left"),
            Remaining(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task: TaskID | None = None
        self.title, self.total, self.done, self.began, self.printed = "", 0, 0, 0.0, 0.0

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def start(self, title: str, total: int, done: int) -> None:
        """A new bar; what is stored already counts as done but not towards the rate."""
        self.title, self.total, self.done = title, total, done
        self.began = self.printed = time.monotonic()
        self.task = self.progress.add_task(escape(title), total=total, completed=done)
        if not self.console.is_terminal:
            self._say(f"{title}: {done} of {total} stored")

    def advance(self, count: int) -> None:
        """Moves the bar; without a terminal, says so at most every ten seconds and at the end."""
        self.done += count
        if self.task is not None:
            self.progress.advance(self.task, count)
        now = time.monotonic()
        if not self.console.is_terminal and (now - self.printed > 10 or self.done == self.total):
            self.printed = now
            self._say(f"{self.title}: {self.done} of {self.total}, {now - self.began:.0f} s")

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._say(text)

    def _say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
