"""Blocks of a document on standard output: drawn by rich where somebody looks at a terminal, markdown in pipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from revisit.evaluation.comparison import Table as Compared
from revisit.report.comparisons import difference_tables, seed_tables, value_table
from revisit.report.document import Block, Cell, Figure, Made, Section, Table, Text, block_markdown
from revisit.report.tables import to_markdown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text as Styled


def print_comparison(tables: Sequence[Compared], console: Console | None = None) -> None:
    """The tables of `revisit compare`."""
    console = console or _console()
    if not console.is_terminal:
        print(to_markdown(tables))
        return
    for table in tables:
        console.print(f"\n[bold]{table.benchmark} · {table.title}[/] (n = {table.n}, {table.version})", highlight=False)
        for block in (value_table([table]), *difference_tables([table]), *seed_tables([table])):
            console.print(rich_table(block))
        for note in table.notes:
            console.print(f"• {note}", markup=False, highlight=False, style="dim")


def print_section(section: Section, console: Console | None = None) -> None:
    """A section of a report, its figures left out."""
    console = console or _console()
    if not console.is_terminal:
        print(f"## {section.title}\n")
        print("\n\n".join(block_markdown(block) for block in _words(section.blocks)) + "\n")
        return
    console.print(f"\n[bold]{section.title}[/]", highlight=False)
    for block in _words(section.blocks):
        if isinstance(block, Table):
            console.print(block.caption, markup=False, highlight=False, style="dim")
            console.print(rich_table(block))
        elif isinstance(block, Text):
            console.print(block.text, markup=False, highlight=False)
        elif isinstance(block, Made):
            console.print(f"{block.command}  {block.settings}", markup=False, highlight=False, style="dim")


def rich_table(table: Table) -> RichTable:
    """A table with headings, best in bold, second underlined, small print dim."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    groups = [""] * table.left + [title for title, count in table.groups for _ in range(count)]
    drawn = RichTable(box=SIMPLE_HEAD, padding=0)
    for place, head in enumerate(table.heads):
        group = groups[place] if place < len(groups) and len(table.groups) > 1 else ""
        title, side = f"{group}\n{head}" if group else head, "left" if place < table.left else "right"
        drawn.add_column(title, justify=side, overflow="fold")  # type: ignore[arg-type]
    for number, row in enumerate(table.rows):
        cells = (_cell(_broken(cell) if place < table.left else cell) for place, cell in enumerate(row))
        drawn.add_row(*cells, style="cyan" if number in table.marked else None)
    return drawn


def _broken(cell: Cell | str) -> Cell | str:
    """A method with its settings below it, one a line: terminals are narrow."""
    name, bracket, settings = cell.partition("(") if isinstance(cell, str) else (cell, "", "")
    return f"{name}\n{settings.removesuffix(')')}".replace(", ", ",\n") if bracket else cell


def _cell(cell: Cell | str) -> Styled:
    from rich.text import Text as Styled

    if isinstance(cell, str):
        return Styled(cell)
    text = Styled(cell.text, style={1: "bold", 2: "underline"}.get(cell.rank, ""))
    return text.append(f"\n{cell.small}", style="dim not bold not underline") if cell.small else text


def _words(blocks: Iterable[Block]) -> list[Block]:
    return [block for block in blocks if not isinstance(block, Figure)]


def _console() -> Console:
    from rich.console import Console

    return Console()
