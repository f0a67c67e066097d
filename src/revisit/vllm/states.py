"""The opted-in requests of a worker: their part of a step, and their vision states in the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from revisit.methods.revisit import ReVisiT
from revisit.step.rule import Rule
from revisit.vllm.plan import Plan


class GroupSettings(NamedTuple):
    """Settings of a request; those with equal ones are refined together."""

    rule: Rule
    phase: str
    gap: float  # how far below its logit the score of a token outside the plausible set is


class RequestState:
    """An opted-in request: its settings, the positions of its vision tokens, and which of their states are stored."""

    def __init__(self, name: str, method: ReVisiT, plan: Plan, prompt_ids: Sequence[int], gap: float) -> None:
        self.name = name
        self.settings = GroupSettings(method.rule(), method.phase, gap)
        self.final_norm = method.norm == "final"
        self.layers = plan.layers(method)
        self.prompt_length = len(prompt_ids)
        thoughts = plan.thoughts if method.phase != "both" else None
        self.in_thought = thoughts is not None and thoughts.open_at_end(prompt_ids)  # at the end of the prompt
        self.positions = plan.positions(prompt_ids)  # (N,)
        self.stored = np.zeros(self.tokens, bool)  # (N,) whether the states of a vision token are in the pool
        self.blocks = np.empty(0, np.int64)  # of the pool
        self.shared = False  # whether another request computes the states
        self.slot: int | None = None  # in `GeneratedTokens`, if its settings need the tokens
        self._generator = random.Random(method.seed)
        self._draws: list[float] = []

    @property
    def tokens(self) -> int:
        """The number of vision tokens in the prompt."""
        return len(self.positions)

    @property
    def states(self) -> int:
        """The number of vision states."""
        return self.tokens * len(self.layers)

    @property
    def complete(self) -> bool:
        """Whether the states of all vision tokens are stored."""
        return bool(self.stored.all())

    def restart(self) -> None:
        """Expect the states to be computed again, unless another request computes them."""
        self.stored[:] = self.shared

    def uniform(self, token: int) -> float:
        """Return the random draw of a generated token, which does not depend on interruptions."""
        while len(self._draws) <= token:
            self._draws.append(self._generator.random())
        return self._draws[token]


class Scheduled(NamedTuple):
    """The part of a step that belongs to an opted-in request: its tokens from position `first` to `end`, then drafts."""

    request: RequestState
    first: int
    end: int
    start: int  # index of the first token in the inputs of the step
    row: int  # row of the logits after the last token; the rows after the drafts follow
    drafts: int

    def new_vision_tokens(self) -> np.ndarray:
        """Return the numbers of the vision tokens whose states must be stored.  -> (m,)"""
        if self.request.complete:
            return np.arange(0)
        return np.arange(*np.searchsorted(self.request.positions, [self.first, self.end]))

    def rows(self) -> list[Row]:
        """List the rows of logits that decide the next tokens; none within the prompt, where the sampled token is discarded."""
        token = self.end - self.request.prompt_length
        return [Row(self.request, self.row + i, token + i) for i in range(1 + self.drafts)] if token >= 0 else []


class Row(NamedTuple):
    """A row of the logits that decides the next token of a request."""

    request: RequestState
    number: int
    token: int  # number of the token, 0 for the first after the prompt
