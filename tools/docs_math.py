"""A hook of MkDocs: equations become MathML when the site is built, so that no script and no network are needed to read them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# A letter alone is set in the mathematical alphabet, in which fonts lack the h; as plain italics all letters have one typeface.
LETTER = re.compile(r"<mi>([A-Za-z]|&#x003[0-9A-F]{2};)</mi>")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_content(text: str, **_: Any) -> str:
    """Every equation that the markdown extension marked, as MathML."""
    return EQUATION.sub(_equation, text)


def _equation(found: re.Match[str]) -> str:
    display = "block" if found.group(2) == "[" else "inline"
    tex = html.unescape(found.group(3)).strip().replace(r"\big", "")
    made = LETTER.sub(r'<mi mathvariant="normal" class="letter">\1</mi>', str(convert(tex, display=display)))
    return f'<div class="equation">{made}</div>' if display == "block" else made  # an element that can be scrolled
