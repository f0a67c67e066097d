"""The object vocabulary: CHAIR's synonyms that are one token, and those of them that are in an image."""

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


def word_token(tokenizer: Tokenizer, word: str) -> int | None:
    """Return the token for `word` inside a sentence, after a space; None if it takes more than one."""
    tokens = word_tokens(tokenizer, word)
    return int(tokens[0]) if len(tokens) == 1 and tokenizer.decode(tokens).strip() == word else None


@dataclass(frozen=True)
class ObjectVocabulary:
    """Single-token synonyms and their token ids, in one order."""

    words: tuple[str, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ObjectVocabulary:
        """Return the single-token synonyms of a tokenizer; raise RevisitError if it has none."""
        found = {word: token for word in sorted(WORDS) if (token := word_token(tokenizer, word)) is not None}
        if not found:
            raise RevisitError(
                "None of CHAIR's object words is a single token of this tokenizer, so there is nothing to study."
            )
        return cls(tuple(found), tuple(found.values()))

    def __contains__(self, word: object) -> bool:
        return word in self.words

    def places(self, truth: Iterable[str]) -> list[int]:
        """Return the indices into `words` of the synonyms of these categories."""
        wanted = set(truth)
        return [place for place, word in enumerate(self.words) if WORDS[word] in wanted]

    def mask(self, truth: Iterable[str]) -> Tensor:
        """Return a mask of the synonyms of these categories.  -> (words,)"""
        inside = torch.zeros(len(self.words), dtype=torch.bool)
        inside[self.places(truth)] = True
        return inside

    def tensor(self, device: torch.device | str | None = None) -> Tensor:
        """Return the token ids.  -> (words,)"""
        return torch.tensor(self.ids, device=device)

    def summary(self) -> dict[str, int]:
        """Return the number of words and of the COCO categories that they name, as the studies report it."""
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
