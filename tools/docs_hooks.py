"""MkDocs hooks: equations become MathML, which needs no script, and the API pages list every method."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

# A letter alone is set in the mathematical alphabet, in which fonts lack the h; as plain italics all letters have one typeface.
LETTER = re.compile(r"<mi>([A-Za-z]|&#x003[0-9A-F]{2};)</mi>")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)


INTERVAL = re.compile(
    r"<td([^>]*)>([^<(\[]+?) (\([−+0-9][^<]*\)|\[[−+0-9][^<]*\])</td>"
)  # a value and its difference or interval

METHODS = Path(__file__).parents[1] / "src/revisit/methods/__init__.py"


def on_page_markdown(text: str, page: Any = None, **_: Any) -> str:
    """Give wide tables of the research notes the width of the table of contents, and list the methods.

    Replace `::: revisit.methods.*` by one directive for each method of the table, which is read without importing it.
    """
    if page is not None and page.file.src_uri.startswith("research/"):
        page.meta.setdefault("hide", ["toc"])
    assignments = (node for node in ast.parse(METHODS.read_text("utf-8")).body if isinstance(node, ast.Assign))
    table = next(ast.literal_eval(node.value) for node in assignments if ast.unparse(node.targets[0]) == "BUILT_IN")
    return text.replace("::: revisit.methods.*", "\n\n".join(f"::: {e.replace(':', '.')}" for e in table.values()))


def on_page_content(text: str, **_: Any) -> str:
    """Convert every equation that the markdown extension marked to MathML, and put intervals of tables below their values."""
    return INTERVAL.sub(r"<td\1>\2<small>\3</small></td>", EQUATION.sub(_equation, text))


def _equation(found: re.Match[str]) -> str:
    display = "block" if found.group(2) == "[" else "inline"
    tex = html.unescape(found.group(3)).strip().replace(r"\big", "")
    made = LETTER.sub(r'<mi mathvariant="normal" class="letter">\1</mi>', str(convert(tex, display=display)))
    return f'<div class="equation">{made}</div>' if display == "block" else made  # an element that can be scrolled
