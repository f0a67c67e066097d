"""Training sequences: one picture, then several questions that do not see each other.

A row holds the picture's slots once. Each question with its answer is a branch: it attends to the picture and to itself, and its
positions go on where the picture ends, as if it were the only one. So the picture, a third of the tokens, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from revisit.embedded.catalog import BY_NOUN, CATEGORIES, COLORS
from revisit.embedded.dice import Dice
from revisit.embedded.scenes import Scene
from revisit.embedded.text import Turn, absent, caption, presence
from revisit.models.smol import IMAGE
from training.texts import DESCRIBE, PATCH_WORDS, checklist, listing, questions
from training.tiny.data import Mixture, training_scene
from training.tiny.model import SLOTS, token_id

LONGEST = 215  # tokens of a row; questions that would make it longer are left out
ABSENT = 5  # absent objects in a checklist
NOTHING = -1  # label of a position that is not trained
PADDING = -1  # branch of the padding on the right
USER, ASSISTANT, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"


@dataclass
class Row:
    """One scene as tokens; the lists have one entry for each token."""

    scene: Scene
    ids: list[int]
    positions: list[int]
    branches: list[int]  # 0: the picture, which all see
    labels: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    named: list[tuple[int, list[int]]] = field(default_factory=list)  # (position of a noun, nouns named before it)


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to one length."""

    scenes: tuple[Scene, ...]
    ids: Tensor  # (rows, length)
    positions: Tensor  # (rows, length)
    visible: Tensor  # (rows, length, length): whether the first position attends to the second
    labels: Tensor  # (rows, length)
    weights: Tensor  # (rows, length)
    named: tuple[tuple[int, int, list[int]], ...]  # (row, position of a noun, nouns named before it)


