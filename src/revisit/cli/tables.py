"""Tables on standard output: drawn where somebody looks at a terminal, markdown in pipes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def show(table: Table, console: Console | None = None) -> None:
    """Print a table, its title and its caption."""
    if console is None:
        from rich.console import Console

        console = Console()
    if console.is_terminal:
        console.print(table)
        return
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
    heads, *rows = zip(*columns, strict=True)
    if table.show_header:
        lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    else:
        lines = [": ".join(row) for row in rows]
    title, caption = _plain(table.title), _plain(table.caption)
    print("\n".join([*([title, ""] if title else []), *lines]), file=console.file)
    if caption:
        print(f"\n{caption}", file=console.file)


def _plain(cell: Any) -> str:
    """What a cell says, without style, in one line."""
    from rich.text import Text

    text = cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell or "")).plain
    return text.replace("|", "\\|").replace("\n", " ")
