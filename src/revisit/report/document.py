"""A small document: sections of text, tables, figures and commands, written as one HTML page or as markdown."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from revisit.pages.document import static_page


@dataclass(frozen=True)
class Cell:
    """One entry of a table; `small` is printed below it, line by line."""

    text: str
    rank: int = 0  # 1 is printed bold, 2 underlined
    small: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under headings. `groups` are (title, number of columns) above the headings, the first column not counted."""

    heads: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    caption: str
    groups: tuple[tuple[str, int], ...] = ()
    marked: frozenset[int] = frozenset()  # rows with a tint
    published: bool = False
    folded: bool = False  # behind a click on the page: long and for reference
    left: int = 1  # leading columns that hold words


@dataclass(frozen=True)
class Figure:
    """A picture in two formats, with words for those who cannot see it."""

    name: str
    svg: str
    png: bytes
    caption: str
    alt: str


@dataclass(frozen=True)
class Text:
    """A paragraph, and links below the report's folder as (title, address) after it."""

    text: str
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Made:
    """What made the figures before it: a command and its settings."""

    command: str
    settings: str = ""


Block: TypeAlias = "Table | Figure | Text | Made"


@dataclass
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    level: int = 2


@dataclass
class Document:
    """A whole report."""

    title: str
    lead: str
    sections: list[Section]
    source: str = ""  # of published figures

    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def anchor(title: str) -> str:
    """A heading as a fragment of an address."""
    return "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")


# -- markdown ------------------------------------------------------------------------------------------------------


def to_markdown(document: Document, figures: str = "figures") -> str:
    """GitHub-flavoured markdown; figures are linked below the folder `figures`."""
    parts = [f"# {document.title}", document.lead]
    for section in document.sections:
        parts.append(f"{'#' * section.level} {section.title}")
        parts += [block_markdown(block, document.source, figures) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def block_markdown(block: Block, source: str = "", figures: str = "figures") -> str:
    """One block as markdown."""
    if isinstance(block, Text):
        return " ".join([block.text, *(f"[{title}]({address})" for title, address in block.links)])
    if isinstance(block, Made):
        return f"Made by `{block.command}`" + (f" ({block.settings})" if block.settings else "") + "."
    if isinstance(block, Figure):
        return f"![{block.alt}]({figures}/{block.name}.svg)\n\n*{block.caption}*"
    return _table_markdown(block, source)


def _table_markdown(table: Table, source: str) -> str:
    heads = list(table.heads)
    place = table.left
    for title, count in table.groups:
        for number in range(place, place + count):
            heads[number] = f"{title}: {heads[number]}" if title else heads[number]
        place += count
    body = markdown_table(heads, [[_cell_markdown(cell) for cell in row] for row in table.rows], table.left)
    head = f"**Published, not measured here ({source}).** " if table.published else ""
    return f"{head}{table.caption}\n\n{body}"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table of cells that are markdown already; the first `left` columns hold words."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *rows))


def _cell_markdown(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return escape_markdown(cell)
    text = escape_markdown(cell.text)
    text = {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(cell.rank, text)
    return f"{text} {escape_markdown(cell.small)}" if cell.small else text


def escape_markdown(text: str) -> str:
    """Text for one cell of a markdown table."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_").replace("\n", " ")


# -- HTML ----------------------------------------------------------------------------------------------------------


def to_html(document: Document) -> str:
    """One page that needs nothing else: style and figures are inside."""
    e = html.escape
    toc = "".join(f'<li><a href="#{anchor(s.title)}">{e(s.title)}</a></li>' for s in document.sections if s.level == 2)
    body = [f"<h1>{e(document.title)}</h1>", f'<p class="lead">{e(document.lead)}</p>', f"<nav><ol>{toc}</ol></nav>"]
    for section in document.sections:
        mark = f' id="{anchor(section.title)}"' if section.level == 2 else ""
        body.append(f"<h{section.level}{mark}>{e(section.title)}</h{section.level}>")
        body += [_block_html(block, document.source) for block in section.blocks]
    return static_page(document.title, "\n".join(body), "report.css")


def _block_html(block: Block, source: str) -> str:
    e = html.escape
    if isinstance(block, Text):
        links = "".join(f' <a href="{e(address)}">{e(title)}</a>' for title, address in block.links)
        return f"<p>{e(block.text)}{links}</p>"
    if isinstance(block, Made):
        settings = f" · {e(block.settings)}" if block.settings else ""
        return f'<p class="made"><code>{e(block.command)}</code>{settings}</p>'
    if isinstance(block, Figure):
        data = base64.b64encode(block.svg.encode()).decode()
        return (
            f'<figure><img alt="{e(block.alt)}" src="data:image/svg+xml;base64,{data}">'
            f"<figcaption>{e(block.caption)}</figcaption></figure>"
        )
    return _table_html(block, source)


def _table_html(table: Table, source: str) -> str:
    e = html.escape
    badge = f'<span class="badge">Published</span>Not measured here: {e(source)}. ' if table.published else ""
    groups = ""
    if table.groups:
        cells = "".join(
            f'<th class="g" colspan="{count}" scope="colgroup">{e(title)}</th>' for title, count in table.groups
        )
        groups = f'<tr><th class="w" colspan="{table.left}"></th>{cells}</tr>'
    heads = "".join(f'<th scope="col"{_word(number, table)}>{e(head)}</th>' for number, head in enumerate(table.heads))
    rows = "".join(
        f"<tr{' class=m' if number in table.marked else ''}>"
        + "".join(f"<td{_word(place, table)}>{_cell_html(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(table.rows)
    )
    text = (
        f'<div class="block{" pub" if table.published else ""}"><p class="cap">{badge}{e(table.caption)}</p>'
        f'<div class="scroll"><table aria-label="{e(table.caption)}"><thead>{groups}<tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></div>"
    )
    return f"<details><summary>{e(table.caption)}</summary>{text}</details>" if table.folded else text


def _word(place: int, table: Table) -> str:
    return ' class="w"' if place < table.left else ""


def _cell_html(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return html.escape(cell)
    text = html.escape(cell.text)
    text = {1: f"<b>{text}</b>", 2: f"<u>{text}</u>"}.get(cell.rank, text)
    small = html.escape(cell.small).replace("\n", "<br>")
    return text + (f"<small>{small}</small>" if small else "")


def write(document: Document, folder: Path) -> list[Path]:
    """Writes report.html, report.md and the figures as SVG and PNG; returns the files, the page first."""
    from revisit.evaluation.store import disk_error, make_folder

    page, text = folder / "report.html", folder / "report.md"
    written = [page, text]
    try:
        page.write_text(to_html(document), encoding="utf-8")
        text.write_text(to_markdown(document), encoding="utf-8")
        for figure in document.figures():
            place = make_folder(folder / "figures")
            (place / f"{figure.name}.svg").write_text(figure.svg, encoding="utf-8")
            (place / f"{figure.name}.png").write_bytes(figure.png)
            written += [place / f"{figure.name}.svg", place / f"{figure.name}.png"]
    except OSError as error:
        raise disk_error(error, folder) from error
    return written


def rows_of(rows: Sequence[Sequence[Cell | str]]) -> tuple[tuple[Cell | str, ...], ...]:
    """Lists as the tuples that a table holds."""
    return tuple(tuple(row) for row in rows)
