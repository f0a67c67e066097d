"""Select the words of a text to check."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from revisit.errors import Incomplete, RevisitError
from revisit.words import FUNCTION_WORDS, WORDS, category

Words = Literal["objects", "content"] | Annotated[Sequence[str], Field(min_length=1)]
# A run of letters and digits, or an object name of two words, because a hot dog is not a dog.
_NAMES = "|".join(sorted(name for name in WORDS if " " in name))
WORD = re.compile(rf"\b(?:{_NAMES})(?:e?s)?\b|[^\W_]+(?:['’-][^\W_]+)*", re.IGNORECASE)


def word_test(words: Words) -> Callable[[str], bool]:
    """Return the function that selects the words to check."""
    if words == "objects":
        return is_object
    if words == "content":
        return is_content
    listed = {word.strip().lower() for word in words}
    return lambda word: word.lower() in listed


def is_object(word: str) -> bool:
    """Return whether a word is in CHAIR's list, singular or plural."""
    return category(word) is not None


def is_content(word: str) -> bool:
    """Return whether a word consists of letters and is neither a function word nor a count."""
    letters = re.sub(r"['’ -]", "", word)
    return letters.isalpha() and word.lower() not in FUNCTION_WORDS and (len(letters) > 1 or not letters.isascii())


def need_words(text: str) -> str:
    """Return the text; raise Incomplete if it has no words, RevisitError if it is not Unicode."""
    if lone := re.search("[\ud800-\udfff]", text):
        raise RevisitError(f"The text has half of a character at position {lone.start() + 1}; repair the file.")
    if not WORD.search(text):
        raise Incomplete(f"There is no word to check in the text {text[:40]!r}.")
    return text
