"""Checks as HTML: the text with doubtful words marked, the picture, and the patch of a word while it is pointed at."""

from __future__ import annotations

import html
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.errors import RevisitError
from revisit.pages.document import data_uri, static_page, write_page

if TYPE_CHECKING:
    from revisit.explain.check import Check
    from revisit.explain.support import Word

STYLE = """<style>
.check { display: flex; flex-wrap: wrap; gap: 12px 24px; margin: 1.2rem 0; align-items: flex-start; }
.check svg { width: min(320px, 100%); height: auto; border-radius: 6px; }
.check > div { flex: 1 1 280px; min-width: 0; overflow-wrap: anywhere; }
.check rect { visibility: hidden; fill: rgb(255 120 0 / .3); stroke: #ff7800; stroke-width: 2; vector-effect: non-scaling-stroke; }
.check .word { border-bottom: 2px solid #2e8b57; cursor: help; }
.check .doubtful { border-bottom: 2px dashed #e5484d; background: rgb(229 72 77 / .2); }
</style>"""


def save(path: Path, check: Check) -> Path:
    """Write a check as a page (.html) or as data (.json)."""
    if path.suffix.lower() == ".json":
        return write_page(path, json.dumps(check.to_dict(), ensure_ascii=False, indent=2) + "\n")
    if path.suffix.lower() not in (".html", ".htm"):
        raise RevisitError(f"A check is saved as .html or .json; {path} ends in neither.")
    return write_page(path, page([check]))


def page(checks: Sequence[Check], lead: str = "", names: Sequence[str] = ()) -> str:
    """One page with these checks, in order; `names` are their headings."""
    heads = [f"<h2 style='overflow-wrap: anywhere'>{html.escape(name)}</h2>" for name in names] or [""] * len(checks)
    blocks = [head + fragment(check) for head, check in zip(heads, checks, strict=True)]
    about = lead or f"Checked with {checks[0].model}. Point at an underlined word, or tap it, to see its patch."
    body = f"<h1>Which words does the picture support?</h1><p class=lead>{html.escape(about)}</p>{''.join(blocks)}"
    return static_page("Which words does the picture support?", body, "report.css")


def fragment(check: Check) -> str:
    """One check as HTML, for a notebook or a page."""
    key = f"c{zlib.crc32(json.dumps(check.to_dict()).encode()):08x}"
    doubtful = check.flagged()
    shown = [(n, word) for n, word in enumerate(check.words) if word.checkable]
    rules = "".join(
        f"#{key}:has(.w{n}:hover) .p{n}, #{key}:has(.w{n}:focus) .p{n} {{ visibility: visible }}" for n, _ in shown
    )
    text, at = "", 0
    for n, word in shown:
        text += html.escape(check.text[at : word.start]) + _marked(word, n, word in doubtful)
        at = word.end
    text += html.escape(check.text[at:])
    notes = "".join(f"<p><em>{html.escape(note)}</em></p>" for note in check.notes)
    said = "; ".join(f"{w.text} ({w.support:.2f}{f', better: {w.instead}' if w.instead else ''})" for w in doubtful)
    verdict = f"Doubtful: {html.escape(said)}" if said else "No word is doubtful."
    pictures = "".join(_picture(check, number, shown) for number in range(len(check.images)))
    about = f"<p>{verdict}</p>{notes}"
    return f"{STYLE}<style>{rules}</style><div class=check id={key}>{pictures}<div><p>{text}</p>{about}</div></div>"


def _marked(word: Word, number: int, doubtful: bool) -> str:
    title = f"support {word.support:.2f}" + (f"; {word.instead} fits better" if word.instead else "")
    kind = "word doubtful" if doubtful else "word"
    return f'<span class="{kind} w{number}" tabindex=0 title="{html.escape(title)}">{html.escape(word.text)}</span>'


def _picture(check: Check, number: int, shown: Sequence[tuple[int, Word]]) -> str:
    image = check.images[number]
    boxes = ""
    for n, word in shown:
        if word.box is not None and word.image == number + 1:
            x0, y0, x1, y1 = word.box
            boxes += f'<rect class="p{n}" x="{x0}" y="{y0}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"/>'
    size = f'width="{image.width}" height="{image.height}"'
    return (
        f'<svg viewBox="0 0 {image.width} {image.height}" {size} role="img" aria-label="The picture">'
        f'<image href="{data_uri(image)}" {size}/>{boxes}</svg>'
    )
