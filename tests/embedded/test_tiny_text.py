"""Texts about scenes: captions name what is there, answers are right."""

from __future__ import annotations

import re

from revisit.embedded.catalog import BY_NOUN, CATEGORIES
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import Scene, patches, scene
from revisit.embedded.text import caption, multiple_choice, presence_answer, presence_question
from revisit.words import WORDS
from training.texts import listing, questions

SCENES = [scene("usual" if i % 2 else "unusual", 11, i) for i in range(80)]
_FORMS = {form: c.noun for c in CATEGORIES for form in (c.noun, c.plural)}


def named(text: str) -> set[str]:
    """Return the nouns in a text."""
    return {_FORMS[w] for w in re.findall("[a-z]+", text.lower()) if w in _FORMS}


def test_captions_name_all_objects_and_no_others() -> None:
    for drawn in SCENES:
        text = caption(drawn, Dice(drawn.key))
        assert named(text) == set(drawn.nouns)
        assert 1 <= text.count(".") <= 6
        assert text[0].isupper()
        assert text.endswith(".")


def test_objects_are_named_in_reading_order_after_assumed_ones() -> None:
    for drawn in SCENES[:20]:
        words = patches(drawn)[0]
        order = sorted(drawn.nouns, key=words.index)
        text = caption(drawn, Dice(drawn.key), assume=1.0, plain=True)
        nouns = [w for w in re.findall("[a-z]+", text.lower()) if w in BY_NOUN]
        assert [w for w in nouns if w in drawn.nouns] == order
        assert nouns[len(nouns) - len(order) :] == order
        assert {noun for noun, _ in drawn.place.core} <= set(nouns)  # also those that are absent
        listed = listing(drawn, Dice(drawn.key)).answer
        assert [w for w in re.findall("[a-z]+", listed.lower()) if w in BY_NOUN] == order


def test_every_noun_is_a_synonym_of_its_category() -> None:
    assert {c.noun: WORDS.get(c.noun) for c in CATEGORIES} == {c.noun: c.name for c in CATEGORIES}


def test_determiners() -> None:
    assert BY_NOUN["apple"].phrase == "an apple"
    assert BY_NOUN["scissors"].phrase == "some scissors"
    assert presence_question(BY_NOUN["elephant"]) == "Is there an elephant in the image?"
    assert presence_question(BY_NOUN["scissors"]) == "Are there any scissors in the image?"
    assert presence_question(BY_NOUN["broccoli"]) == "Is there any broccoli in the image?"
    assert presence_answer(BY_NOUN["sheep"], True) == "Yes, there is a sheep in the image."
    assert presence_answer(BY_NOUN["skis"], False) == "No, there are no skis in the image."


def _right(drawn: Scene, kind: str, question: str, answer: str) -> bool:
    asked = named(question.split("\n")[0])
    noun = next(iter(asked), "")
    if kind == "presence":
        return answer.lower().startswith("yes") == (noun in drawn.nouns)
    if kind == "count":
        n = len(drawn.of(noun))
        return str(n) == answer or f" {['', 'one', 'two', 'three'][n]} " in answer
    if kind == "color":
        return str(drawn.of(noun)[0].color) in answer
    if kind == "position":
        x, y = drawn.of(noun)[0].center
        return {"left": x < 64, "right": x > 64, "top": y < 64, "bottom": y > 64}[answer.rstrip(".").split()[-1]]
    option = re.findall(r"\(([A-D])\) (\w+)", question)[ord(answer) - 65][1]
    return option == drawn.of(noun)[0].color if noun else option in drawn.nouns


def test_answers_are_right_and_presence_is_balanced() -> None:
    yes = total = 0
    for drawn in SCENES:
        for turn in questions(drawn, Dice(drawn.key), 8):
            assert _right(drawn, turn.kind, turn.question, turn.answer), turn
            if turn.kind == "presence":
                yes, total = yes + turn.answer.lower().startswith("yes"), total + 1
    assert abs(yes / total - 0.5) < 0.1


def test_multiple_choice_has_one_right_option() -> None:
    for drawn in SCENES:
        question, options, right = multiple_choice(drawn, Dice(drawn.key))
        assert len(set(options)) == 4
        if question.startswith("Which"):
            assert [o in drawn.nouns for o in options].index(True) == right
            assert sum(o in drawn.nouns for o in options) == 1
