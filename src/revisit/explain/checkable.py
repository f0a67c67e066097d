"""Select the words of a text to check."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from revisit.errors import Incomplete, RevisitError
from revisit.words import FUNCTION_WORDS, WORDS, object_words

Words = str | Sequence[str]  # "objects", "content", or a list
# A run of letters and digits, or an object name of two words, because a hot dog is not a dog.
_NAMES = "|".join(sorted(name for name in WORDS if " " in name))
WORD = re.compile(rf"\b(?:{_NAMES})(?:e?s)?\b|[^\W_]+(?:['’-][^\W_]+)*", re.IGNORECASE)


def word_test(words: Words) -> Callable[[str], bool]:
    """Return the function that selects the words to check."""
    if words == "objects":
        return is_object
    if words == "content":
        return is_content
    if isinstance(words, str) or not isinstance(words, Iterable) or not all(isinstance(word, str) for word in words):
        raise RevisitError(f"words must be 'objects', 'content' or a list of words, not {words!r}.")
    listed = {word.strip().lower() for word in words}
    if not listed - {""}:
        raise RevisitError("The list of words to check is empty.")
    return lambda word: word.lower() in listed


@lru_cache(1 << 14)
def is_object(word: str) -> bool:
    """Return whether a word is in CHAIR's list, singular or plural."""
    return object_words().fullmatch(word) is not None


def is_content(word: str) -> bool:
    """Return whether a word consists of letters and is neither a function word nor a count."""
    letters = re.sub(r"['’ -]", "", word)
    return letters.isalpha() and word.lower() not in FUNCTION_WORDS and (len(letters) > 1 or not letters.isascii())


def need_words(text: object) -> None:
    """Raise RevisitError if a text has no words."""
    if not isinstance(text, str):
        raise RevisitError(f"The text to check must be a string, not {type(text).__name__}.")
    if not WORD.search(text):
        raise Incomplete(f"There is no word to check in the text {text[:40]!r}.")


def check_options(prompt: str | None, threshold: float | None, words: Words) -> None:
    """Raise RevisitError for options that are invalid for every model."""
    if prompt is not None and not prompt.strip():
        raise RevisitError(f"The prompt must be the question that the text answers, not {prompt!r}.")
    if threshold is not None and not 0 <= threshold <= 1:
        raise RevisitError(f"The threshold must be a support from 0 to 1, not {threshold!r}.")
    word_test(words)
