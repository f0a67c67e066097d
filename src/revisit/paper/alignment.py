"""Which generated tokens wrote which object word of a caption.

Tokens and words are matched by character offsets. Those of the tokens come from decoding every prefix of the sequence, those of
CHAIR's words from finding its word tokenizer's output in the lower-cased caption. A caption that does not match raises RevisitError.
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
    """An object word of a caption as CHAIR counts it, and the tokens that wrote it.

    `text` is the word as written in the caption; `word` is CHAIR's form of it (singular, pairs as one word). `first` and
    `last` are indices into the generated tokens, both included.
    """

    word: str
    category: str
    text: str
    span: Span
    first: int
    last: int
    alone: bool  # one token wrote all of it, and nothing else but blanks

    def hallucinated(self, truth: Sequence[str] | frozenset[str]) -> bool:
        """Whether the category is not among those in the image."""
        return self.category not in truth


def word_spans(caption: str, words: Sequence[str]) -> list[Span]:
    """Return the place of each token of CHAIR's word tokenizer in its caption (which it lower-cased)."""
    lowered = caption.lower()
    starts = _lowered_starts(caption)
    spans: list[Span] = []
    cursor = 0
    for word in words:
        while cursor < len(lowered) and lowered[cursor].isspace():
            cursor += 1
        written = next((form for form in _QUOTES.get(word, (word,)) if lowered.startswith(form, cursor)), None)
        if written is None:
            raise RevisitError(
                f"The word {word!r} of a caption is not at character {cursor} of "
                f"{caption[:60]!r}, so its tokens are not known; please report this caption."
            )
        spans.append((starts[cursor], starts[cursor + len(written)]))
        cursor += len(written)
    return spans


def _lowered_starts(caption: str) -> list[int]:
    """Return for each position of the lower-cased caption the position of the caption it comes from, and the end."""
    starts: list[int] = []
    for place, character in enumerate(caption):
        starts += [place] * len(character.lower())
    return [*starts, len(caption)]


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
    blank = len(text) - len(text.lstrip())  # CHAIR sees the caption without blanks at its ends
    found = []
    for word, (start, stop) in word_mentions(text.strip()):
        place = (start + blank, stop + blank)
        own = tokens_in(spans, *place)
        a, b = spans[own[0]][0], spans[own[-1]][1]
        alone = len(own) == 1 and text[a:b].strip() == text[slice(*place)]
        found.append(Mention(word, WORDS[word], text[slice(*place)], place, own[0], own[-1], alone))
    return found
