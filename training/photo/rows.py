"""Training sequences: one photo, then several questions that do not attend to each other.

A row contains the photo's vision tokens once. Each question with its answer is a branch: it attends to the photo and to itself, and
its positions continue where the photo ends, as if it were alone. So the photo, half of the tokens, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from revisit.models.photo import IMAGE
from revisit.words import CATEGORIES, WORDS
from training.texts import Turn

UNTRAINED = -1  # label of a position that is not trained
PADDING = -1  # branch of the padding on the right
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"
VERDICT, NOUN = 3.0, 2.0  # weights of an answer's yes or no, and of a caption's object


@dataclass
class Row:
    """One photo as tokens; the lists have one entry for each token."""

    ids: list[int]
    positions: list[int]
    branches: list[int]  # 0: the photo, to which all attend
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    named: list[tuple[int, list[int]]] = field(default_factory=list)  # (position of a noun, nouns named before it)


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to one length."""

    ids: Tensor  # (rows, length)
    positions: Tensor  # (rows, length)
    visible: Tensor  # (rows, length, length): whether the first position attends to the second
    labels: Tensor  # (rows, length)
    weights: Tensor  # (rows, length)
    named: tuple[tuple[int, int, list[int]], ...]  # (row, position of a noun, nouns named before it)


class Writer:
    """Writer of questions and answers about photos in SmolLM2's chat format."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, slots: int) -> None:
        self._tokenizer, self.slots = tokenizer, slots
        self.encode = lru_cache(maxsize=50_000)(self._encode)
        self.pad = tokenizer.pad_token_id
        image = tokenizer.convert_tokens_to_ids(IMAGE)
        assert isinstance(image, int)
        self.image = image
        self.before = self.encode(USER)  # before the vision tokens
        self.after = self.encode("\n")
        self.asked = self.encode(f"{END}\n{ASSISTANT}")
        self.end = self.encode(END)
        self.stop = self.encode(".")[0]
        self.nouns: dict[int, str] = {}  # first token of an object's word -> the object
        for word, category in [*((c, c) for c in CATEGORIES), *WORDS.items()]:
            for form in (word, f"{word}s"):
                self.nouns.setdefault(self.first(form), category)
        self.verdicts = {self.encode(word)[0] for word in ("Yes", "No", " yes", " no")}

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def first(self, word: str) -> int:
        """Return the first token of a word inside a sentence."""
        return self.encode(f" {word}")[0]

    def row(self, turns: Sequence[Turn]) -> Row:
        """Return a photo's tokens with a branch for each turn."""
        head = [*self.before, *[self.image] * self.slots, *self.after]
        size = len(head)
        row = Row(head, list(range(size)), [0] * size, [UNTRAINED] * size, [0.0] * size)
        for branch, turn in enumerate(turns, 1):
            question, answer = [*self.encode(turn.question), *self.asked], self.encode(turn.answer)
            tokens = [*question, *answer, *self.end]
            if turn.kind == "caption":
                row.named += self._named_before(len(row.ids) + len(question), answer)
            row.ids += tokens
            row.positions += range(size, size + len(tokens))
            row.branches += [branch] * len(tokens)
            row.labels += [*[UNTRAINED] * len(question), *answer, *self.end]
            row.weights += [*[0.0] * len(question), *self._weights(turn.kind, answer)]
        return row

    def _named_before(self, start: int, answer: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the position of each object in an answer that starts at `start`, with the tokens that named others before it."""
        out: list[tuple[int, list[int]]] = []
        seen: dict[int, str] = {}
        for offset, token in enumerate(answer):
            if noun := self.nouns.get(token):
                if before := [other for other, named in seen.items() if named != noun]:
                    out.append((start + offset, before))
                seen[token] = noun
        return out

    def _weights(self, kind: str, answer: Sequence[int]) -> list[float]:
        """Return the weights of an answer and its end: largest for words that depend on the photo, then for whether it continues."""
        if kind == "checklist":  # its arbitrary choice of objects hardly counts
            return [*(1.5 if token in self.verdicts else 0.05 for token in answer), 0.1]
        if kind == "presence":
            return [VERDICT, *[0.1] * len(answer)]
        weights = [NOUN if token in self.nouns else 0.7 for token in answer]
        for place in range(1, len(answer)):
            if answer[place - 1] == self.stop:
                weights[place] = 1.5
        return [*weights, 1.5]

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Pad rows to one length."""
        length = max(len(row.ids) for row in rows)

        def padded(columns: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[*column, *[fill] * (length - len(column))] for column in columns], dtype=dtype)

        branches = padded([row.branches for row in rows], PADDING, torch.long)
        own = branches[:, None, :] == branches[:, :, None]
        visible = torch.ones(length, length, dtype=torch.bool).tril() & (own | (branches == 0)[:, None, :])
        return Batch(
            padded([row.ids for row in rows], self.pad, torch.long),
            padded([row.positions for row in rows], 0, torch.long),
            visible,
            padded([row.labels for row in rows], UNTRAINED, torch.long),
            padded([row.weights for row in rows], 0.0, torch.float32),
            tuple((number, place, before) for number, row in enumerate(rows) for place, before in row.named),
        )
