"""Object words: CHAIR's synonyms that are single tokens, their ranks, and their tokens in a caption.

Tokens and words of a caption are matched by character offsets. Those of tokens come from decoding every prefix of the sequence, those of
CHAIR's words from aligning the output of its word tokenizer with the lower-cased caption.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.eval.benchmarks.chair import lemmas, merge_pairs, names_object
from revisit.eval.statistics import wilson
from revisit.models.tokens import Span, token_spans, tokens_in, word_tokens
from revisit.models.types import Tokenizer
from revisit.words import WORDS


@dataclass(frozen=True)
class ObjectVocabulary:
    """Single-token synonyms and their token ids, in the same order."""

    words: tuple[str, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ObjectVocabulary:
        """Return the words that are one token inside a sentence; raise RevisitError if there are none."""
        found = {}
        for word in sorted(WORDS):
            tokens = word_tokens(tokenizer, word)
            if len(tokens) == 1 and tokenizer.decode(tokens).strip() == word:
                found[word] = int(tokens[0])
        if not found:
            raise RevisitError(
                "None of CHAIR's object words is a single token of this tokenizer, so there is nothing to study."
            )
        return cls(tuple(found), tuple(found.values()))

    def indices(self, truth: Iterable[str]) -> list[int]:
        """Return the indices into `words` of the synonyms of these categories."""
        categories = set(truth)
        return [index for index, word in enumerate(self.words) if WORDS[word] in categories]

    def tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return the token ids.  -> (words,)"""
        return torch.tensor(self.ids, device=device)

    def summary(self) -> dict[str, int]:
        """Return the number of words and of the COCO categories that they name."""
        return {"words": len(self.words), "categories": len({WORDS[word] for word in self.words})}


def without_top(logits: Tensor) -> Tensor:
    """Return the logits with -inf for the likeliest token of each row."""
    return logits.scatter(-1, logits.argmax(-1, keepdim=True), -torch.inf)


def best_rank(logits: Tensor, targets: Tensor) -> Tensor:
    """Count the tokens before the best of `targets`; V if every target has a logit of -inf.

    (rows, V) and ids (n,) -> (rows,) whole numbers.
    """
    best = logits[:, targets].amax(-1, keepdim=True)  # (rows, 1)
    return torch.where(best[:, 0] == -torch.inf, logits.shape[-1], (logits > best).sum(-1))


def recalls(hits: Sequence[int], units: int, ks: Sequence[int]) -> list[dict[str, float]]:
    """Compute at-least-one recall@k with its 95 % Wilson interval, for each k."""
    rows = []
    for k, count in zip(ks, hits, strict=True):
        low, high = wilson(count, units)
        rows.append({"k": k, "hits": count, "units": units, "recall": count / units, "low": low, "high": high})
    return rows


# -- captions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mention:
    """An object word of a caption as CHAIR counts it, and its tokens (`first` to `last`, inclusive)."""

    word: str  # CHAIR's form: singular, pairs as one word
    category: str
    text: str  # as written in the caption
    first: int
    last: int
    alone: bool  # written by a single token, which contains nothing else except blanks


def word_spans(caption: str, words: Sequence[str]) -> list[Span]:
    """Return the span of each token of CHAIR's word tokenizer in its caption; raise ValueError if one is missing."""
    from nltk.tokenize.util import align_tokens

    lowered = caption.lower()
    # maps each character of the lower-cased caption, which may be longer ("İ" becomes two), to its index in the caption
    starts = [index for index, character in enumerate(caption) for _ in character.lower()] + [len(caption)]
    quotes = iter(re.findall("\"|``|''", lowered))  # the word tokenizer replaces quotation marks
    written = [next(quotes, word) if word in ("``", "''") else word for word in words]
    return [(starts[start], starts[end]) for start, end in align_tokens(written, lowered)]


def word_mentions(caption: str) -> list[tuple[str, Span]]:
    """Return CHAIR's object words of a caption, each with its span."""
    tokens, roots = lemmas(caption)
    spans = word_spans(caption, tokens)
    merged, starts = merge_pairs(roots)
    edges = [*starts, len(tokens)]  # merged word i consists of tokens edges[i]..edges[i + 1]
    merged_spans = [(spans[a][0], spans[b - 1][1]) for a, b in itertools.pairwise(edges)]
    return [(word, span) for word, span in zip(merged, merged_spans, strict=True) if names_object(word, merged)]


def mentions(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[Mention]:
    """Return the object words of the caption that these tokens spell, in CHAIR's order."""
    text, spans = token_spans(tokenizer, tokens)
    blank = len(text) - len(text.lstrip())  # CHAIR parses the caption without blanks at its ends
    result = []
    for word, (start, stop) in word_mentions(text.strip()):
        written = text[start + blank : stop + blank]
        indices = tokens_in(spans, start + blank, stop + blank)
        alone = len(indices) == 1 and text[slice(*spans[indices[0]])].strip() == written
        result.append(Mention(word, WORDS[word], written, indices[0], indices[-1], alone))
    return result
