"""Render checks as HTML: the finding, the image, the text with flagged words marked, and the support of each word."""

from __future__ import annotations

import html
import json
import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from revisit.explain.document import asset, data_uri, static_page

if TYPE_CHECKING:
    from revisit.explain.check import Check
    from revisit.explain.support import Word


def page(checks: Sequence[Check], lead: str = "", names: Sequence[str] = ()) -> str:
    """Render one page with these checks, in order; `names` are their headings."""
    flagged = sum(bool(check.flagged()) for check in checks)
    title = (
        headline(checks[0]) if len(checks) == 1 else f"{flagged} of the {len(checks)} texts shown have flagged words"
    )
    body = "".join(fragment(check, name) for check, name in zip_longest(checks, names, fillvalue=""))  # type: ignore[arg-type]
    return static_page(title, body, "check.css", lead or f"Checked with {checks[0].model}")


def headline(check: Check) -> str:
    """Return the result of a check in one sentence."""
    words = [f"‘{word.text}’" for word in check.flagged()]
    if words:
        return f"The image does not support {', '.join(words[:-1])}{' or ' * (len(words) > 1)}{words[-1]}"
    return (
        f"No word is flagged: the image supports {', '.join(f'‘{word.text}’' for word in check.checked)}"
        if check.checked
        else "No word was checked"
    )


def fragment(check: Check, name: str = "") -> str:
    """Render one check as HTML for a notebook or a page: the image, the text, and a bar for each word."""
    key = f"c{zlib.crc32(json.dumps(check.to_dict()).encode()):08x}"
    flagged = check.flagged()
    shown = [(n, word) for n, word in enumerate(check.words) if word.checkable]
    rules = "".join(
        f"#{key}:has(.w{n}:hover) .p{n}, #{key}:has(.w{n}:focus) .p{n} {{ visibility: visible }}" for n, _ in shown
    )
    text, bars, at = "", "", 0
    for n, word in shown:
        marked = _marked(word, n, word in flagged)
        text += html.escape(check.text[at : word.start]) + marked
        bars += f"<dt>{marked}</dt>{_bar(word, word in flagged)}"
        at = word.end
    text += html.escape(check.text[at:])
    notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in check.notes)
    legend = f"Support from 0 to 1. Words below the dashed line ({check.threshold:.2f}) are flagged; point at another to see its patch."
    if any(word.instead for word in flagged):
        legend += " An arrow leads to a word that fits better."
    images = "".join(_image(check, number, shown) for number in range(len(check.images)))
    head = f"<h2>{html.escape(name)}</h2>" if name else ""
    chart = (
        f'<dl class=supports style="--threshold: {100 * check.threshold:.1f}%">{bars}</dl><p class=legend>{legend}</p>'
    )
    parts = f"{head}<p class=text>{text}</p>{chart if shown else ''}{notes}"
    return f"<style>{asset('check.css')}{rules}</style><div class=check id={key}>{images}<div>{parts}</div></div>"


def _marked(word: Word, number: int, flagged: bool) -> str:
    title = f"support {word.support:.2f}"
    kind = "word flagged" if flagged else "word"
    return f'<span class="{kind} w{number}" tabindex=0 title="{title}">{html.escape(word.text)}</span>'


def _bar(word: Word, flagged: bool) -> str:
    instead = f" → {html.escape(word.instead)}" if flagged and word.instead else ""
    track = f'<dd class="track"><i style="width: {100 * word.support:.1f}%"></i></dd>'
    return f"{track}<dd>{word.support:.2f}{instead}</dd>"


def _image(check: Check, number: int, shown: Sequence[tuple[int, Word]]) -> str:
    image = check.images[number]
    boxes = ""
    for n, word in shown:  # the best patch of a flagged word shows nothing
        if word.box is not None and word.image == number + 1 and word.support >= check.threshold:
            x0, y0, x1, y1 = word.box
            boxes += f'<rect class="p{n}" x="{x0}" y="{y0}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"/>'
    size = f'width="{image.width}" height="{image.height}"'
    return (
        f'<svg viewBox="0 0 {image.width} {image.height}" {size} role="img" aria-label="The image">'
        f'<image href="{data_uri(image)}" {size}/>{boxes}</svg>'
    )
