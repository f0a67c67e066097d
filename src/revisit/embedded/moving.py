"""Clips with known events: two objects that move, one after the other.

Each object enters, leaves or crosses, to the left or to the right; one moves in the first half of the clip and the other in the second.
Questions are about presence, direction and order. `--data scenes:moving:NUMBER:SEED` writes a folder of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from revisit.embedded.catalog import BY_NOUN, CATEGORIES, PLACES
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import SIZE, Scene, render, sprite

SPLIT = "moving"
FRAMES, FPS = 16, 4
EVENTS = ("enters", "leaves", "crosses")
SIDES = ("left", "right")
HIGH = 44  # pixels of an object


@dataclass(frozen=True)
class Actor:
    """An object that moves during one half of a clip."""

    noun: str
    event: str
    toward: str  # left or right
    first: bool  # whether it moves in the first half
    y: int

    def x(self, frame: int) -> int:
        """Return the left edge of the object in a frame; it may be outside the picture."""
        half, middle = FRAMES // 2, (SIZE - HIGH) // 2
        moved = min(max((frame - (0 if self.first else half) + 1) / half, 0.0), 1.0)
        start = middle if self.event == "leaves" else -HIGH
        end = middle if self.event == "enters" else SIZE
        x = round(start + (end - start) * moved)
        return x if self.toward == "right" else SIZE - HIGH - x


@dataclass(frozen=True)
class Clip:
    """A place and the two objects that move, in the order of their movements."""

    key: str
    actors: tuple[Actor, Actor]
    background: Scene

    def frames(self) -> list[Image.Image]:
        """Render the frames."""
        frames = [render(self.background) for _ in range(FRAMES)]
        for actor in self.actors:
            drawn = Image.fromarray(sprite(BY_NOUN[actor.noun], HIGH, actor.toward == "right", None)[0])
            for number, frame in enumerate(frames):
                frame.paste(drawn, (actor.x(number), actor.y), drawn)
        return frames

    @property
    def caption(self) -> str:
        """The whole truth about the clip."""
        one, two = (f"a {actor.noun} {actor.event} to the {actor.toward}" for actor in self.actors)
        return f"First {one}, then {two}."

    def questions(self) -> list[tuple[str, str, str]]:
        """Return (kind, question, label); half of each kind are yes."""
        one, two = self.actors
        dice = Dice(f"{self.key}/questions")
        absent = dice.pick([c.noun for c in CATEGORIES if c.noun not in (one.noun, two.noun)])
        asked = [
            ("presence", f"Is there a {dice.pick((one, two)).noun} in the video?", "yes"),
            ("presence", f"Is there a {absent} in the video?", "no"),
            ("order", f"Does the {one.noun} move before the {two.noun}?", "yes"),
            ("order", f"Does the {two.noun} move before the {one.noun}?", "no"),
        ]
        for actor, label in zip(self.actors, dice.sample(("yes", "no"), 2), strict=True):
            side = actor.toward if label == "yes" else SIDES[SIDES.index(actor.toward) - 1]
            asked.append(("direction", f"Does the {actor.noun} move to the {side}?", label))
        return asked


def clip(seed: int, index: int) -> Clip:
    """Sample a clip."""
    key = f"held-out/{SPLIT}/{seed}/{index}"
    dice = Dice(key)
    place = dice.pick(PLACES)
    background = Scene(key, place.name, dice.below(len(place.palettes)), 44 + 4 * dice.below(8), ())
    nouns = [category.noun for category in dice.sample(CATEGORIES, 2)]
    rows = dice.sample((4, SIZE - HIGH - 4), 2)  # one above the other, so that neither hides the other
    first, second = (
        Actor(noun, dice.pick(EVENTS), dice.pick(SIDES), noun == nouns[0], row)
        for noun, row in zip(nouns, rows, strict=True)
    )
    return Clip(key, (first, second), background)


def build(folder: Path, n: int, seed: int) -> None:
    """Write n clips with their questions and captions into a folder."""
    (folder / SPLIT).mkdir(parents=True, exist_ok=True)
    with (folder / SPLIT / "questions.jsonl").open("w") as file:
        for number in range(n):
            made, name = clip(seed, number), f"{number + 1:06d}"
            first, *others = made.frames()
            path = folder / SPLIT / f"{name}.apng"
            first.save(path, "PNG", save_all=True, append_images=others, duration=1000 // FPS, disposal=0, blend=0)
            for place, (kind, question, label) in enumerate(made.questions()):
                row = {"id": f"{name}/{place}", "video": path.name, "kind": kind, "question": question, "label": label}
                print(json.dumps({**row, "caption": made.caption}), file=file)
