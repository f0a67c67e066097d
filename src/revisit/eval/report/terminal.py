"""Printing the sections of a document: drawn by rich on a terminal, as markdown in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as Styled

from revisit.eval.report.document import Cell, Section, Table, Text, grouped_heads, section_markdown, table_markdown


def print_section(section: Section, console: Console | None = None) -> None:
    """Print the texts and tables of a section."""
    console = console or Console()
    section = Section(section.title, [b for b in section.blocks if isinstance(b, (Table, Text))], section.level)
    if not console.is_terminal:
        print(section_markdown(section) + "\n")
        return
    console.print(f"\n{section.title}", markup=False, highlight=False, style="bold")
    for block in section.blocks:
        if isinstance(block, Table):
            print_table(block, console)
        elif isinstance(block, Text):
            console.print(block.text, markup=False, highlight=False)


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table under its caption, in several parts if it is too wide."""
    console = console or Console()
    if not console.is_terminal:
        print(table_markdown(table) + "\n", file=console.file)
        return
    if table.caption:
        console.print(table.caption, markup=False, highlight=False, style="dim")
    if not table.rows:
        return
    heads = [Styled(f"{group}\n{head}" if group else head) for group, head in grouped_heads(table)]
    columns = [[head, *map(_cell, cells)] for head, cells in zip(heads, zip(*table.rows, strict=True), strict=True)]
    for part in _parts(columns, table.left, console.width):
        drawn = RichTable(box=SIMPLE_HEAD, padding=0)
        for number in part:
            left = number < table.left
            drawn.add_column(heads[number], justify="left" if left else "right", no_wrap=not left, overflow="fold")
        for row in range(1, 1 + len(table.rows)):
            drawn.add_row(*(columns[number][row] for number in part))
        console.print(drawn)


def _parts(columns: Sequence[Sequence[Styled]], left: int, width: int) -> Iterator[list[int]]:
    """Divide columns of numbers among tables that fit into a width; the columns on the left begin each of them."""
    widths = [2 + max(cell_len(line) for cell in column for line in cell.plain.split("\n")) for column in columns]
    first, part = list(range(left)), list[int]()
    for number in range(left, len(columns)):
        if part and sum(widths[other] for other in (*first, *part, number)) > width:
            yield first + part
            part = []
        part.append(number)
    yield first + part


def _cell(cell: Cell | str) -> Styled:
    if isinstance(cell, str):
        return Styled(cell)
    text = Styled(cell.text, style={1: "bold", 2: "underline"}.get(cell.rank, ""))
    return text.append(f"\n{cell.small}", style="dim not bold not underline") if cell.small else text
