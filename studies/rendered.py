"""Text inside images: does a detector notice that a text misquotes a sign?

A word that names nothing in the image is rendered on a sign at its bottom. Three texts quote the sign: the right word, another word, and
the right word with one letter exchanged. AUROC compares the right words with those of each of the other texts. Without the sign, the same
texts show the preferences of a detector that cannot read it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import ImageDraw, ImageFont
from PIL.Image import Image

from revisit.eval.report.document import Block, Table
from revisit.eval.run import Reporter
from revisit.explain.sweep import auroc
from revisit.io.files import make_folder
from revisit.paper.study import Result, Stored, Subject, images, number, track
from revisit.words import CATEGORIES
from studies.check import Known, Reader, Stated, interval
from studies.detectors import DETECTORS

TEXTS = ("right", "word", "letter")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def with_sign(image: Image, word: str) -> Image:
    """Render a word in black on a white sign, as wide as the image and a fifth of its height."""
    result = image.convert("RGB")
    width, height = result.size
    pen = ImageDraw.Draw(result)
    pen.rectangle((0, height * 4 // 5, width, height), fill="white", outline="black")
    font = ImageFont.load_default(min(height / 7, 1.6 * width / len(word)))
    pen.text((width / 2, height * 9 / 10), word, fill="black", font=font, anchor="mm")
    return result


def quoted(truth: list[str], seed: int) -> tuple[str, str, str]:
    """Return a word that names nothing in the image, another one, and the first with one letter exchanged."""
    rng = np.random.default_rng(seed)
    word, other = map(str, rng.choice([name for name in CATEGORIES if " " not in name and name not in truth], 2, False))
    place = int(rng.integers(len(word)))
    letter = str(rng.choice([letter for letter in LETTERS if letter != word[place]]))
    return word, other, word[:place] + letter + word[place + 1 :]


def run(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: AUROC of every detector on exchanged words and letters, with intervals over images."""
    reader, folder = Reader(subject), make_folder(Path(subject.out) / "rendered")
    found: dict[tuple[bool, str], list[tuple[int, dict[str, float]]]] = {}  # (sign, text) -> image and scores
    for image, item in enumerate(track(reporter, "signs", subject.items)):
        words = quoted(item.meta["ground_truth"], image)
        path = folder / f"{item.id}.png"
        with_sign(images(item)[0], words[0]).save(path)
        known: dict[str, Known] = {word: ("sign", word == words[0]) for word in words}
        texts = {kind: Stated(f"The sign says {word}.", known.get) for kind, word in zip(TEXTS, words, strict=True)}
        for sign, shown in ((True, replace(item, images=(path,))), (False, item)):
            for kind, _, _, scores in reader.words(shown, texts):
                found.setdefault((sign, kind), []).append((image, scores))
    rows = [
        {
            "name": name,
            "sign": sign,
            **{kind: _compared(found[sign, TEXTS[0]], found[sign, kind], name) for kind in TEXTS[1:]},
        }
        for name in DETECTORS
        for sign in (True, False)
    ]
    return {"images": len(subject.items), "rows": rows}


def _compared(
    first: list[tuple[int, dict[str, float]]], second: list[tuple[int, dict[str, float]]], name: str
) -> Result:
    """Return a detector's AUROC of separating the words of right texts from those of wrong ones."""
    groups = [image for image, _ in first + second]
    scores = np.array([scores[name] for _, scores in first + second])
    right = np.arange(len(groups)) < len(first)
    low, high = interval(scores, right, groups)
    return {"auroc": auroc(scores, right), "low": low, "high": high}


def draw(result: Stored) -> list[Block]:
    """Draw one row per detector."""
    lines = []
    for row, control in zip(result["rows"][::2], result["rows"][1::2], strict=True):
        cells = [shown[kind] for kind in TEXTS[1:] for shown in (row, control)]
        texts = [[number(cell[key], 3) for key in ("auroc", "low", "high")] for cell in cells]
        lines.append((row["name"], *(f"{area} [{low}, {high}]" for area, low, high in texts)))
    caption = (
        f"AUROC of telling a sign's word in a text from another word, and from itself with one letter exchanged, on {result['images']} "
        "images with the rendered sign and without it, with 95 % intervals over images."
    )
    heads = ("Score", *("with the sign", "without") * 2)
    return [Table(heads, lines, caption, groups=(("another word", 2), ("another letter", 2)))]
