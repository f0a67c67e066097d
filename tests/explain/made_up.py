"""A decode made up for tests: no model, any number of tokens, patches that are known in advance."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from revisit.explain.record import Candidate, Decode, MethodOutput, TokenStep
from revisit.models.geometry import ImageGrid, Layout

WORDS = re.findall(r"\S+", "A small dog and a red ball lie on the grass near a wooden bench under a tree .")


def scene(size: tuple[int, int] = (480, 320)) -> Image.Image:
    """A meadow with a ball and a house, so that patches can be told apart by eye."""
    width, height = size
    image = Image.new("RGB", size, (150, 200, 235))
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, height * 0.55, width, height), fill=(110, 165, 80))
    pen.ellipse((width * 0.15, height * 0.6, width * 0.3, height * 0.83), fill=(200, 60, 50))
    pen.rectangle((width * 0.6, height * 0.3, width * 0.85, height * 0.7), fill=(190, 150, 100))
    pen.polygon(
        [(width * 0.57, height * 0.3), (width * 0.88, height * 0.3), (width * 0.72, height * 0.1)], fill=(120, 60, 50)
    )
    return image


def even_layout(size: tuple[int, int], rows: int, columns: int) -> Layout:
    """One grid over the whole image."""
    width, height = size
    xs = tuple((c * width / columns, (c + 1) * width / columns) for c in range(columns))
    ys = tuple((r * height / rows, (r + 1) * height / rows) for r in range(rows))
    return Layout((size,), rows * columns, (ImageGrid(0, rows, columns, xs=xs, ys=ys),))


def speaker(step: int, tokens: int) -> int:
    """Which vision token speaks at a step."""
    return (7 * step + 3) % tokens


def answer(count: int, tokens: int, seed: int = 0, words: list[str] | None = None) -> MethodOutput:
    """`count` steps over `tokens` vision tokens; every fifth changes the model's mind, every fourth decides nothing."""
    draw = np.random.default_rng(seed)
    words = words or WORDS
    steps = []
    for number in range(count):
        text = ("" if number == 0 else " ") + words[number % len(words)]
        if number % 4 == 2:
            steps.append(
                TokenStep(text, number, plausible_tokens=1, candidates=[Candidate(number, text, 1.0, None, 1.0)])
            )
            continue
        heat = draw.random(tokens).astype("float32") * 0.5 + 0.1
        index = speaker(number, tokens)
        heat[index] = 0.01
        changed = number % 5 == 1
        others = draw.dirichlet(np.ones(11)) * 0.4
        candidates = [Candidate(number, text, 0.25 if changed else 0.6, 0.7, 0.8)]
        candidates += [
            Candidate(1000 + k, f" other{k}", 0.35 if changed and k == 0 else float(p), float(p) / 2, float(p) / 4)
            for k, p in enumerate(others)
        ]
        steps.append(
            TokenStep(
                text,
                number,
                shift=0.55 if changed else 0.2 * draw.random(),
                instead_of=" other0" if changed else None,
                plausible_tokens=20,
                layer=6,
                vision_token=index,
                divergence=0.01,
                heat=heat,
                candidates=candidates,
            )
        )
    method: dict[str, Any] = {"name": "revisit", "alpha": 0.001}
    return MethodOutput(method, steps, "".join(step.text for step in steps), (6,))


def plain_answer(count: int) -> MethodOutput:
    """The same words with two of them other, and nothing known about how they came about."""
    words = [" cat" if n == 2 else " table" if n == 14 else ("" if n == 0 else " ") + WORDS[n] for n in range(count)]
    tokens = [1000 + n if n in (2, 14) else n for n in range(count)]
    steps = [TokenStep(text, token) for text, token in zip(words, tokens, strict=True)]
    return MethodOutput({"name": "greedy"}, steps, "".join(words))


def decode(count: int = 18, rows: int = 8, columns: int = 12) -> Decode:
    size = (480, 320)
    layout = even_layout(size, rows, columns)
    answers = [answer(count, rows * columns), plain_answer(count)]
    return Decode([scene(size)], "What is in the picture?", "made-up", layout, answers)
