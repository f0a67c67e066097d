"""Documents of sections with text, tables and figures, written as HTML, markdown or LaTeX."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from revisit.io.files import inside, make_folder, write_text
from revisit.pages.document import fill, static_page

SUPERSCRIPT = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Cell:
    """An entry of a table; the lines of `small` are printed under it."""

    text: str
    rank: int = 0  # 1 is printed bold, 2 underlined
    small: str = ""


@dataclass(frozen=True)
class Table:
    """A table. `groups` are (title, number of columns) above the headings, from column `left` on."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str
    groups: Sequence[tuple[str, int]] = ()
    marked: frozenset[int] = frozenset()  # highlighted rows
    folded: bool = False  # collapsed on the page
    left: int = 1  # leading columns of text, which are aligned left
    label: str = ""  # for references in LaTeX


@dataclass(frozen=True)
class Figure:
    """An image with alternative text."""

    name: str
    svg: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is its style on the page."""

    text: str
    kind: str = ""


Block: TypeAlias = "Table | Figure | Text"


@dataclass
class Section:
    """A heading and its blocks."""

    title: str
    blocks: list[Block] = field(default_factory=list)
    level: int = 2


@dataclass
class Document:
    """A title, a lead paragraph and sections."""

    title: str
    lead: str
    sections: list[Section]

    def figures(self) -> list[Figure]:
        """Return all figures, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]


def anchor(title: str) -> str:
    """Return a heading as a fragment of an address."""
    return "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")


# -- markup --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Markup:
    """How a format writes the cells of a table: templates for best and second values and small text, and its special characters."""

    best: str
    second: str
    small: str
    special: Mapping[str, str]

    def text(self, text: str) -> str:
        """Escape a text."""
        return "".join(self.special.get(character, character) for character in text)

    def cell(self, cell: Cell | str) -> str:
        """Write a cell in one line."""
        if isinstance(cell, str):
            return self.text(cell)
        text = (("{}", self.best, self.second)[cell.rank]).format(self.text(cell.text))
        return f"{text} {self.small.format(self.text(cell.small))}" if cell.small else text


MARKDOWN = Markup("**{}**", "<u>{}</u>", "{}", {"|": "\\|", "*": "\\*", "\n": " "})
LATEX = Markup(
    r"\textbf{{{}}}",
    r"\underline{{{}}}",
    r"{{\footnotesize {}}}",
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{mark: f"$^{digit}$" for digit, mark in zip("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\n": ", "},
        **{"↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "−": "$-$", "α": r"$\alpha$", "×": r"$\times$"},
    },
)


def to_markdown(document: Document) -> str:
    """Write a document as GitHub-flavored markdown with links to the figures in the folder `figures`."""
    sections = map(section_markdown, document.sections)
    return "\n\n".join(part for part in (f"# {document.title}", document.lead, *sections) if part) + "\n"


def section_markdown(section: Section) -> str:
    """Write a section as markdown."""
    return "\n\n".join([f"{'#' * section.level} {section.title}", *map(_block_markdown, section.blocks)])


def _block_markdown(block: Block) -> str:
    if isinstance(block, Text):
        return block.text
    if isinstance(block, Figure):
        return f"![{block.alt}](figures/{block.name}.svg)\n\n*{block.caption}*"
    return table_markdown(block)


def table_markdown(table: Table) -> str:
    """Write a table as markdown, under its caption."""
    heads = [f"{group}: {head}" if group else head for group, head in grouped_heads(table)]
    rule = ["---"] * table.left + ["---:"] * (len(heads) - table.left)
    rows = [map(MARKDOWN.cell, row) for row in table.rows]
    body = "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *rows))
    caption = table.caption.replace("*", "\\*")
    return "\n\n".join(filter(None, (caption, body if rows else "")))


def grouped_heads(table: Table) -> list[tuple[str, str]]:
    """Return each heading after the title of the group above it, which is empty if there is none."""
    groups = [""] * table.left + [title for title, count in table.groups for _ in range(count)]
    return list(zip(groups + [""] * (len(table.heads) - len(groups)), table.heads, strict=True))


def to_latex(document: Document) -> str:
    """Write the tables of a document as LaTeX for booktabs, with the best values in bold and the second underlined."""
    tables = [block for section in document.sections for block in section.blocks if isinstance(block, Table)]
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(map(_table_latex, tables)) + "\n"


def _table_latex(table: Table) -> str:
    groups = " & ".join(rf"\multicolumn{{{count}}}{{c}}{{{LATEX.text(title)}}}" for title, count in table.groups)
    lines = [" & ".join(map(LATEX.cell, line)) + r" \\" for line in (table.heads, *table.rows)]
    return "\n".join(
        [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{LATEX.text(table.caption)}}}",
            *([rf"\label{{{table.label}}}"] if table.label else []),
            rf"\begin{{tabular}}{{{'l' * table.left}{'r' * (len(table.heads) - table.left)}}}",
            r"\toprule",
            *([f"{'& ' * table.left}{groups} \\\\"] if groups else []),
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


# -- HTML ----------------------------------------------------------------------------------------------------------


def to_html(document: Document) -> str:
    """Write a document as one self-contained page."""
    return static_page(document.title, fragment(document), "report.css")


def fragment(document: Document) -> str:
    """Write a document as HTML for a page or a notebook."""
    return fill("report.html", document=document, anchor=anchor, base64=base64.b64encode)


def write(document: Document, folder: Path) -> list[Path]:
    """Write report.html, report.md and the figures; return the files, the page first."""
    texts = {inside(folder, "report.html"): to_html(document), inside(folder, "report.md"): to_markdown(document)}
    texts |= {inside(folder, "figures", f"{figure.name}.svg"): figure.svg for figure in document.figures()}
    for path, text in texts.items():
        make_folder(path.parent)
        write_text(path, text)
    return list(texts)
