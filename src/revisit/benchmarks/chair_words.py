"""The words CHAIR listens for: the 80 COCO categories and the nouns that count as each of them.

The facts, in data/chair_words.json, are those of `data/synonyms.txt` of the original CHAIR (LisaAnne/Hallucination, BSD-2), put in our
own form: each category with its other words in alphabetical order. Five entries of that file are left out because no caption can
ever produce them: "motor bike" and "cheesecake" (stored there with a leading blank), "iPhone" (captions are
lower-cased), "stove top oven" (three words, only pairs are merged) and "bow tie" (rewritten to "tie" before the
look-up).
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources

_DATA = json.loads(resources.files("revisit.benchmarks").joinpath("data/chair_words.json").read_text("utf-8"))
CATEGORIES: tuple[str, ...] = tuple(_DATA["words"])

# word -> category, the category names themselves included
WORDS: dict[str, str] = {word: category for category, others in _DATA["words"].items() for word in (category, *others)}

_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal", "cub")

# Word pairs (of lemmas) that count as one word, by what they become.
PAIRS: dict[tuple[str, str], str] = {
    **{(pair.split()[0], pair.split()[1]): pair for pair in _DATA["pairs"]},
    **{(age, animal): animal for age in ("baby", "adult") for animal in _ANIMALS},
    ("passenger", "jet"): "jet",
    ("passenger", "train"): "train",
    ("bow", "tie"): "tie",
    ("toilet", "seat"): "toilet",
    ("wine", "glas"): "wine glass",
}


@cache
def object_words() -> re.Pattern[str]:
    """All words with an optional plural ending, the longest first."""
    words = "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True))
    return re.compile(rf"\b({words})(?:e?s)?\b", re.IGNORECASE)
