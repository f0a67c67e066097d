"""Tables of commands: markdown in pipes, drawn on terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from revisit.cli.tables import show


def made(**options: object) -> Table:
    table = Table("[bold]name[/]", "what it is", title="Things", caption="All of them.", **options)  # type: ignore[arg-type]
    table.add_row("[bold]one[/]", Text("a | b\nc [d]"))
    return table


def test_a_pipe_gets_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    show(made())
    assert capsys.readouterr().out.splitlines() == [
        "Things",
        "",
        "| name | what it is |",
        "| --- | --- |",
        "| one | a \\| b c [d] |",
        "",
        "All of them.",
    ]


def test_a_table_without_headings_becomes_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show(made(show_header=False))
    assert "one: a \\| b c [d]" in capsys.readouterr().out.splitlines()


def test_a_terminal_gets_a_drawing() -> None:
    out = io.StringIO()
    show(made(), Console(file=out, force_terminal=True, width=60))
    assert "┃" in out.getvalue()
    assert "---" not in out.getvalue()
