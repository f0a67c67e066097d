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
class SampleImage:
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


_FACTS = json.loads((FOLDER / "samples.json").read_text("utf-8"))
SAMPLES = {  # the sample of `revisit demo` is first
    name: SampleImage(name, facts["place"], tuple(dict.fromkeys(entry["noun"] for entry in facts["objects"])))
    for name, facts in _FACTS.items()
}


def sample(name: str = "demo") -> SampleImage:
    """Return the sample of this name."""
    if name not in SAMPLES:
        raise unknown("sample", name, SAMPLES)
    return SAMPLES[name]
