"""Lists of names: CHAIR's objects, or a file with one name and its synonyms per line."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from pathlib import Path

from revisit.errors import RevisitError
from revisit.words import CATEGORIES, PAIRS, WORDS

Categories = tuple[tuple[str, ...], ...]  # of each category: its name, then its synonyms
_IRREGULAR = {"person": ("people", "persons"), "mouse": ("mice",), "goose": ("geese",), "ox": ("oxen",)}


class Names:
    """Names in categories, with their plurals; a category is called by its first name.

    Args:
        categories: The name and the synonyms of each category.
    """

    def __init__(self, categories: Categories) -> None:
        self.categories = {names[0]: names for names in categories}
        self.of: dict[str, str] = {}  # every form, in lower case -> its category
        for category, names in self.categories.items():
            for name in names:
                for form in (name, *plurals(name)):
                    self.of.setdefault(form, category)
        for category, names in self.categories.items():  # a plural never takes a name from another category
            self.of.update(dict.fromkeys(names, category))

    def find(self, text: str) -> list[str]:
        """Return the categories that a text names, in order; of names that overlap, the longest counts."""
        return [self.of[found.group().lower()] for found in self._pattern.finditer(text)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        forms = sorted(map(re.escape, self.of), key=len, reverse=True)
        return re.compile(rf"\b(?:{'|'.join(forms)})\b", re.IGNORECASE)

    @cached_property
    def starts(self) -> frozenset[str]:
        """Every beginning of a form."""
        return frozenset(form[:end] for form in self.of for end in range(1, len(form) + 1))


def plurals(name: str) -> tuple[str, ...]:
    """Return the plurals of an English noun that could be regular, or those of a few irregular ones."""
    if name in _IRREGULAR:
        return _IRREGULAR[name]
    if name.endswith("man"):
        return (f"{name[:-3]}men",)
    if name.endswith("y") and name[-2:-1] not in "aeiou":
        return (f"{name[:-1]}ies",)
    if name.endswith(("s", "x", "z", "ch", "sh", "o")):
        return (f"{name}es", f"{name}s") if name.endswith("o") else (f"{name}es",)
    if name.endswith(("f", "fe")):
        return (f"{name.removesuffix('e')[:-1]}ves", f"{name}s")
    return (f"{name}s",)


@lru_cache(8)
def names_of(categories: Categories) -> Names:
    """Return the list of these categories; without any, CHAIR's objects, with the pairs of words that name one."""
    if categories:
        return Names(categories)
    pairs = [(f"{first} {second}", WORDS.get(merged)) for (first, second), merged in PAIRS.items()]
    of = {category: [category] for category in CATEGORIES}
    for word, category in (*WORDS.items(), *pairs):
        if category is not None and word not in of[category]:
            of[category].append(word)
    return Names(tuple(map(tuple, of.values())))


def read_names(path: Path) -> Categories:
    """Read a list of names: one category per line, its name first and then its synonyms, separated by commas.

    Raises:
        RevisitError: The file has no names, or a name stands in two lines.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RevisitError(f"The list of names {str(path)!r} cannot be read: {error}.") from None
    known: dict[str, int] = {}
    found: list[tuple[str, ...]] = []
    for number, line in enumerate(text.lower().splitlines(), 1):
        names = tuple(dict.fromkeys(name for part in line.split(",") if (name := " ".join(part.split()))))
        for name in names:
            if name in known:
                raise RevisitError(
                    f"{path}: {name!r} stands in lines {known[name]} and {number}, so the two cannot be told apart: remove one."
                )
            if not (name[0].isalnum() and name[-1].isalnum()):
                raise RevisitError(f"{path}, line {number}: {name!r} must begin and end with a letter or a digit.")
            known[name] = number
        found += [names] if names else []
    if not found:
        raise RevisitError(f"{path} has no names: write one name per line, followed by its synonyms after commas.")
    return tuple(found)
