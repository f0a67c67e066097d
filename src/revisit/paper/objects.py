"""The object vocabulary: CHAIR's synonyms that are single tokens, and the ranks of those in an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.eval.statistics import wilson
from revisit.explain.tokens import word_tokens
from revisit.models.types import Tokenizer
from revisit.words import WORDS


@dataclass(frozen=True)
class ObjectVocabulary:
    """Single-token synonyms and their token ids, in one order."""

    words: tuple[str, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ObjectVocabulary:
        """Return the words that a tokenizer writes as one token inside a sentence; raise RevisitError if there are none."""
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

    def places(self, truth: Iterable[str]) -> list[int]:
        """Return the indices into `words` of the synonyms of these categories."""
        categories = set(truth)
        return [place for place, word in enumerate(self.words) if WORDS[word] in categories]

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
    if not len(targets):
        return torch.full((len(logits),), logits.shape[-1], device=logits.device)
    best = logits[:, targets].amax(-1, keepdim=True)  # (rows, 1)
    return torch.where(best[:, 0] == -torch.inf, logits.shape[-1], (logits > best).sum(-1))


def recalls(hits: Sequence[int], units: int, ks: Sequence[int]) -> list[dict[str, float]]:
    """Compute at-least-one recall@k with its 95 % Wilson interval, for each k."""
    rows = []
    for k, count in zip(ks, hits, strict=True):
        low, high = wilson(count, units)
        rows.append({"k": k, "hits": count, "units": units, "recall": count / units, "low": low, "high": high})
    return rows
