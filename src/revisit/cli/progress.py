"""Progress on stderr, if it is a terminal: bars with the rate, the time left and the failures so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from revisit.errors import Interrupted
from revisit.eval.run import Reporter


class Rate(ProgressColumn):
    """The number of items per second, and of those that failed."""

    def render(self, task: Task) -> Text:
        rate, failed = task.speed, task.fields.get("failed")
        parts = [f"{rate:.3g}/s" if rate else "", f"{failed} failed" if failed else ""]
        return Text(", ".join(filter(None, parts)))


class Bars(Reporter):
    """A reporter that draws on a console, by default on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self.progress = progress_bar(console)
        self.began = 0.0

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
        self.began = time.monotonic()
        self.progress.add_task(escape(title), total=total, completed=done, title=title, stored=done)
        self._show_end()

    def advance(self, count: int, failed: int = 0) -> None:
        """Move the bars."""
        for task in self.progress.tasks:
            self.progress.update(task.id, advance=count, failed=task.fields.get("failed", 0) + failed)
        self._show_end()

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show_end(self) -> None:
        """Replace the bar of finished work by a line."""
        task = self.progress.tasks[-1]
        if task.remaining == 0:
            self.progress.remove_task(task.id)
            stored = task.fields["stored"] == task.total
            how = "already stored" if stored else f"in {timedelta(seconds=round(time.monotonic() - self.began))}"
            if task.total:
                self.note(f"✓ {task.fields['title']}: {task.completed:,.0f}/{task.total:,.0f} {how}")


@contextmanager
def reporter(quiet: bool, output: Path) -> Iterator[Reporter]:
    """Show the progress of a run unless `quiet` is set; turn Ctrl-C into one sentence about `output`."""
    with nullcontext(Reporter()) if quiet else Bars() as progress, resumable(output):
        yield progress


@contextmanager
def resumable(output: Path | None) -> Iterator[None]:
    """Turn Ctrl-C into one sentence about the results in a folder."""
    try:
        yield
    except KeyboardInterrupt:
        if output is None:
            raise Interrupted("Stopped.") from None
        stored = any(path.stat().st_size for path in output.rglob("*.jsonl"))
        resume = f"Stopped. Finished answers are in {output}; rerun the command to resume."
        raise Interrupted(resume if stored else "Stopped before the first answer.") from None


@contextmanager
def counted(what: str, total: int | None, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show one bar; yield a function that adds finished items, and those of them that failed."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=total, visible=not quiet, failed=0)

        def advance(count: int, failed: int = 0) -> None:
            bar.update(task, advance=count, failed=bar.tasks[task].fields["failed"] + failed)

        yield advance


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: "1 answer", "2,208 answers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def progress_bar(console: Console | None = None) -> Progress:
    """Return bars on stderr that disappear at the end, and are not drawn if stderr is not a terminal."""
    console = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
    )
    own_output = sys.stdout.isatty()  # printed above the bar; a file or a pipe gets its lines itself
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=own_output
    )
