"""CHAIR's words: the 80 COCO categories and their synonyms.

The words and pairs in words.json come from `data/synonyms.txt` of the original CHAIR (LisaAnne/Hallucination, BSD-2), rearranged:
each category with its synonyms in alphabetical order. Five entries are omitted because no caption can match them: "motor
bike" and "cheesecake" (stored with a leading blank), "iPhone" (captions are lower-cased), "stove top oven" (three words,
while only pairs are merged) and "bow tie" (replaced by "tie" before the lookup).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import resources

_DATA = json.loads(resources.files("revisit").joinpath("words.json").read_text("utf-8"))
CATEGORIES: tuple[str, ...] = tuple(_DATA["words"])

# word -> category, including the category names
WORDS: dict[str, str] = {word: name for name, synonyms in _DATA["words"].items() for word in (name, *synonyms)}

_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal", "cub")

# Pairs of lemmas that count as one word -> that word.
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
    """Return a pattern that matches every word with an optional plural ending, the longest first."""
    words = "|".join(sorted(map(re.escape, WORDS), key=len, reverse=True))
    return re.compile(rf"\b({words})(?:e?s)?\b", re.IGNORECASE)


@lru_cache(1 << 14)
def category(word: str) -> str | None:
    """Return the category that a word names, singular or plural; None for other words."""
    match = object_words().fullmatch(word)
    return None if match is None else WORDS[match.group(1).lower()]


# Function words, counts, and words about the image itself, which no patch can show.
FUNCTION_WORDS = frozenset(_DATA["function_words"].split())


def wrong_spans(text: str, objects: Sequence[str]) -> list[tuple[int, int]]:
    """Find the words of a text for objects (CHAIR's words, singular or plural) that are not among `objects`."""
    present = {WORDS.get(name, name) for name in objects}
    return [found.span() for found in object_words().finditer(text) if WORDS[found.group(1).lower()] not in present]
