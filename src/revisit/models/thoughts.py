"""Thoughts: the parts of an output, between two special tokens, in which a model reasons before it answers.

A thought may begin in the output or at the end of the prompt, and may remain open; there may be several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.models import families

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor, Tokenizer


@dataclass(frozen=True)
class Split:
    """The tokens of an output, separated into thoughts and the answer."""

    thought: list[int]
    answer: list[int]
    in_thought: list[bool]  # for every token; also true for the tokens around a thought
    unclosed: bool  # whether the output ends within a thought


@dataclass(frozen=True)
class Thoughts:
    """The ids of the tokens that open and close a thought."""

    open: int
    close: int

    def inside(self, input_ids: Tensor) -> Tensor:
        """Return the mask of rows that end within a thought.  (rows, length) -> (rows,)"""
        numbers = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        opened, closed = (
            torch.nn.functional.pad(numbers * (input_ids == mark), (1, 0)).amax(-1) for mark in (self.open, self.close)
        )
        return opened > closed

    def open_at_end(self, tokens: Sequence[int]) -> bool:
        """Return whether a text ends within a thought."""
        return self.split(tokens, opened=False).unclosed

    def split(self, tokens: Sequence[int], opened: bool) -> Split:
        """Separate thoughts from the answer; `opened` is whether the prompt ends within a thought."""
        thought: list[int] = []
        answer: list[int] = []
        in_thought: list[bool] = []
        for token in tokens:
            mark = token in (self.open, self.close)
            in_thought.append(mark or opened)
            if mark:
                opened = token == self.open
            else:
                (thought if opened else answer).append(token)
        return Split(thought, answer, in_thought, opened)


def thoughts_of(model: Model, processor: Processor) -> Thoughts | None:
    """Return the tokens around a model's thoughts; None if its tokenizer does not have them."""
    return find_thoughts(processor.tokenizer, getattr(model.config, "model_type", ""))


def find_thoughts(tokenizer: Tokenizer, model_type: str | None = None) -> Thoughts | None:
    """Return the tokens around the thoughts of a family's models, or of any family; None if the tokenizer lacks them."""
    every = [families.of(""), *families.FAMILIES.values()]
    listed = every if model_type is None else [families.of(model_type)]
    for marks in dict.fromkeys(family.thought for family in listed):
        ids = [tokenizer.convert_tokens_to_ids(mark) for mark in marks]
        if not any(token is None or token == tokenizer.unk_token_id for token in ids):
            return Thoughts(*ids)
    return None
