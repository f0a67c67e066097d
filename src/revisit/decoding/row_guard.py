"""Withhold names from one row: those below the floor, and those that the answer has just named.

Kept from a wrong name, a model easily writes a right one again. So a category that was named within the last tokens is withheld too,
except once after a word such as "the".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.models.spelling import Place, spelling_of
from revisit.models.thoughts import Thoughts, find_thoughts

if TYPE_CHECKING:
    from revisit.decoding.method import Method
    from revisit.models.spelling import Spelling
    from revisit.models.types import Tokenizer

WINDOW = 48  # tokens in which a category that was named counts as just named
AGAIN = 2  # mentions in the window that are allowed if the second one is definite
_DEFINITE = re.compile(r"\b(?:the|this|that|these|those|his|her|its|their)\s*$")


@dataclass(frozen=True)
class Followed:
    """An answer up to some token: where it ends, and which categories it named, before which of its tokens."""

    tokens: tuple[int, ...] = ()
    place: Place = field(default_factory=Place)
    named: tuple[tuple[str, int], ...] = ()
    dead_ends: tuple[tuple[str, int], ...] = ()  # the beginnings of withheld names that were left, and the next token


class RowGuard:
    """Withhold names from one row.

    Args:
        spelling: The names and their spellings.
        support: The support of each category.
        floor: Categories with less support are withheld, and those that the answer has just named.
    """

    def __init__(self, spelling: Spelling, support: dict[str, float], floor: float) -> None:
        self.spelling, self.support, self.floor = spelling, support, floor
        self.below = frozenset(category for category, value in support.items() if value < floor)
        self._last = Followed()
        self._dead_ends: frozenset[str] = frozenset()  # first words of withheld names that may not be written again

    def withheld(self, followed: Followed) -> frozenset[str]:
        """Return the categories that may not be named next."""
        recent = [category for category, at in followed.named if len(followed.tokens) - at < WINDOW]
        if not recent:
            return self.below
        text = "".join(self.spelling.texts[token] for token in followed.tokens[-6:])
        definite = _DEFINITE.search(text.removesuffix(followed.place.start))
        return self.below.union(name for name in recent if not definite or recent.count(name) >= AGAIN)

    def follow(self, tokens: Sequence[int]) -> Followed:
        """Follow an answer, from where it was followed at the last call if it begins with that."""
        now, known = self._last, len(self._last.tokens)
        if tuple(tokens[:known]) != now.tokens:
            now, known = Followed(), 0
        for token in tokens[known:]:
            withheld = self.withheld(now)
            place, named = self.spelling.place(replace(now.place, open=False), token)
            if place.ended in withheld and not self.spelling.longer(now.place.start, token) <= withheld:
                place = replace(place, open=True)
            at, dead_ends = len(now.tokens), now.dead_ends
            if self.spelling.leaves(now.place, token, place) and self._is_dead(now.place.start, withheld):
                dead_ends = (*dead_ends, (now.place.start, at))
            entries = tuple((category, at) for category in named)
            now = Followed((*now.tokens, token), place, now.named + entries, dead_ends)
        self._last = now
        return now

    def blocked(self, tokens: Sequence[int]) -> Tensor:
        """Return the tokens that may not follow this answer.  -> (n,)"""
        followed = self.follow(tokens)
        withheld = self.withheld(followed)
        recent = {start for start, at in followed.dead_ends if len(tokens) - at < WINDOW}
        starts = {*recent, followed.place.start}
        self._dead_ends = frozenset(start for start in starts if self._is_dead(start, withheld))
        return self.spelling.blocked(followed.place, withheld, self._dead_ends)

    def allows(self, tokens: Sequence[int]) -> bool:
        """Return whether an answer has no token that is blocked."""
        return all(token not in self.blocked(tokens[:end]).tolist() for end, token in enumerate(tokens))

    def _is_dead(self, words: str, withheld: frozenset[str]) -> bool:
        """Return whether these words only begin names that are withheld."""
        begun = self.spelling.begun(words)
        return bool(begun) and begun <= withheld

    def categories(self, tokens: Sequence[int]) -> set[str]:
        """Return the categories because of which these tokens were blocked after the answer of the last call."""
        place = self._last.place
        found = self.spelling.completing(place.start, place.fresh)
        names = {found[token] for token in tokens if token in found}
        if any(token not in found for token in tokens):
            names |= {place.ended or ""} if place.open else set().union(*map(self.spelling.begun, self._dead_ends))
        return names

    def lowest_floor(self, tokens: Sequence[int]) -> float:
        """Return the largest floor that would not have blocked all of these tokens; 0 if every one would have."""
        start = self._last.place.start
        names = self.categories(tokens).union(*(self.spelling.longer(start, token) for token in tokens))
        return max((value for name in names if (value := self.support.get(name, 0.0)) < self.floor), default=0.0)


class AnswerGuard:
    """Withhold names from the answer to one prompt at a time, but not from its thoughts, in an engine without rows.

    Args:
        tokenizer: The model's tokenizer.
        model_type: The model's type, which tells how its thoughts begin and end; None for any.
        method: The method, with its floor and its names.
    """

    def __init__(self, tokenizer: Tokenizer, model_type: str | None, method: Method) -> None:
        self.spelling, self._floor = spelling_of(tokenizer, method.names), method.floor
        self._thoughts = find_thoughts(tokenizer, model_type)
        self.support: dict[str, float] = {}  # of each category, in the last prompt

    def begin(self, prompt: Sequence[int], support: dict[str, float]) -> None:
        """Start a prompt, whose image gives this support."""
        self.support = support
        self._row = RowGuard(self.spelling, support, self._floor)
        self._opened = self._thoughts is not None and self._thoughts.open_at_end(prompt)

    def blocked(self, written: Sequence[int]) -> Tensor:
        """Return the tokens that may not follow what was written.  -> (n,)"""
        answer = answer_of(self._thoughts, written, self._opened)
        return torch.empty(0, dtype=torch.long) if answer is None else self._row.blocked(answer)


def answer_of(thoughts: Thoughts | None, tokens: Sequence[int], opened: bool) -> Sequence[int] | None:
    """Return the tokens of an answer without its thoughts; None within a thought, which may have been opened by the prompt."""
    if thoughts is None:
        return tokens
    split = thoughts.split(tokens, opened)
    return None if split.unclosed else split.answer
