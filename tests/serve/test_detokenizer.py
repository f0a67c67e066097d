"""Pieces of streamed text add up to the whole answer, cut at the stop text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

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
