"""Printing the sections of a document: drawn by rich on a terminal, as markdown in a pipe."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
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
    """Print a table under its caption, with the best values in bold and the second underlined."""
    console = console or Console()
    if not console.is_terminal:
        print(table_markdown(table) + "\n", file=console.file)
        return
    if table.caption:
        console.print(table.caption, markup=False, highlight=False, style="dim")
    drawn = RichTable(box=SIMPLE_HEAD, padding=0)
    for number, (group, head) in enumerate(grouped_heads(table)):
        title = f"{group}\n{head}" if group else head
        drawn.add_column(title, justify="left" if number < table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*map(_cell, row))
    if table.rows:
        console.print(drawn)


def _cell(cell: Cell | str) -> Styled:
    if isinstance(cell, str):
        return Styled(cell)
    text = Styled(cell.text, style={1: "bold", 2: "underline"}.get(cell.rank, ""))
    return text.append(f"\n{cell.small}", style="dim not bold not underline") if cell.small else text
