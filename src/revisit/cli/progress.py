"""Progress of a command, on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from revisit.evaluation.runner import Reporter


@contextmanager
def reporter(quiet: bool) -> Iterator[Reporter]:
    """What a run tells its progress to: bars or lines on stderr, or nothing with --quiet."""
    from revisit.evaluation.progress import Bars
    from revisit.evaluation.runner import Reporter

    if quiet:
        yield Reporter()
        return
    with Bars() as bars:
        yield bars


def progress_bar() -> Progress:
    """A bar on stderr that disappears when the work is done; nothing at all if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
