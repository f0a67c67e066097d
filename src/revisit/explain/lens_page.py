"""Render a lens as one self-contained HTML file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.explain.document import images_payload, notebook_frame, script_page, write_page

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.explain.lens import Lens, Reading


def write(path: str | Path, lens: Lens) -> Path:
    """Write the page of a lens; return its path."""
    return write_page(path, render(lens))


def render(lens: Lens) -> str:
    """Render the page of a lens."""
    return script_page(
        "What the vision tokens predict",
        payload(lens),
        styles=["viewer.css", "lens.css"],
        scripts=["viewer.js", "lens.js"],
        start="window.lens = new LensView(main, data);",
        meta=f"{lens.model} · click a patch, or use the arrow keys; [ and ] change the layer; o shows the image alone",
    )


def framed(lens: Lens) -> str:
    """Render the page inside a frame for notebooks."""
    return notebook_frame(render(lens), "The lens, layer by layer")


def payload(lens: Lens) -> dict[str, Any]:
    """Return the page's data."""
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
    """Encode numbers of entries as int32, probabilities as float32, and maps as one byte each, in base64."""
    maps = reading.maps
    return {
        "name": reading.name,
        "entries": reading.entries,
        "k": reading.top.shape[-1],
        "top": _base64(reading.top.int()),
        "chance": _base64(reading.probabilities.float()),
        "words": reading.words,
        "maps": None if maps is None else _base64((maps * 255).round().byte()),
    }


def _base64(values: Tensor) -> str:
    return base64.b64encode(values.contiguous().numpy().tobytes()).decode()
