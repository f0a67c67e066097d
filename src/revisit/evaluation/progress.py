"""A run's progress: on a terminal a bar for the whole run and one for the current cell, elsewhere one line a minute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.progress import TimeRemainingColumn as Remaining

from revisit.evaluation.plan import PlannedCell, duration, plan_text
from revisit.evaluation.runner import Reporter

LINE_EVERY = 60  # seconds, without a terminal


class Bars(Reporter):
    """A `Reporter` that draws on a console, by default on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("left"),
            Remaining(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            speed_estimate_period=300,
        )
        self.task: TaskID | None = None  # of the cell
        self.overall: TaskID | None = None
        self.cells: Sequence[PlannedCell] = ()
        self.number = 0  # of the cell, from 1
        self.title, self.total, self.done = "", 0, 0
        self.stored, self.began, self.printed = 0, 0.0, 0.0
        self.finished = 0  # answers of the cells before it
        self.generated, self.seconds = 0, 0.0  # in the cells before it

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        self.progress.stop()

    def plan(self, cells: Sequence[PlannedCell]) -> None:
        """Prints the plan; a bar for all of it if there are several cells."""
        self._end()
        self.note(f"Plan: {plan_text(cells)}.")
        self._follow(cells)

    def _follow(self, cells: Sequence[PlannedCell]) -> None:
        self.cells, self.number, self.finished, self.generated, self.seconds = cells, 0, 0, 0, 0.0
        if self.overall is not None:
            self.progress.remove_task(self.overall)
            self.overall = None
        if len(cells) > 1:
            total = sum(cell.items for cell in cells)
            self.overall = self.progress.add_task("", total=total, completed=sum(cell.stored for cell in cells))

    def start(self, title: str, total: int, done: int) -> None:
        """A new bar; stored answers count as done, but not for the speed."""
        self._end()
        if self.number >= len(self.cells):  # not a cell of the plan
            self._follow(())
        self.number += 1
        self.title, self.total, self.done, self.stored = title, total, done, done
        self.began = self.printed = time.monotonic()
        self.task = self.progress.add_task(escape(title), total=total, completed=done)
        if self.overall is not None:
            known = self.finished + done + sum(cell.stored for cell in self.cells[self.number :])
            self.progress.update(self.overall, description=self._place(), completed=known)
        if done == total:
            self._end()

    def advance(self, count: int) -> None:
        """Moves the bars; without a terminal, prints a line every minute."""
        self.done += count
        if self.task is not None:
            self.progress.advance(self.task, count)
        if self.overall is not None:
            self.progress.advance(self.overall, count)
        if not self.console.is_terminal and time.monotonic() - self.printed > LINE_EVERY and self.done < self.total:
            self.printed = time.monotonic()
            self.note(f"{self.title}: {self.done:,}/{self.total:,}{self._left()}")
        if self.done == self.total:
            self._end()

    def note(self, text: str) -> None:
        """A line above the bars."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _place(self) -> str:
        return f"cell {self.number} of {len(self.cells)}" if len(self.cells) > 1 else ""

    def _left(self) -> str:
        """Where the run is and how long the rest takes, at the speed so far."""
        generated = self.generated + self.done - self.stored
        rest = self.total - self.done + sum(cell.missing for cell in self.cells[self.number :])
        seconds = self.seconds + time.monotonic() - self.began
        left = f"about {duration(seconds / generated * rest)} left" if generated else ""
        return "".join(f", {part}" for part in (self._place(), left) if part)

    def _end(self) -> None:
        """Replaces the cell's bar by a line."""
        if self.task is None:
            return
        self.progress.remove_task(self.task)
        self.task = None
        self.finished += self.done
        if not self.total:
            return
        seconds = time.monotonic() - self.began
        self.generated, self.seconds = self.generated + self.done - self.stored, self.seconds + seconds
        mark = "✓ " if self.done == self.total else ""
        how = "already stored" if self.stored == self.total else f"in {duration(seconds)}"
        self.note(f"{mark}{self.title}: {self.done:,}/{self.total:,} {how}")
