"""Object vocabulary, ranks, the intervals that the paper prints, and the tokens of the object words of a caption."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import families
import vocabularies
from golden_files import golden
from revisit import RevisitError
from revisit.eval.benchmarks import chair
from revisit.models.tokens import token_spans
from revisit.paper import published
from revisit.paper.objects import ObjectVocabulary, best_rank, mentions, recalls, without_top, word_mentions
from revisit.words import WORDS
from word_tokenizers import train

pytestmark = pytest.mark.usefixtures("nltk_data")


@pytest.fixture(scope="session", params=["bytes", "metaspace"])
def tokenizer(request: Any) -> Any:
    return train(request.param)


def test_single_token_words(tokenizer: Any) -> None:
    vocabulary = ObjectVocabulary.of(tokenizer)
    assert {"dog", "cat", "table", "chair", "toilet", "seat", "person", "phone", "bench", "tie"} <= set(
        vocabulary.words
    )
    assert "zebra" not in vocabulary.words
    assert "wine glass" not in vocabulary.words
    for word, token in zip(vocabulary.words, vocabulary.ids, strict=True):
        assert tokenizer.decode([token]).strip() == word
        # the token is what the word becomes inside a sentence
        assert token in tokenizer.encode(f"the {word} sits", add_special_tokens=False)
    assert vocabulary.summary()["categories"] == len({WORDS[word] for word in vocabulary.words})
    shown = {vocabulary.words[i] for i in vocabulary.indices(["chair", "dog", "zebra"])}
    assert shown == {"chair", "seat", "dog"}
    with pytest.raises(RevisitError, match="single token"):
        ObjectVocabulary.of(families.tokenizer())


def test_ranks_by_hand() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 5.0, 4.0, 3.0, 2.0]])
    # targets 2 and 4: behind two tokens; behind one token
    assert best_rank(logits, torch.tensor([2, 4])).tolist() == [2, 1]
    assert best_rank(without_top(logits), torch.tensor([2, 4])).tolist() == [1, 0]
    # the likeliest token is no candidate, even if it is a target
    assert best_rank(logits, torch.tensor([1])).tolist() == [1, 0]
    assert best_rank(without_top(logits), torch.tensor([1])).tolist() == [0, 5]
    assert best_rank(without_top(logits), torch.tensor([1, 0])).tolist() == [0, 3]


def test_wilson_intervals_of_the_papers_tables() -> None:
    projection, steps = published.table("projection"), published.table("hallucinated_steps")
    for printed in (entry[kind] for entry in projection["recall"] for kind in ("full", "objects")):
        (row,) = recalls([round(printed[0] / 100 * projection["tokens"])], projection["tokens"], [1])
        assert [round(100 * row[key], 2) for key in ("recall", "low", "high")] == printed
    for printed, count in zip(steps["recall"], (120, 140, 182), strict=True):
        (row,) = recalls([count], steps["n"], [50])
        assert round(100 * row["recall"], 1) == printed["recall"]
        # up to 0.3 points wider than Wilson's; no common interval gives them
        assert [100 * row[key] for key in ("low", "high")] == pytest.approx([printed["low"], printed["high"]], abs=0.32)


# -- the tokens of a word -------------------------------------------------------------------------------------------


def written(tokenizer: Any, tokens: list[int], first: int, last: int) -> str:
    return tokenizer.decode(tokens[: last + 1])[len(tokenizer.decode(tokens[:first])) :].strip()


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("There is a dog and two cats on the table.", [("dog", "dog"), ("cat", "cats"), ("table", "table")]),
        ("The dog sits near a dog and a cat near the dog", [("dog", "dog")] * 2 + [("cat", "cat"), ("dog", "dog")]),
        ("A person near a surfboard", [("person", "person"), ("surfboard", "surfboard*")]),
        # pairs become one mention; "dining table" is a category but no pair
        ("a wine glass, two wine  glasses", [("wine glass", "wine glass*"), ("wine glass", "wine  glasses*")]),
        ("a dining table", [("table", "table")]),
        ("a bow tie", [("tie", "bow tie*")]),
        # the seat of a toilet is dropped, and what follows keeps its place
        ("The seat is near the toilet and a dog", [("toilet", "toilet"), ("dog", "dog")]),
        ("a seat near a dog", [("seat", "seat"), ("dog", "dog")]),
        ("a toilet seat and a seat", [("toilet", "toilet seat*")]),
        # quotes, contractions, and characters that grow when lowered or take several tokens do not shift offsets
        ('A "dog" is in "the" person\'s table... cannot see', [(w, w) for w in ("dog", "person", "table")]),
        ('a (cat)-- "cow"!', [("cat", "cat"), ("cow", "cow")]),
        ("İİ ΑΣ — 狗 🐕 a DOG near a Cat 🐈!", [("dog", "DOG"), ("cat", "Cat")]),
        ("  a dog", [("dog", "dog")]),
        ("", []),
    ],
)
def test_words_are_traced_to_their_tokens(tokenizer: Any, caption: str, expected: list[tuple[str, str]]) -> None:
    """A star marks words that are not written by one token alone."""
    tokens = [*tokenizer.encode(caption, add_special_tokens=False), tokenizer.eos_token_id]
    found = mentions(tokenizer, tokens)
    assert [(m.word, m.text) for m in found] == [(word, text.rstrip("*")) for word, text in expected]
    for mention, (_, text) in zip(found, expected, strict=True):
        assert mention.text in written(tokenizer, tokens, mention.first, mention.last)
        if text.isalpha() and caption.isascii() and '"' not in caption:
            assert mention.alone
        if text.endswith("*"):
            assert not mention.alone
    assert all(a.last < b.first for a, b in itertools.pairwise(found))


TEXT = "a dog cats table wine glass toilet seat zebra hot phone cell can't \" İ 狗 , . — person's"


@pytest.mark.parametrize("vocabulary", vocabularies.names())
@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(TEXT.split()), min_size=1, max_size=25), st.sampled_from([" ", "  ", "\n"]))
def test_mentions_are_those_of_chair_and_spans_hold_their_words(vocabulary: str, words: list[str], blank: str) -> None:
    caption = blank.join(words).strip()
    places = word_mentions(caption)
    assert tuple(word for word, _ in places) == chair.parse_caption(caption).words
    assert all(a < b <= c for (_, (a, b)), (_, (c, _)) in itertools.pairwise(places))
    tokenizer = vocabularies.load(vocabulary)
    tokens = tokenizer.encode(caption, add_special_tokens=False)
    text, spans = token_spans(tokenizer, tokens)
    assert text == caption
    assert "".join(text[a:b] for a, b in spans) == caption
    for mention, (_, (start, end)) in zip(mentions(tokenizer, tokens), places, strict=True):
        assert spans[mention.first][0] <= start < spans[mention.first][1]
        assert spans[mention.last][0] < end <= spans[mention.last][1]


def test_every_caption_of_the_golden_set() -> None:
    texts = [case["caption"] for case in golden("chair")["cases"] if len(case["caption"].split()) > 3]
    assert len(texts) > 50
    for text in texts:
        found = word_mentions(text)
        assert tuple(word for word, _ in found) == chair.parse_caption(text).words
        for word, (a, b) in found:  # singular forms keep the first letter
            assert text[a:b].lower()[:1] == word[:1] or " " in text[a:b]