class Writer:
    """Turns training scenes into rows in SmolLM2's chat format."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self.encode = lru_cache(maxsize=50_000)(self._encode)
        self.seed, self.pad = seed, tokenizer.pad_token_id
        self.image = token_id(tokenizer, IMAGE)
        self.before = self.encode(USER)  # before the slots
        self.after = self.encode("\n")
        self.asked = self.encode(f"{END}\n{ASSISTANT}")
        self.end = self.encode(END)
        self.stop, self.comma = self.encode(".")[0], self.encode(",")[0]
        self.patch_words = torch.tensor([self._first(word) for word in PATCH_WORDS])
        self.nouns = self._nouns()  # first token of a noun's form -> the noun
        forms = [form for c in CATEGORIES for form in (c.noun, c.plural)]
        words = (*forms, *COLORS, "two", "three", "left", "right", "top", "bottom")
        self.content = {token for word in words for token in self.encode(f" {word}")}
        self.verdicts = {self.encode(word)[0] for word in ("Yes", "No", "yes", "no", " yes", " no")}

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text))

    def _first(self, word: str) -> int:
        """The first token of a word inside a sentence."""
        return self.encode(f" {word}")[0]

    def _nouns(self) -> dict[int, str]:
        nouns: dict[int, str] = {}
        for category in CATEGORIES:
            nouns |= dict.fromkeys((self._first(category.noun), self._first(category.plural)), category.noun)
            nouns.setdefault(self.encode(category.noun.capitalize())[0], category.noun)
        return nouns

    def turns(self, drawn: Scene, dice: Dice, mixture: Mixture) -> list[Turn]:
        """A caption or list, a checklist, a presence question, and two questions of any kind."""
        if dice.chance(mixture.lists):
            told = listing(drawn, dice)
        else:
            told = Turn("caption", dice.pick(DESCRIBE), caption(drawn, dice, mixture.assume, False, False))
        there = dice.chance(0.5)
        checked = checklist(drawn, dice, ABSENT)
        category = BY_NOUN[dice.pick(drawn.nouns)] if there else absent(drawn, dice)
        return [told, checked, presence(category, there), *questions(drawn, dice, 2)]

    def row(self, index: int, key: str, mixture: Mixture) -> Row:
        """Scene number `index` of the training stream; `key` makes its texts differ from one use to the next."""
        drawn, dice = training_scene(mixture, self.seed, index), Dice(f"{key}/{index}")
        head = [*self.before, *[self.image] * SLOTS, *self.after]
        size = len(head)
        row = Row(drawn, head, list(range(size)), [0] * size, [NOTHING] * size, [0.0] * size)
        for branch, turn in enumerate(self.turns(drawn, dice, mixture), 1):
            question, answer = [*self.encode(turn.question), *self.asked], self.encode(turn.answer)
            tokens = [*question, *answer, *self.end]
            if branch > 2 and len(row.ids) + len(tokens) > LONGEST:
                continue
            if turn.kind in ("caption", "list"):
                row.named += self._named_before(len(row.ids) + len(question), answer)
            row.ids += tokens
            row.positions += range(size, size + len(tokens))
            row.branches += [branch] * len(tokens)
            row.labels += [*[NOTHING] * len(question), *answer, *self.end]
            row.weights += [*[0.0] * len(question), *self._weights(turn.kind, answer)]
        return row

    def _named_before(self, start: int, answer: Sequence[int]) -> list[tuple[int, list[int]]]:
        """For each noun of an answer that starts at `start`: its position and the first tokens of the nouns before it."""
        out: list[tuple[int, list[int]]] = []
        seen: dict[str, None] = {}
        for offset, token in enumerate(answer):
            if noun := self.nouns.get(token):
                if before := [self._first(other) for other in seen if other != noun]:
                    out.append((start + offset, before))
                seen[noun] = None
        return out

    def _weights(self, kind: str, answer: Sequence[int]) -> list[float]:
        """Words that only the picture can tell count most, then whether something is left to say; the last is the end's."""
        end = 2.0 if kind in ("caption", "list") else 0.5
        if kind == "checklist":  # its arbitrary choice of nouns hardly counts
            return [*(2.0 if token in self.verdicts else 0.1 for token in answer), end]
        if kind == "presence":
            return [4.0, *[0.2] * (len(answer) - 1), end]
        if len(answer) == 1:
            return [3.0, end]
        weights = [4.0 if token in self.content else 0.6 for token in answer]
        for place, token in enumerate(answer):
            goes_on = kind == "list" and token in (self.stop, self.comma)
            if goes_on or (place and answer[place - 1] == self.stop):
                weights[place] = 2.0
        return [*weights, end]

    def vocabulary(self, mixture: Mixture, scenes: int = 300) -> Tensor:
        """The tokens that scene texts use, sorted: the patch words and those of the answers of some scenes. (tokens,)"""
        rows = (self.row(900_000 + index, "vocabulary", mixture) for index in range(scenes))
        used = {label for row in rows for label in row.labels if label != NOTHING}
        return torch.tensor(sorted(used | set(self.patch_words.tolist())))

    def batch(self, indices: Sequence[int], key: str, mixture: Mixture) -> Batch:
        """The rows of some scenes."""
        rows = [self.row(index, key, mixture) for index in indices]
        length = max(len(row.ids) for row in rows)

        def padded(columns: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([[*column, *[fill] * (length - len(column))] for column in columns], dtype=dtype)

        branches = padded([row.branches for row in rows], PADDING, torch.long)
        own = branches[:, None, :] == branches[:, :, None]
        visible = torch.ones(length, length, dtype=torch.bool).tril() & (own | (branches == 0)[:, None, :])
        return Batch(
            tuple(row.scene for row in rows),
            padded([row.ids for row in rows], self.pad, torch.long),
            padded([row.positions for row in rows], 0, torch.long),
            visible,
            padded([row.labels for row in rows], NOTHING, torch.long),
            padded([row.weights for row in rows], 0.0, torch.float32),
            tuple((number, place, before) for number, row in enumerate(rows) for place, before in row.named),
        )
