"""Texts about scenes that only training uses: words of patches, lists, checklists, and mixed questions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from revisit.embedded import text
from revisit.embedded.catalog import BY_NOUN, CATEGORIES, COLORS, PLACES
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import Bytes, Scene, patches, reading_order
from revisit.embedded.text import absent, multiple_choice

DESCRIBE = (
    "Please describe this image in detail.",
    "Please describe this image in detail.",
    "Describe this image.",
    "What is in this image?",
    "Describe the image in detail.",
    "What do you see in the picture?",
)
LIST = ("List the objects in the image.", "Name everything in the image.")
ONE_WORD = "Answer the question using a single word or phrase."
ONE_LETTER = "Answer with the option's letter from the given choices directly."
GROUNDS: tuple[str, ...] = tuple(sorted({p.top for p in PLACES} | {p.bottom for p in PLACES}))

# The words of patches that the vision tower learns: all nouns, then all grounds.
PATCH_WORDS: tuple[str, ...] = tuple(c.noun for c in CATEGORIES) + GROUNDS
_PATCH_INDEX = {word: i for i, word in enumerate(PATCH_WORDS)}
_COLOR_INDEX = {color: i for i, color in enumerate(COLORS)}


@dataclass(frozen=True)
class Turn:
    """A question about a scene with its answer and kind."""

    kind: str
    question: str
    answer: str


def patch_labels(scene: Scene) -> tuple[Bytes, Bytes]:
    """Return indices into PATCH_WORDS, and into COLORS plus one (0: no tint), per patch in reading order."""
    words, colors = patches(scene)
    named = [0 if c is None else _COLOR_INDEX[c] + 1 for c in colors]
    return np.array([_PATCH_INDEX[w] for w in words], np.uint8), np.array(named, np.uint8)


def checklist(scene: Scene, dice: Dice, absent_ones: int) -> Turn:
    """Write every object of the scene and some absent ones, each followed by yes or no."""
    missing = {absent(scene, dice).noun for _ in range(absent_ones)}
    entries = [f"{noun} yes" for noun in scene.nouns] + [f"{noun} no" for noun in sorted(missing)]
    return Turn("checklist", "Check what is in the image.", f"There: {', '.join(dice.shuffled(entries))}.")


def listing(scene: Scene, dice: Dice) -> Turn:
    """Write every object of the scene once, in reading order: the plain form of the task, which is learned first."""
    listed = ", ".join(BY_NOUN[noun].phrase for noun in reading_order(scene))
    return Turn("list", dice.pick(LIST), f"The image shows {listed}.")


def choice_prompt(question: str, options: list[str]) -> str:
    """Write a question in the official MMMU form: the question, one line per option, a blank line, and what to answer."""
    lines = "\n".join(f"({chr(65 + i)}) {option}" for i, option in enumerate(options))
    return f"{question}\n{lines}\n\n{ONE_LETTER}"


def questions(scene: Scene, dice: Dice, n: int) -> list[Turn]:
    """Write n questions of mixed kinds with answers, half of them about presence, yes as often as no."""
    turns: list[Turn] = []
    while len(turns) < n:
        short = dice.chance(0.4)
        noun = dice.pick(scene.nouns)
        kind = dice.weighted(("presence", "count", "color", "position", "choice"), (24, 4, 6, 4, 3))
        if kind == "presence":
            there = dice.chance(0.5)
            category = BY_NOUN[noun] if there else absent(scene, dice)
            answers = "yes" if there else "no", text.presence_answer(category, there)
            asked = text.presence_question(category)
        elif kind == "choice":
            question, options, right = multiple_choice(scene, dice)
            asked, answers = choice_prompt(question, options), (chr(65 + right),) * 2
        else:
            found = {"count": text.count, "color": text.color, "position": text.position}[kind](scene, noun)
            if found is None:
                continue
            asked, told = found
            answers = told.split()[-1], _sentence(scene, noun, kind, told)
        suffix = f" {ONE_WORD}" if short and kind != "choice" else ""
        turn = Turn(kind, asked + suffix, answers[0 if short else 1])
        if turn not in turns:
            turns.append(turn)
    return turns


def _sentence(scene: Scene, noun: str, kind: str, told: str) -> str:
    """Write the answer to a question about a number, a color or a position as a sentence."""
    if kind != "count":
        return f"The {noun} is {told}."
    n, category = len(scene.of(noun)), BY_NOUN[noun]
    are, name = ("is", noun) if n == 1 and not category.always_plural else ("are", category.plural)
    return f"There {are} {text.NUMBERS.get(n, str(n))} {name} in the image."
