"""Texts about a scene: captions in varied English, and questions with answers.

Captions name every object in reading order. With `assume`, each absent core object of the place is named first with that
probability: careless captions like these bring a language prior into real training data. Held-out references do not use it.
"""

from __future__ import annotations

from dataclasses import dataclass

from revisit.embedded.catalog import BY_NOUN, CATEGORIES, COLORS, Category
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import SIZE, Scene, reading_order

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}


@dataclass(frozen=True)
class _Mention:
    phrase: str  # "a red car", "two dogs"
    definite: str  # "the car", "the dogs"
    plural: bool
    center: tuple[int, int] | None


def caption(scene: Scene, dice: Dice, assume: float = 0.0, plain: bool = False) -> str:
    """Write one to four sentences that name the scene's objects.

    With `plain`, sentences do not refer to objects named before, and several objects of a kind count as one.
    """
    assumed = [BY_NOUN[noun] for noun, _ in scene.place.core if noun not in scene.nouns and dice.chance(assume)]
    mentions = [_Mention(c.phrase, f"the {c.noun}", c.always_plural, None) for c in dice.shuffled(assumed)]
    mentions += [_mention(scene, noun, dice, plain) for noun in reading_order(scene)]
    sentences = [_opening(scene, mentions[: (head := 1 + dice.below(min(3, len(mentions))))], dice)]
    rest = mentions[head:]
    named = mentions[:head]
    while rest:
        take = 1 + dice.below(min(2, len(rest)))
        sentences.append(_further(rest[:take], [] if plain else named, dice))
        named, rest = named + rest[:take], rest[take:]
    return " ".join(sentences)


def _mention(scene: Scene, noun: str, dice: Dice, plain: bool) -> _Mention:
    items, category = scene.of(noun), BY_NOUN[noun]
    color = items[0].color
    shade = f"{color} " if color and dice.chance(0.7) else ""
    if len(items) > 1 and not plain:
        number = "some" if category.mass else dice.pick((NUMBERS[min(len(items), 4)], "several"))
        if len(items) == 2:
            number = "some" if category.mass else "two"
        return _Mention(f"{number} {shade}{category.plural}", f"the {category.plural}", True, None)
    article = "some" if category.mass else "an" if (shade or noun)[0] in "aeiou" else "a"
    return _Mention(
        f"{article} {shade}{noun}", f"the {noun}", category.always_plural, items[0].center if len(items) == 1 else None
    )


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _opening(scene: Scene, mentions: list[_Mention], dice: Dice) -> str:
    listed = _join([m.phrase for m in mentions])
    place = scene.place
    is_are = "are" if mentions[0].plural else "is"
    article = "an" if place.name[0] in "aeiou" else "a"
    return dice.pick(
        (
            f"The image shows {article} {place.name} with {listed}.",
            f"The picture shows {listed} {place.within}.",
            f"There {is_are} {listed} {place.within}.",
            f"This is {article} {place.name} with {listed}.",
            f"In the image we can see {listed} {place.within}.",
        )
    )


def _where(center: tuple[int, int]) -> str | None:
    x, y = center
    if abs(x - SIZE // 2) >= abs(y - SIZE // 2):
        return "on the left" if x < SIZE * 3 // 8 else "on the right" if x > SIZE * 5 // 8 else None
    return "at the top" if y < SIZE * 3 // 8 else "at the bottom" if y > SIZE * 5 // 8 else None


def _further(mentions: list[_Mention], named: list[_Mention], dice: Dice) -> str:
    listed = _join([m.phrase for m in mentions])
    plural = mentions[0].plural or len(mentions) > 1
    first_plural = mentions[0].plural
    options = [
        f"There {'are' if first_plural else 'is'} also {listed}.",
        f"We can also see {listed}.",
        f"{_capital(listed)} can be seen as well.",
    ]
    if named:
        options[1:1] = [
            f"{_capital(listed)} {'are' if plural else 'is'} near {dice.pick(named).definite}.",
            f"Next to {dice.pick(named).definite} there {'are' if first_plural else 'is'} {listed}.",
        ]
    if len(mentions) == 1 and mentions[0].center and (where := _where(mentions[0].center)):
        options += [
            f"{_capital(listed)} {'are' if plural else 'is'} {where} of the image.",
            f"There {'are' if plural else 'is'} {listed} {where}.",
        ]
    return dice.pick(options)


def presence_question(category: Category) -> str:
    """Write the question in POPE's form."""
    if category.mass:
        return f"{'Are' if category.always_plural else 'Is'} there any {category.noun} in the image?"
    return f"Is there {category.phrase} in the image?"


def presence_answer(category: Category, present: bool) -> str:
    """Write the answer to `presence_question`."""
    verb = "are" if category.always_plural else "is"
    if present:
        return f"Yes, there {verb} {category.phrase} in the image."
    return f"No, there {verb} no {category.noun} in the image."


def absent(scene: Scene, dice: Dice) -> Category:
    """Choose a category that is not in the scene; half of the time, one that is typical of the place."""
    likely = [BY_NOUN[n] for n in scene.place.usual if n not in scene.nouns]
    anything = [c for c in CATEGORIES if c.noun not in scene.nouns]
    return dice.pick(likely if likely and dice.chance(0.5) else anything)


def count(scene: Scene, noun: str) -> tuple[str, str]:
    """Write a question about the number of a noun, and its answer in one word."""
    return f"How many {BY_NOUN[noun].plural} are there in the image?", str(len(scene.of(noun)))


def color(scene: Scene, noun: str) -> tuple[str, str] | None:
    """Write a question about the color of a noun, and its answer in one word; None unless it is tinted."""
    shade = scene.of(noun)[0].color
    return (f"What color is the {noun}?", shade) if shade else None


def position(scene: Scene, noun: str) -> tuple[str, str] | None:
    """Write a question about the position of a single object, and its answer; None unless it is clearly to one side."""
    items = scene.of(noun)
    where = _where(items[0].center) if len(items) == 1 else None
    return (f"Where is the {noun} in the image?", where) if where else None


def multiple_choice(scene: Scene, dice: Dice) -> tuple[str, list[str], int]:
    """Write a question with four options: (question, options, index of the right one)."""
    tinted = [n for n in scene.nouns if scene.of(n)[0].color]
    wrong: list[str] = []
    if tinted and dice.chance(0.4):
        noun = dice.pick(tinted)
        question, right = f"What color is the {noun}?", scene.of(noun)[0].color or ""
        wrong = dice.sample([c for c in COLORS if c != right], 3)
    else:
        question, right = "Which of these is in the image?", dice.pick(scene.nouns)
        while len(wrong) < 3:
            noun = absent(scene, dice).noun
            if noun not in wrong:
                wrong.append(noun)
    options = dice.shuffled([right, *wrong])
    return question, options, options.index(right)
