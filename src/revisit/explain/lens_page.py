"""The lens as one self-contained HTML file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.explain.page import images_payload
from revisit.pages.document import script_page, write_page

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.explain.lens import Lens, Reading


def write(path: str | Path, lens: Lens) -> Path:
    """Write the page of a lens; returns its path."""
    return write_page(path, render(lens))


def render(lens: Lens) -> str:
    """The page of a lens as one string of HTML."""
    return script_page(
        "What the vision tokens say",
        payload(lens),
        styles=["viewer.css", "lens.css"],
        scripts=["viewer.js", "lens.js"],
        start="window.lens = new LensView(main, data);",
        meta=f"{lens.model} · click a patch, or use the arrow keys; [ and ] change the layer; o shows the picture alone",
    )


def payload(lens: Lens) -> dict[str, Any]:
    """Everything the page shows."""
    return {
        **images_payload(lens.images, lens.layout),
        "model": lens.model,
        "layers": list(lens.layers),
        "depth": max(lens.layers),
        "tokens": lens.layout.tokens,
        "notes": lens.notes,
        "readings": [_reading(reading) for reading in lens.readings],
    }


def _reading(reading: Reading) -> dict[str, Any]:
    """Numbers of entries as int32, probabilities as float32, maps as one byte each; all in base64."""
    maps = reading.maps
    return {
        "name": reading.name,
        "entries": reading.entries,
        "k": reading.top.shape[-1],
        "top": _base64(reading.top.int()),
        "chance": _base64(reading.chance.float()),
        "words": reading.words,
        "maps": None if maps is None else _base64((maps * 255).round().byte()),
    }


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
