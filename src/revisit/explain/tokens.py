"""Tokens as text that can be shown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

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


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token alone, with its leading space if it has one."""
    raw = tokenizer.convert_ids_to_tokens(token)
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if isinstance(raw, str) and raw.startswith("▁") and not text.startswith(" "):
        text = " " + text
    return text or (raw if isinstance(raw, str) else f"#{token}")  # a vocabulary may be padded beyond its tokens


def printable(text: str) -> str:
    """A token without surrounding spaces, and with unprintable characters escaped."""
    bare = text.strip()
    return (bare if bare.isprintable() else repr(bare)[1:-1]) or repr(text)


def decode(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of generated tokens as the runner stores it, apart from blanks at its ends."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=True)
    return text


def token_spans(tokenizer: Tokenizer, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """The decoded text and the characters of it that each token added; the spans follow each other without gaps.

    A token that adds only some bytes of a character has an empty span; the token that completes it has the character.
    """
    text = decode(tokenizer, tokens)
    if not tokens:
        return text, []
    ends = _ends(tokenizer, tokens, text)
    return text, list(zip([0, *ends[:-1]], ends, strict=True))


def _ends(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Ends found by decoding every prefix: as far as it agrees with the whole text, it is final."""
    ends: list[int] = []
    for number in range(1, len(tokens) + 1):
        pairs = zip(decode(tokenizer, tokens[:number]), text, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        ends.append(max(shared, ends[-1] if ends else 0))
    ends[-1] = len(text)
    return ends
