"""A hook of MkDocs: equations become MathML when the site is built, so that no script and no network are needed to read them."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_content(text: str, **_: Any) -> str:
    """Every equation that the markdown extension marked, as MathML."""
    return EQUATION.sub(_equation, text)


def _equation(found: re.Match[str]) -> str:
    display = "block" if found.group(2) == "[" else "inline"
    tex = html.unescape(found.group(3)).strip().replace(r"\big", "")
    return str(convert(tex, display=display))
