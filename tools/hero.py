"""Draw the image at the top of README.md and docs/index.md, and write its page: python tools/hero.py

The step at which `tiny` expects an object that is not in the scene, at the paper's setting: the model's probabilities, those of the
selected patch, and the result, for light and dark screens.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from revisit import ReVisiT, ask
from revisit.decoding.trace import StepRecord
from revisit.embedded.samples import sample
from revisit.pages.answers import AnswerPage
from revisit.pages.document import data_uri

DOCS = Path(__file__).parent.parent / "docs"
WIDTH, MARGIN, SIDE, WORDS = 760, 24, 216, 3
COLUMN, TOP, ROW = 200, 306, 52
INK = {"light": "#1b1c1f", "dark": "#e9e7e2"}
COLORS = {
    "light": {"page": "#fbfaf7", "soft": "#5d6069", "track": "#e9e6df", "model": "#4b6a8f", "patch": "#b3410e"},
    "dark": {"page": "#14161a", "soft": "#a3a6ae", "track": "#2a2e35", "model": "#86aee0", "patch": "#ff9d5c"},
}


def write(x: float, y: float, size: int, color: str, words: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}" {more}>{escape(words)}</text>'


def column(x: float, title: str, color: str, words: list[str], shares: list[float], colors: dict[str, str]) -> str:
    """Draw a title, and below it each word with its probability and a bar."""
    drawn = write(x, TOP, 22, color, title, 'font-weight="700"')
    best = max(range(len(shares)), key=shares.__getitem__)
    for row, (word, share) in enumerate(zip(words, shares, strict=True)):
        y = TOP + 38 + ROW * row
        bold = 'font-weight="700"' if row == best else ""
        drawn += write(x, y, 21, colors["ink"], word, bold)
        drawn += write(x + COLUMN, y, 21, colors["ink"], f"{100 * share:.0f}%", f'text-anchor="end" {bold}')
        drawn += f'<rect x="{x:.0f}" y="{y + 7}" width="{COLUMN}" height="9" rx="4" fill="{colors["track"]}"/>'
        drawn += (
            f'<rect x="{x:.0f}" y="{y + 7}" width="{max(4, COLUMN * share):.0f}" height="9" rx="4" fill="{color}"/>'
        )
    return drawn


def drawing(page: AnswerPage, number: int, theme: str) -> str:
    """Return the whole drawing of a step as SVG."""
    colors, answer = COLORS[theme] | {"ink": INK[theme], "result": INK[theme]}, page.answers[0]
    step: StepRecord = answer.steps[number]
    assert step.vision is not None
    assert step.vision_token is not None
    assert step.texts is not None
    order = sorted(range(len(step.base)), key=step.base.__getitem__, reverse=True)[:WORDS]
    words = [step.texts[i].strip() for i in order]
    region = page.layout.region(step.vision_token)
    assert region is not None
    scale, height = SIDE / page.images[0].width, TOP + 38 + ROW * (WORDS - 1) + 16 + MARGIN
    x0, y0, x1, y1 = (MARGIN + scale * edge for edge in region.box)
    shape = f'x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}" fill="none"'
    strokes = ((colors["page"], 8), (colors["patch"], 4))
    frame = "".join(f'<rect {shape} stroke="{color}" stroke-width="{width}"/>' for color, width in strokes)
    left = MARGIN + SIDE + 32
    so_far = "".join(s.text for s in answer.steps[:number]).split()
    lines = [" ".join(so_far[:4]), " ".join(so_far[4:])]
    said = write(left, MARGIN + 34, 21, colors["soft"], "The text so far")
    said += write(left, MARGIN + 76, 30, colors["ink"], f"“{lines[0]}") + write(
        left, MARGIN + 116, 30, colors["ink"], lines[1]
    )
    said += write(left, MARGIN + 168, 30, colors["ink"], f"{step.text.strip()}”", 'font-weight="700"')
    said += write(left, MARGIN + 204, 21, colors["soft"], f"instead of {(step.instead_of_text or '').strip()}")
    gap = (WIDTH - 2 * MARGIN - 3 * COLUMN) / 2
    starts = [MARGIN + place * (COLUMN + gap) for place in range(3)]
    columns = [("model", "model", step.base), ("patch", "patch", step.vision), ("result", "result", step.final)]
    bars = "".join(
        column(x, title, colors[key], words, [values[i] for i in order], colors)
        for x, (title, key, values) in zip(starts, columns, strict=True)
    )
    middle = TOP + 38 + ROW
    signs = "".join(
        write(x - gap / 2, middle, 34, colors["soft"], sign, 'text-anchor="middle"')
        for x, sign in zip(starts[1:], "×→", strict=True)
    )
    label = f"The model expects {words[0]}. The patch says {step.text.strip()}. Their product is {step.text.strip()}."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">'
        f'<rect width="100%" height="100%" rx="12" fill="{colors["page"]}"/>'
        f'<image x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" href="{data_uri(page.images[0])}"/>'
        f"{frame}{said}{bars}{signs}</svg>\n"
    )


def main() -> None:
    shown = sample("demo")
    options = {"max_new_tokens": 128, "objects": shown.nouns}
    page = ask("tiny", shown.image(), method=ReVisiT(), **options).page
    number = page.answers[0].changed[0]
    for theme in COLORS:
        (DOCS / "images" / f"hero-{theme}.svg").write_text(drawing(page, number, theme), "utf-8")
    ask("tiny", shown.image(), compare_with="greedy", **options).page.write(DOCS / "demo.html", title="ReVisiT demo")


if __name__ == "__main__":
    main()
