"""Tokens as text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from revisit.models.types import Tokenizer

Span = tuple[int, int]  # start and end in characters, end excluded
UNFINISHED = "\ufffd"  # how a decoder shows the first bytes of a character


class TokenTexts:
    """What each token adds to the text; the bytes of an unfinished character are held back until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tokens, self.before = tokenizer, list[int](), ""

    def add(self, token: int) -> str:
        self.tokens.append(token)
        now = self.tokenizer.decode(self.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if now.endswith(UNFINISHED):
            return ""
        before, self.before = self.before, now
        return now[len(before) :] if now.startswith(before) else token_text(self.tokenizer, token)


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text."""
    reader = TokenTexts(tokenizer)
    return [reader.add(token) for token in tokens]


_TEXTS: WeakKeyDictionary[Tokenizer, dict[int, str]] = WeakKeyDictionary()  # decoding is slow
_WORDS: WeakKeyDictionary[Tokenizer, dict[str, list[int]]] = WeakKeyDictionary()


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token alone, with its leading space if it has one."""
    known = _TEXTS.setdefault(tokenizer, {})
    if token not in known:
        raw = tokenizer.convert_ids_to_tokens(token)
        text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if isinstance(raw, str) and raw.startswith("▁") and not text.startswith(" "):
            text = " " + text
        known[token] = text or (raw if isinstance(raw, str) else f"#{token}")  # beyond the tokens, where it is padded
    return known[token]


def printable(text: str) -> str:
    """A token without surrounding spaces, and with unprintable characters escaped."""
    bare = text.strip()
    return (bare if bare.isprintable() else repr(bare)[1:-1]) or repr(text)


def word_tokens(tokenizer: Tokenizer, word: str) -> list[int]:
    """The tokens that write a word inside a sentence, after a space; empty if they cannot be separated from what is before.

    Taken from "a word", because some tokenizers put a space of their own before a text.
    """
    known = _WORDS.setdefault(tokenizer, {})
    if word not in known:
        before = tokenizer.encode("a", add_special_tokens=False)
        whole = tokenizer.encode(f"a {word}", add_special_tokens=False)
        known[word] = whole[len(before) :] if whole[: len(before)] == before else []
    return known[word]


def token_spans(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """The decoded text, without special tokens, and the characters of it that each token added.

    The spans follow each other without gaps. A token that adds only some bytes of a character has an empty span; the token that
    completes it has the character.
    """
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    ends: list[int] = []
    for number in range(1, len(tokens) + 1):  # as far as a decoded prefix agrees with the whole text, it is final
        prefix = tokenizer.decode(list(tokens[:number]), skip_special_tokens=True)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, text, strict=False)))
        ends.append(max(shared, ends[-1] if ends else 0))
    ends[-1:] = [len(text)] if ends else []
    return text, list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []


def writers(spans: Sequence[Span], start: int, end: int) -> list[int]:
    """The numbers of the tokens that wrote these characters."""
    return [number for number, (a, b) in enumerate(spans) if a < end and b > start]
