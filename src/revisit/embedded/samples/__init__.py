"""Rendered sample images, for trying the embedded model without the packages that render scenes."""

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
    """An image with its place and objects."""

    name: str
    place: str
    nouns: tuple[str, ...]  # the different objects, in drawing order

    @property
    def path(self) -> Path:
        """The PNG file."""
        return FOLDER / f"{self.name}.png"

    def image(self) -> Image:
        """Open the image in RGB."""
        from PIL import Image

        with Image.open(self.path) as opened:
            return opened.convert("RGB")


def names() -> list[str]:
    """List the samples, that of `revisit demo` first."""
    return list(_facts())


def sample(name: str = "demo") -> Sample:
    """Return the sample of this name."""
    facts = _facts()
    if name not in facts:
        raise unknown("sample", name, facts)
    nouns = dict.fromkeys(str(entry["noun"]) for entry in facts[name]["objects"])
    return Sample(name, str(facts[name]["place"]), tuple(nouns))


def _facts() -> dict[str, dict]:
    facts: dict[str, dict] = json.loads((FOLDER / "samples.json").read_text("utf-8"))
    return facts
