"""Training texts about a photo: human captions completed by the objects they omit, checklists, and yes/no questions."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from revisit.eval.benchmarks import chair
from revisit.words import CATEGORIES
from training.texts import Turn

SHORT = ("Describe this image.", "What is in this image?", "Write a short caption.")
CHECK = "Check what is in the image."
PLURAL = ("skis", "scissors")
VISIBLE = -2.5  # objects of a lower image score are not added to a caption: the tower does not see them
MOST_ADDED = 4
MOST_CHECKED = 5  # present objects of a checklist; it has at most one absent object more
PRESENCE_QUESTIONS = 3
LIKELY = 0.5  # share of absent objects that are drawn from those seen together with the present ones

Scores = NDArray[np.float32]


def phrase(name: str) -> str:
    """Return an object with its article."""
    return name if name in PLURAL else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def presence_question(name: str) -> str:
    """Return the question in POPE's form."""
    return f"Is there {phrase(name)} in the image?"


def sentence(caption: str) -> str:
    """Return a human caption with a capital first letter and one full stop at the end."""
    words = " ".join(caption.split()).strip('" ').rstrip(" .!,")
    return f"{words[:1].upper()}{words[1:]}."


def also(names: Sequence[str]) -> str:
    """Return a sentence that adds objects to a caption; empty without objects."""
    if not names:
        return ""
    *first, last = map(phrase, names)
    verb = "are" if names[0] in PLURAL else "is"
    return f" There {verb} also {', '.join(first)}{' and ' if first else ''}{last}."


class Texts:
    """Questions and answers about photos, from their objects and captions."""

    def __init__(self, objects: Mapping[int, Sequence[int]], captions: Mapping[int, Sequence[str]]) -> None:
        self.objects, self.captions = objects, captions
        count = len(CATEGORIES)
        together, often = np.zeros((count, count)), np.zeros(count)
        for present in objects.values():
            often[present] += 1
            together[np.ix_(present, present)] += 1
        self._often = often / max(1.0, often.sum())
        self._together = together / np.maximum(1, often)[:, None]

    def absent(self, photo: int, dice: random.Random, likely: float = LIKELY) -> int:
        """Draw an object that is not in the photo; with probability `likely`, one that often occurs with those that are."""
        present = list(self.objects[photo])
        odds = np.ones(len(CATEGORIES))
        if dice.random() < likely:
            odds = self._together[present].sum(0) + self._often + 1e-9
        odds[present] = 0
        return dice.choices(range(len(CATEGORIES)), odds.tolist())[0]

    def turns(self, photo: int, scores: Scores, key: str) -> list[Turn]:
        """Return a long caption, a short one, a checklist and presence questions; `key` varies them from one use to the next."""
        dice, present = random.Random(key), list(self.objects[photo])
        captions = [made for made in map(sentence, self.captions.get(photo, ())) if 6 <= len(made.split()) <= 17]
        dice.shuffle(captions)
        out: list[Turn] = []
        if captions:
            named = set(chair.parse_caption(captions[0]).nodes)
            seen = [CATEGORIES[k] for k in sorted(present, key=lambda k: -scores[k]) if scores[k] > VISIBLE]
            added = [name for name in seen if name not in named][:MOST_ADDED]
            out.append(Turn("caption", chair.PROMPT, captions[0] + also(added)))
            out += [Turn("caption", dice.choice(SHORT), text) for text in captions[1:2]]
        if present:
            checked = dice.sample(present, min(MOST_CHECKED, len(present)))
            missing = {self.absent(photo, dice) for _ in range(len(checked) + 1)}
            entries = [f"{CATEGORIES[k]} yes" for k in checked] + [f"{CATEGORIES[k]} no" for k in sorted(missing)]
            dice.shuffle(entries)
            out.append(Turn("checklist", CHECK, f"{', '.join(entries)}."))
        yes_first = dice.random() < 0.5
        for number in range(PRESENCE_QUESTIONS):
            there = bool(present) and (number % 2 == 0) == yes_first
            asked = CATEGORIES[dice.choice(present) if there else self.absent(photo, dice)]
            out.append(Turn("presence", presence_question(asked), "Yes." if there else "No."))
        return out


def words_of(captions: Sequence[str]) -> set[str]:
    """Return the words of some captions, and the singular of those that end in s."""
    words = {word for caption in captions for word in re.findall("[a-z]+", caption.lower())}
    return words | {word[:-1] for word in words if word.endswith("s")}
