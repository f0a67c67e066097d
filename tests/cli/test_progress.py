"""Progress of a run: the plan, one line a minute in pipes, tidy ends."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from revisit.cli import progress
from revisit.cli.progress import Bars


def piped() -> tuple[Bars, io.StringIO]:
    out = io.StringIO()
    return Bars(Console(file=out, width=300)), out


def test_a_line_a_minute_in_pipes_and_tidy_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 20)).__next__  # every look at the clock is 20 s later
    monkeypatch.setattr(progress.time, "monotonic", clock)
    bars, out = piped()
    with bars:
        bars.plan(3, 120, 40)
        bars.start("first", 40, 40)
        bars.start("second", 40, 0)
        for _ in range(8):
            bars.advance(5)
    lines = out.getvalue().splitlines()
    assert lines[0] == "3 logs, 120 answers, 40 of them stored."
    assert lines[1] == "✓ first: 40/40 already stored"
    assert lines[2].startswith("second: ")
    assert lines[2].endswith("/40")
    assert lines[-1].startswith("✓ second: 40/40 in ")
    assert 3 < len(lines) < 8  # not one for every batch
