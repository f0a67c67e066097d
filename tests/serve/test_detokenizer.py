"""Text that is shown token by token must add up to the whole answer, cut at the stop text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from revisit.serve.detokenizer import IncrementalDetokenizer


def decode(tokens: Sequence[int]) -> str:
    """Tokens are UTF-8 bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


def unfold(text: str, stops: Sequence[str] = ()) -> tuple[list[str], IncrementalDetokenizer]:
    row = IncrementalDetokenizer(decode, stops)
    pieces = [row.feed(byte) for byte in text.encode()]
    return [*pieces, row.finish()], row


def test_an_unfinished_character_is_held_back() -> None:
    pieces, _ = unfold("é!")
    assert pieces == ["", "é", "!", ""]


def test_the_beginning_of_a_stop_text_is_held_back_until_it_is_none() -> None:
    pieces, row = unfold("a END", ["ENDE"])
    assert pieces == ["a", "", "", "", "", " END"]
    assert not row.stopped


def test_text_ends_before_the_first_stop_text() -> None:
    pieces, row = unfold("one. two. three", [" three", ". t"])
    assert "".join(pieces) == "one"
    assert row.stopped


@given(st.text(alphabet="ab é", max_size=30), st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3))
def test_pieces_add_up_to_the_answer(text: str, stops: list[str]) -> None:
    pieces, row = unfold(text, stops)
    shown = "".join(pieces)
    whole = text.lstrip()
    seen = next((whole[:i] for i in range(len(whole) + 1) if any(stop in whole[:i] for stop in stops)), None)
    expected = whole.rstrip() if seen is None else seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert shown == row.text
    # Blanks before a stop text may have been waiting for a word that never came.
    assert shown.rstrip() == expected.rstrip()
    assert expected.startswith(shown)
