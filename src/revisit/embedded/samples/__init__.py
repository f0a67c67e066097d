"""Rendered sample pictures, so that the embedded model can be tried without the packages that draw scenes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from revisit.errors import unknown

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Sample:
    """A picture with what it shows."""

    name: str
    place: str
    nouns: tuple[str, ...]  # the different objects, in drawing order

    @property
    def path(self) -> Path:
        """The PNG file."""
        return FOLDER / f"{self.name}.png"

    def image(self) -> Image:
        """The picture, in RGB."""
        from PIL import Image

        with Image.open(self.path) as opened:
            return opened.convert("RGB")


def names() -> list[str]:
    """All samples, that of `revisit demo` first."""
    return list(_facts())


def sample(name: str = "demo") -> Sample:
    """The sample of this name."""
    facts = _facts()
    if name not in facts:
        raise unknown("sample", name, facts)
    nouns = dict.fromkeys(str(entry["noun"]) for entry in facts[name]["objects"])
    return Sample(name, str(facts[name]["place"]), tuple(nouns))


def _facts() -> dict[str, dict]:
    facts: dict[str, dict] = json.loads((FOLDER / "samples.json").read_text("utf-8"))
    return facts
