"""Pieces of streamed text add up to the whole answer, cut at the stop text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import vocabularies
from revisit.serve.detokenizer import IncrementalDetokenizer


def decode(tokens: Sequence[int]) -> str:
    """Decode tokens, which are UTF-8 bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def feed(text: str, stops: Sequence[str] = ()) -> tuple[list[str], IncrementalDetokenizer]:
    row = IncrementalDetokenizer(decode, stops)
    pieces = [row.feed(byte) for byte in text.encode()]
    return [*pieces, row.finish()], row


def test_an_unfinished_character_is_held_back() -> None:
    pieces, _ = feed("é!")
    assert pieces == ["", "é", "!", ""]


def test_a_possible_stop_text_is_held_back() -> None:
    pieces, row = feed("a END", ["ENDE"])
    assert pieces == ["a", "", "", "", "", " END"]
    assert not row.stopped


def test_text_ends_before_the_first_stop_text() -> None:
    pieces, row = feed("one. two. three", [" three", ". t"])
    assert "".join(pieces) == "one"
    assert row.stopped


@pytest.mark.parametrize("name", vocabularies.names())
@pytest.mark.parametrize("seed", range(3))
def test_pieces_of_real_tokens_add_up_to_the_decoded_text(name: str, seed: int) -> None:
    tokenizer, dice, sizes = vocabularies.load(name), random.Random(seed), list[int]()
    text = "".join(dice.choice((" a cat", "  two", "\n", " 🦊é", "don't", " .", "naïve ", "日本")) for _ in range(60))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    tokens[9:9] = [tokenizer.convert_tokens_to_ids("</s>")]  # special tokens are skipped

    def decode(tokens: Sequence[int]) -> str:
        sizes.append(len(tokens))
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    row = IncrementalDetokenizer(decode)
    pieces = [*map(row.feed, tokens), row.finish()]
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert max(sizes) < 20  # long answers take linear time
    whole, stop = tokenizer.decode(tokens, skip_special_tokens=True).strip(), text[100:107]
    row = IncrementalDetokenizer(decode, [stop])
    assert "".join([*map(row.feed, tokens), row.finish()]).rstrip() == whole[: whole.index(stop)].rstrip()


@given(st.text(alphabet="ab é", max_size=30), st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_answer(text: str, stops: list[str]) -> None:
    pieces, row = feed(text, stops)
    shown = "".join(pieces)
    whole = text.lstrip()
    seen = next((whole[:i] for i in range(len(whole) + 1) if any(stop in whole[:i] for stop in stops)), None)
    expected = whole.rstrip() if seen is None else seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert shown == row.text
    # Spaces before a stop text may have been held back.
    assert shown.rstrip() == expected.rstrip()
    assert expected.startswith(shown)
