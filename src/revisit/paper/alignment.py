"""Which generated tokens wrote which object word of a caption.

Tokens and words are matched by character offsets: of tokens by decoding every prefix of the sequence, of CHAIR's words by finding the
output of its word tokenizer in the lower-cased caption.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from revisit.errors import RevisitError
from revisit.eval.benchmarks.chair import lemmas, merge_pairs, names_object
from revisit.explain.tokens import Span, token_spans, tokens_in
from revisit.words import WORDS

if TYPE_CHECKING:
    from revisit.models.types import Tokenizer

_QUOTES = {"``": ('"', "``"), "''": ('"', "''")}  # what the word tokenizer writes for a quotation mark


@dataclass(frozen=True)
class Mention:
    """An object word of a caption as CHAIR counts it, and the tokens that wrote it (`first` to `last`, both included)."""

    word: str  # CHAIR's form: singular, pairs as one word
    category: str
    text: str  # as written in the caption
    first: int
    last: int
    alone: bool  # one token wrote all of it, and nothing else but blanks


def word_spans(caption: str, words: Sequence[str]) -> list[Span]:
    """Return the place of each token of CHAIR's word tokenizer in its caption; raise RevisitError if one is not there."""
    lowered = caption.lower()
    # the characters of the caption that those of the lower-cased caption come from: "İ" becomes two
    starts = [place for place, character in enumerate(caption) for _ in character.lower()] + [len(caption)]
    spans: list[Span] = []
    cursor = 0
    for word in words:
        while cursor < len(lowered) and lowered[cursor].isspace():
            cursor += 1
        written = next((form for form in _QUOTES.get(word, (word,)) if lowered.startswith(form, cursor)), None)
        if written is None:
            raise RevisitError(
                f"The word {word!r} was not found at character {cursor} of the caption {caption[:60]!r}; please report this caption."
            )
        spans.append((starts[cursor], starts[cursor + len(written)]))
        cursor += len(written)
    return spans


def word_mentions(caption: str) -> list[tuple[str, Span]]:
    """Return CHAIR's object words of a caption, each with its place."""
    tokens, roots = lemmas(caption)
    spans = word_spans(caption, tokens)
    merged, starts = merge_pairs(roots)
    edges = [*starts, len(tokens)]  # merged word i is made of tokens edges[i]..edges[i + 1]
    places = [(spans[a][0], spans[b - 1][1]) for a, b in itertools.pairwise(edges)]
    return [(word, place) for word, place in zip(merged, places, strict=True) if names_object(word, merged)]


def mentions(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[Mention]:
    """Return the object words of the caption that these tokens spell, each with its own tokens, in CHAIR's order."""
    text, spans = token_spans(tokenizer, tokens)
    blank = len(text) - len(text.lstrip())  # CHAIR reads the caption without blanks at its ends
    found = []
    for word, (start, stop) in word_mentions(text.strip()):
        written = text[start + blank : stop + blank]
        own = tokens_in(spans, start + blank, stop + blank)
        a, b = spans[own[0]][0], spans[own[-1]][1]
        found.append(
            Mention(word, WORDS[word], written, own[0], own[-1], len(own) == 1 and text[a:b].strip() == written)
        )
    return found
