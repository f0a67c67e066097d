"""Scenes: identical everywhere, all objects visible, and splits that follow or contradict the typical contents of places."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from revisit.embedded.build import COCO
from revisit.embedded.catalog import BY_NOUN, CATEGORIES, COLORS, PLACES
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import GRID, SIZE, patches, render, scene
from training.texts import GROUNDS, PATCH_WORDS


def test_dice_are_splitmix64() -> None:
    dice = Dice("x")
    dice._state = 1234567
    assert [dice.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_catalog_is_all_of_coco() -> None:
    assert len(COCO) == 80
    assert all(COCO[c.id] == c.name for c in CATEGORIES)
    assert len(CATEGORIES) >= 50
    assert all(noun in BY_NOUN for place in PLACES for noun in place.usual)
    assert len(PATCH_WORDS) == len(set(PATCH_WORDS)) < 256


def test_images_are_the_same_everywhere() -> None:
    images = [np.asarray(render(scene(split, 7, i))) for split in ("usual", "unusual", "flat") for i in range(5)]
    digest = hashlib.sha256(b"".join(p.tobytes() for p in images)).hexdigest()
    assert digest[:16] == "4eab7ddf3c24daa3"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["usual", "unusual", "flat"]))
def test_every_object_is_the_word_of_some_patch(index: int, split: str) -> None:
    drawn = scene(split, 3, index)
    words, colors = patches(drawn)
    assert len(words) == GRID * GRID
    assert {w for w in words if w in BY_NOUN} == set(drawn.nouns)
    assert set(words) - set(BY_NOUN) <= {drawn.place.top, drawn.place.bottom} <= set(GROUNDS)
    assert {c for c in colors if c} <= {i.color for i in drawn.items if i.color} <= set(COLORS)
    for item in drawn.items:
        x, y, w, h = item.bbox
        assert x >= 0
        assert y >= 0
        assert x + w <= SIZE
        assert y + h <= SIZE


def test_usual_and_unusual_contents() -> None:
    usual = [scene("usual", 5, i) for i in range(300)]
    unusual = [scene("unusual", 5, i) for i in range(300)]
    core = lambda s: {noun for noun, _ in s.place.core}  # noqa: E731
    assert sum(len(core(s) & set(s.nouns)) for s in usual) / 600 > 0.75
    assert not any(core(s) & set(s.nouns) for s in unusual)
    belongs = [noun in s.place.usual for s in unusual for noun in s.nouns]
    assert sum(belongs) / len(belongs) < 0.6
