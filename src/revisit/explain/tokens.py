"""Tokens as text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from revisit.models.types import Tokenizer


class TokenTexts:
    """What each token adds to the text; the bytes of an unfinished character are held back until it is complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tokens, self.before = tokenizer, list[int](), ""

    def add(self, token: int) -> str:
        self.tokens.append(token)
        now = self.tokenizer.decode(self.tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if now.endswith("\ufffd"):
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
