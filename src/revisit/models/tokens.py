"""Convert tokens to readable text, and map characters to tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from revisit.models.types import Tokenizer

Span = tuple[int, int]  # start and end in characters, end excluded


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds; the last token of a character that has several adds all of it."""
    text, spans = token_spans(tokenizer, tokens, skip_special=False)
    return [text[start:end] for start, end in spans]


_TEXTS: WeakKeyDictionary[Tokenizer, dict[int, str]] = WeakKeyDictionary()  # at most one entry per token


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token, with its leading space if it has one."""
    known = _TEXTS.setdefault(tokenizer, {})
    if token not in known:
        raw = tokenizer.convert_ids_to_tokens(token)
        text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if isinstance(raw, str) and raw.startswith("▁") and not text.startswith(" "):
            text = " " + text
        known[token] = text or (raw if isinstance(raw, str) else f"#{token}")  # padded vocabularies have unused ids
    return known[token]


def vocabulary_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the text of every token, with its leading space if it has one; empty for special tokens."""
    special = set(tokenizer.all_special_ids)
    return ["" if token in special else token_text(tokenizer, token) for token in range(len(tokenizer))]


def printable(text: str) -> str:
    """Strip a token and escape its unprintable characters."""
    bare = text.strip()
    return (bare if bare.isprintable() else repr(bare)[1:-1]) or repr(text)


def word_tokens(tokenizer: Tokenizer, word: str) -> list[int]:
    """Return the tokens of a word after a space; empty if they cannot be separated from those of the text before.

    They are taken from "a word", because some tokenizers add a space before a text.
    """
    before = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode(f"a {word}", add_special_tokens=False)
    return whole[len(before) :] if whole[: len(before)] == before else []


def token_spans(tokenizer: Tokenizer, tokens: Sequence[int], *, skip_special: bool = True) -> tuple[str, list[Span]]:
    """Return the decoded text and the characters that each token added.

    The spans have no gaps. A token that adds only some bytes of a character has an empty span; the token that completes the
    character covers it.
    """
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
    ends: list[int] = []
    for number in range(1, len(tokens) + 1):  # a decoded prefix is final up to where it differs from the whole text
        prefix = tokenizer.decode(list(tokens[:number]), skip_special_tokens=skip_special)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, text, strict=False)))
        ends.append(max(shared, ends[-1] if ends else 0))
    ends[-1:] = [len(text)] if ends else []
    return text, list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def tokens_in(spans: Sequence[Span], start: int, end: int) -> list[int]:
    """Return the positions of the tokens that cover these characters; spans are in the order of the text."""
    first = bisect_right(spans, start, key=lambda span: span[1])
    return list(takewhile(lambda n: spans[n][0] < end, range(first, len(spans))))
