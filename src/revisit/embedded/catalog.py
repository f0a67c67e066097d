"""The contents of scenes: COCO categories with nouns and sprites, colors, and places with their typical objects.

A place's `core` objects are nearly always present and its `common` ones often: this skew is the language prior that the
embedded model learns. Every noun is one word and a CHAIR synonym of its category, so that one token can name it. The
entries are in data/catalog.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Category:
    """A COCO category as scenes draw and name it; `sprite` is a Twemoji code point, or `draw:` and the name of a shape."""

    id: int
    name: str
    noun: str
    plural: str
    sprite: str
    large: bool = False
    tintable: bool = False
    mass: bool = False  # named with "some" instead of an article

    @property
    def always_plural(self) -> bool:
        """Whether the noun is always plural, like scissors."""
        return self.mass and self.noun == self.plural and self.noun.endswith("s")

    @property
    def phrase(self) -> str:
        """The noun with its determiner: "a dog", "an apple", "some scissors"."""
        if self.mass:
            return f"some {self.noun}"
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Place:
    """A kind of place: its name, its appearance and its typical objects."""

    name: str
    within: str  # "in a kitchen"
    top: str
    bottom: str
    palettes: tuple[tuple[Rgb, Rgb], ...]  # (top color, bottom color)
    pattern: str  # plain | tiles | stripes | speckle
    core: tuple[tuple[str, float], ...]
    common: tuple[str, ...]

    @property
    def usual(self) -> tuple[str, ...]:
        """The typical nouns, core first."""
        return tuple(noun for noun, _ in self.core) + self.common


def _frozen(value: Any) -> Any:
    """Convert nested lists to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data/catalog.json").read_text("utf-8"))
CATEGORIES = tuple(Category(**entry) for entry in _DATA["categories"])
BY_NOUN = {category.noun: category for category in CATEGORIES}
# without "orange", which CHAIR counts as the fruit
COLORS: dict[str, Rgb] = {name: tuple(color) for name, color in _DATA["colors"].items()}
PLACES = tuple(Place(**{name: _frozen(value) for name, value in entry.items()}) for entry in _DATA["places"])
PLACE_BY_NAME = {place.name: place for place in PLACES}
# Our graphics as shapes in drawing order: a method of ImageDraw, its coordinates and its color.
SHAPES: dict[str, list[tuple[str, list[int], Rgb]]] = _DATA["shapes"]
