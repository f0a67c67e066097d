"""Draw the image at the top of README.md and docs/index.md, and write its page: python tools/hero.py

One scene, what plain decoding and ReVisiT write about it, and the step at which they part, for light and dark screens.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from revisit import ask
from revisit.decoding.decode import Decoded
from revisit.decoding.trace import StepRecord
from revisit.embedded.samples import sample
from revisit.pages.answers import AnswerPage, wrong_steps
from revisit.pages.document import data_uri

DOCS = Path(__file__).parent.parent / "docs"
WIDTH, MARGIN, SIDE = 640, 24, 216
LINE = 43  # characters of a line: fonts differ between readers
COLORS = {
    "light": {"page": "#fbfaf7", "ink": "#1b1c1f", "soft": "#5d6069", "bad": "#b00020", "base": "#4b6a8f", "final": "#b3410e"},
    "dark": {"page": "#14161a", "ink": "#e9e7e2", "soft": "#a3a6ae", "bad": "#ff8f8f", "base": "#86aee0", "final": "#ff9d5c"},
}  # fmt: skip


def words(answer: Decoded, objects: tuple[str, ...]) -> list[list[tuple[str, str]]]:
    """Split into lines of (text, style): an absent object is `bad`, a word that the method changed is `final`."""
    lines: list[list[tuple[str, str]]] = [[]]
    wrong = wrong_steps(answer, objects)
    for number, step in enumerate(answer.steps):
        if step.text.strip().startswith("<"):
            continue
        if step.text.startswith(" ") and sum(len(text) for text, _ in lines[-1]) + len(step.text) > LINE:
            lines.append([])
        style = "bad" if number in wrong else "final" if step.changed else "ink"
        if lines[-1] and step.text.startswith(" "):
            lines[-1].append((" ", "ink"))
        lines[-1].append((step.text.lstrip(), style))
    return lines


def paragraph(
    answer: Decoded, objects: tuple[str, ...], title: str, top: int, colors: dict[str, str]
) -> tuple[str, int]:
    """Draw a heading and an answer below it; return the drawing and its lower end."""
    drawn = f'<text x="{MARGIN}" y="{top}" font-size="19" fill="{colors["soft"]}">{title}</text>'
    wave = f'text-decoration="underline wavy {colors["bad"]}" style="text-underline-offset: 6px" font-weight="700"'
    marks = {"bad": wave, "final": 'font-weight="700"', "ink": ""}
    for line in words(answer, objects):
        top += 32
        parts = "".join(f'<tspan fill="{colors[s]}" {marks[s]}>{escape(text)}</tspan>' for text, s in line)
        drawn += f'<text x="{MARGIN}" y="{top}" font-size="24" xml:space="preserve">{parts}</text>'
    return drawn, top


def chart(step: StepRecord, before: str, colors: dict[str, str]) -> str:
    """Draw the likeliest words of a step, of the model and of the method."""
    left, bar, full = MARGIN + SIDE + 24, MARGIN + SIDE + 148, 160
    drawn = (
        f'<text x="{left}" y="{MARGIN + 16}" font-size="19" fill="{colors["soft"]}">After “… {escape(before)}”</text>'
    )
    candidates = zip(step.texts or [], step.base, step.final, strict=True)
    for row, (text, *values) in enumerate(sorted(candidates, key=lambda c: -max(c[1:]))[:3]):
        y = MARGIN + 38 + 52 * row
        drawn += f'<text x="{left}" y="{y + 29}" font-size="22" fill="{colors["ink"]}">{escape(text.strip())}</text>'
        for place, (value, color) in enumerate(zip(values, ("base", "final"), strict=True)):
            top = y + 2 + 21 * place
            drawn += f'<rect x="{bar}" y="{top}" width="{max(2, full * value):.0f}" height="17" rx="3" fill="{colors[color]}"/>'
            where = bar + max(2, full * value) + 6
            drawn += (
                f'<text x="{where:.0f}" y="{top + 15}" font-size="17" fill="{colors["ink"]}">{100 * value:.0f} %</text>'
            )
    key = "".join(
        f'<rect x="{x}" y="{MARGIN + SIDE - 16}" width="17" height="17" rx="3" fill="{colors[color]}"/>'
        f'<text x="{x + 24}" y="{MARGIN + SIDE - 1}" font-size="19" fill="{colors["soft"]}">{name}</text>'
        for x, color, name in ((left, "base", "model alone"), (left + 156, "final", "with ReVisiT"))
    )
    return drawn + key


def drawing(page: AnswerPage, theme: str) -> str:
    """Return the whole drawing as SVG."""
    colors, (ours, plain) = COLORS[theme], page.answers
    number = ours.changed[0]
    step, before = ours.steps[number], "".join(s.text for s in ours.steps[:number]).split()
    region = page.layout.region(step.vision_token) if step.vision_token is not None else None
    first, end = paragraph(plain, page.objects or (), "Plain decoding", MARGIN + SIDE + 46, colors)
    second, end = paragraph(ours, page.objects or (), "With ReVisiT", end + 46, colors)
    box = ""
    if region is not None:
        scale = SIDE / page.images[0].width
        x0, y0, x1, y1 = (scale * edge for edge in region.box)
        shape = f'x="{MARGIN + x0:.1f}" y="{MARGIN + y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" fill="none"'
        middle, right = MARGIN + (y0 + y1) / 2, MARGIN + x1
        path = f'<path d="M {right:.1f} {middle:.1f} L {MARGIN + SIDE + 20} {MARGIN + 58}"'
        box = "".join(
            f'<rect {shape} stroke="{color}" stroke-width="{width}"/>{path} stroke="{color}" stroke-width="{width}"/>'
            for color, width in ((colors["page"], 7), (colors["final"], 3))
        )
    absent = plain.steps[min(wrong_steps(plain, page.objects))].text.strip()
    label = f"Plain decoding names a {absent} that is not in the image; ReVisiT writes {step.text.strip()} there."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + MARGIN}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">'
        f'<rect width="100%" height="100%" rx="12" fill="{colors["page"]}"/>'
        f'<image x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" href="{data_uri(page.images[0])}"/>'
        f"{box}{chart(step, ' '.join(before[-3:]), colors)}{first}{second}</svg>\n"
    )


def main() -> None:
    shown = sample("demo")
    page = ask("tiny", shown.image(), compare_with="greedy", max_new_tokens=128, objects=shown.nouns).page
    for theme in COLORS:
        (DOCS / "images" / f"hero-{theme}.svg").write_text(drawing(page, theme), "utf-8")
    page.write(DOCS / "demo.html", title="ReVisiT demo")


if __name__ == "__main__":
    main()
