"""A synthetic decode: no model, any number of tokens, known patches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

import families
from revisit.decoding.decode import Decoded
from revisit.decoding.trace import RowTrace, StepRecord, Trace
from revisit.models.geometry import ImageGrid, Layout
from revisit.pages.answers import AnswerPage

WORDS = re.findall(r"\S+", "A small dog and a red ball lie on the grass near a wooden bench under a tree .")


def even_layout(size: tuple[int, int], rows: int, columns: int) -> Layout:
    """Lay one grid over the whole image."""
    width, height = size
    xs = tuple((c * width / columns, (c + 1) * width / columns) for c in range(columns))
    ys = tuple((r * height / rows, (r + 1) * height / rows) for r in range(rows))
    return Layout((size,), rows * columns, (ImageGrid(xs, ys),))


def selected(step: int, tokens: int) -> int:
    """Return the vision token that is selected at a step."""
    return (7 * step + 3) % tokens


def step(number: int, text: str, **fields: Any) -> StepRecord:
    """Make a step with one candidate, or with those of `fields`."""
    only: dict[str, Any] = {"ids": [number], "base": [1.0], "vision": None, "final": [1.0], "texts": [text]}
    return StepRecord(number + 1, number, **{**only, "plausible_tokens": 1, "text": text, **fields})


def output(name: str, steps: list[StepRecord], **settings: Any) -> Decoded:
    """Make the output of a method with these steps."""
    trace = Trace(record=True, rows=[RowTrace(step_count=len(steps), records=steps)], method={"name": name, **settings})
    return Decoded((), "".join(step.text or "" for step in steps), "", False, "stop", trace)


def answer(count: int, tokens: int, seed: int = 0) -> Decoded:
    """Make `count` steps over `tokens` vision tokens; every fifth changes the best token, every fourth has one candidate."""
    draw = np.random.default_rng(seed)
    steps = []
    for number in range(count):
        text = ("" if number == 0 else " ") + WORDS[number % len(WORDS)]
        if number % 4 == 2:
            steps.append(step(number, text))
            continue
        heat = torch.tensor(draw.random((1, tokens)) * 0.5 + 0.1, dtype=torch.float32)
        index = selected(number, tokens)
        heat[0, index] = 0.01
        changed = number % 5 == 1
        others = [0.4 / 11] * 11
        steps.append(
            step(
                number,
                text,
                ids=[number, *range(1000, 1011)],
                texts=[text, *(f" other{k}" for k in range(11))],
                base=[0.25, 0.35, *others[1:]] if changed else [0.6, *others],
                vision=[0.7, *(p / 2 for p in others)],
                final=[0.8, *(p / 4 for p in others)],
                plausible_tokens=20,
                layer=6,
                vision_token=index,
                divergence=0.01,
                divergences=heat,
            )
        )
    return output("revisit", steps, alpha=0.001)


def plain_answer(count: int) -> Decoded:
    """Make the same words except two, with one candidate each."""
    words = [" cat" if n == 2 else " table" if n == 14 else ("" if n == 0 else " ") + WORDS[n] for n in range(count)]
    return output("greedy", [step(number, text) for number, text in enumerate(words)])


def page(count: int = 18, rows: int = 8, columns: int = 12) -> AnswerPage:
    size = (480, 320)
    layout = even_layout(size, rows, columns)
    answers = [answer(count, rows * columns), plain_answer(count)]
    return AnswerPage([families.image(1, size)], "What is in the image?", "made-up", layout, answers)
