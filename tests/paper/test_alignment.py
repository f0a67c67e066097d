"""Every object word of a caption is traced to exactly the tokens that wrote it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_files import golden
from revisit.eval.benchmarks import chair
from revisit.explain.tokens import token_spans
from revisit.paper.objects import mentions, word_mentions
from word_tokenizers import train

pytestmark = pytest.mark.usefixtures("nltk_data")


def written(tokenizer: Any, tokens: list[int], first: int, last: int) -> str:
    return tokenizer.decode(tokens[: last + 1])[len(tokenizer.decode(tokens[:first])) :]


def found(tokenizer: Any, caption: str) -> list[tuple[str, str, str, bool]]:
    """Return (word, text, text of its tokens, alone) of each mention."""
    tokens = tokenizer.encode(caption, add_special_tokens=False)
    return [
        (m.word, m.text, written(tokenizer, tokens, m.first, m.last).strip(), m.alone)
        for m in mentions(tokenizer, tokens)
    ]


def test_single_token_words_plurals_and_case(tokenizer: Any) -> None:
    assert found(tokenizer, "There is a dog and two cats on the table.") == [
        ("dog", "dog", "dog", True),
        ("cat", "cats", "cats", True),
        ("table", "table", "table", True),
    ]


def test_repeated_words_have_their_own_tokens(tokenizer: Any) -> None:
    tokens = tokenizer.encode("The dog sits near a dog and a cat near the dog", add_special_tokens=False)
    places = [m.first for m in mentions(tokenizer, tokens) if m.word == "dog"]
    assert len(places) == len(set(places)) == 3
    assert [tokenizer.decode(tokens[i : i + 1]).strip() for i in places] == ["dog"] * 3


def test_words_of_several_tokens_are_covered_whole(tokenizer: Any) -> None:
    tokens = tokenizer.encode("A person near a surfboard and umbrellas", add_special_tokens=False)
    person, board, umbrella = mentions(tokenizer, tokens)
    assert person.alone
    assert (board.word, umbrella.word) == ("surfboard", "umbrella")
    for mention, text in ((board, "surfboard"), (umbrella, "umbrellas")):
        assert mention.last > mention.first
        assert not mention.alone
        assert written(tokenizer, tokens, mention.first, mention.last).strip() == text
    assert board.last < umbrella.first


def test_pairs_become_one_mention(tokenizer: Any) -> None:
    assert found(tokenizer, "a wine glass, two wine  glasses and a cell phone") == [
        ("wine glass", "wine glass", "wine glass", False),
        ("wine glass", "wine  glasses", "wine  glasses", False),
        ("cell phone", "cell phone", "cell phone", False),
    ]
    # "dining table" is a category but no pair: CHAIR sees its table
    assert found(tokenizer, "a dining table") == [("table", "table", "table", True)]
    assert found(tokenizer, "a bow tie") == [("tie", "bow tie", "bow tie", False)]


def test_the_seat_of_a_toilet_is_dropped_and_what_follows_keeps_its_place(tokenizer: Any) -> None:
    caption = "The seat is near the toilet and a dog"
    assert found(tokenizer, caption) == [("toilet", "toilet", "toilet", True), ("dog", "dog", "dog", True)]
    # the official place list is shifted here; the words themselves agree
    assert chair.parse_caption(caption).words == ("toilet", "dog")
    assert found(tokenizer, "a seat near a dog") == [("seat", "seat", "seat", True), ("dog", "dog", "dog", True)]
    assert [m[:2] for m in found(tokenizer, "a toilet seat and a seat")] == [("toilet", "toilet seat")]


def test_quotes_contractions_and_punctuation_do_not_shift_offsets(tokenizer: Any) -> None:
    caption = 'A "dog" is in "the" person\'s table... cannot see, a (cat)-- "cow"!'
    assert [m[:2] for m in found(tokenizer, caption)] == [
        ("dog", "dog"),
        ("person", "person"),
        ("table", "table"),
        ("cat", "cat"),
        ("cow", "cow"),
    ]


def test_characters_that_grow_when_lowered_or_take_several_tokens(tokenizer: Any) -> None:
    caption = "İİ ΑΣ — 狗 🐕 a DOG near a Cat 🐈!"
    tokens = tokenizer.encode(caption, add_special_tokens=False)
    text, spans = token_spans(tokenizer, tokens)
    assert text == caption
    assert "".join(text[a:b] for a, b in spans) == caption
    assert [m.text for m in mentions(tokenizer, tokens)] == ["DOG", "Cat"]


def test_leading_blanks_and_special_tokens(tokenizer: Any) -> None:
    tokens = [*tokenizer.encode("  a dog", add_special_tokens=False), tokenizer.eos_token_id]
    (mention,) = mentions(tokenizer, tokens)
    assert tokenizer.decode(tokens[mention.first : mention.last + 1]).strip() == "dog"
    assert mentions(tokenizer, []) == []
    assert mentions(tokenizer, [tokenizer.eos_token_id]) == []


def test_a_long_caption_is_aligned_throughout(tokenizer: Any) -> None:
    caption = " ".join(["There is a small dog near the zebra, and “two” cats 🐈 sits on a chair."] * 20)
    tokens = tokenizer.encode(caption, add_special_tokens=False)
    seen = mentions(tokenizer, tokens)
    assert [m.text for m in seen] == ["dog", "zebra", "cats", "chair"] * 20
    for mention in seen:
        assert written(tokenizer, tokens, mention.first, mention.last).strip() == mention.text


TEXT = "a dog cats table wine glass toilet seat zebra hot phone cell can't \" İ 狗 , . — person's"
WORD = st.sampled_from(TEXT.split())


@settings(max_examples=60, deadline=None)
@given(st.lists(WORD, min_size=1, max_size=25), st.sampled_from([" ", "  ", "\n"]))
def test_mentions_are_those_of_chair_and_spans_hold_their_words(words: list[str], blank: str) -> None:
    caption = blank.join(words).strip()
    places = word_mentions(caption)
    assert tuple(word for word, _ in places) == chair.parse_caption(caption).words
    assert all(a < b <= c for (_, (a, b)), (_, (c, _)) in itertools.pairwise(places))
    tokenizer = train("bytes")
    tokens = tokenizer.encode(caption, add_special_tokens=False)
    text, spans = token_spans(tokenizer, tokens)
    assert text == caption
    assert "".join(text[a:b] for a, b in spans) == caption
    for mention, (_, (start, end)) in zip(mentions(tokenizer, tokens), places, strict=True):
        assert spans[mention.first][0] <= start < spans[mention.first][1]
        assert spans[mention.last][0] < end <= spans[mention.last][1]


def test_every_caption_of_the_golden_set() -> None:
    """Words and their places agree with CHAIR."""
    texts = [case["caption"] for case in golden("chair")["cases"] if len(case["caption"].split()) > 3]
    assert len(texts) > 50
    for text in texts:
        places = word_mentions(text)
        assert tuple(word for word, _ in places) == chair.parse_caption(text).words
        for word, (a, b) in places:
            # the first letters survive singular forms; "people" and "man" are their own words
            assert text[a:b].lower()[:1] == word[:1] or " " in text[a:b]
