"""What scenes are made of: COCO categories with their nouns and sprites, colors, and places with their habits.

A place's `core` objects are nearly always there and its `common` ones often: this skew is the language prior that the
embedded model learns. Every noun is one word and a CHAIR synonym of its category, so that the lens can read it from a
single token. The entries are in data/catalog.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Category:
    """A COCO category as scenes draw and name it; `sprite` is a Twemoji code point, or `draw:` and a shape of ours."""

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
        """Whether even one takes "are", as scissors do."""
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
    """A kind of place: how it is named and painted, and what is found there."""

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
        """The nouns that belong here, core first."""
        return tuple(noun for noun, _ in self.core) + self.common


def _frozen(value: Any) -> Any:
    """Lists as tuples, however deep."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_DATA: dict[str, Any] = json.loads((Path(__file__).parent / "data/catalog.json").read_text("utf-8"))
CATEGORIES = tuple(Category(**entry) for entry in _DATA["categories"])
BY_NOUN = {category.noun: category for category in CATEGORIES}
# "orange" is left out: CHAIR reads it as the fruit.
COLORS: dict[str, Rgb] = {name: tuple(color) for name, color in _DATA["colors"].items()}
PLACES = tuple(Place(**{name: _frozen(value) for name, value in entry.items()}) for entry in _DATA["places"])
PLACE_BY_NAME = {place.name: place for place in PLACES}
# Graphics of ours, shape by shape in the order in which they are drawn: the pen's method, where, and the color.
SHAPES: dict[str, list[tuple[str, list[int], Rgb]]] = _DATA["shapes"]
