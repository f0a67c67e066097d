"""The opted-in requests of a worker: their part of a step, and their vision states in the pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from revisit.decoding.method import Method
from revisit.decoding.row_guard import RowGuard
from revisit.methods.revisit import ReVisiT
from revisit.step.interface import RowStates, Step
from revisit.step.rule import Rule
from revisit.vllm.plan import Plan, needs_tokens


class GroupSettings(NamedTuple):
    """Settings of a request; those with equal ones are refined together."""

    rule: Rule | None  # None for plain decoding, with a floor
    phase: str
    gap: float  # how far below its logit the score of a token outside the plausible set is


@dataclass(eq=False)
class Group:
    """What requests with equal settings share: the step, and the states of those that were decoded together last."""

    settings: GroupSettings
    step: Step | None = None
    requests: list[RequestState] = field(default_factory=list)
    states: RowStates | None = None


class RequestState:
    """An opted-in request: its settings, the positions of its vision tokens, and which of their states are stored."""

    def __init__(self, name: str, method: Method, plan: Plan, prompt_ids: Sequence[int], group: Group) -> None:
        self.name, self.method, self.group = name, method, group
        self.entries = plan.entries(method)
        self.prompt_length = len(prompt_ids)
        thoughts = plan.thoughts if needs_tokens(method) else None
        self.in_thought = thoughts is not None and thoughts.open_at_end(prompt_ids)  # at the end of the prompt
        self.positions = plan.positions(prompt_ids)  # (N,)
        self.tokens = len(self.positions)
        self.stored = np.zeros(self.tokens, bool)  # whether the states of a vision token are in the pool
        self.complete = not self.tokens  # whether all are
        layers = plan.layers(method)
        self.states = self.tokens * len(layers)  # those that the method reads; the floor's may follow
        self.blocks = np.empty(0, np.int64)  # of the pool
        self.owner = name  # the request that computes the states
        self.slot: int | None = None  # in `GeneratedTokens`, if its settings need the tokens
        self.guard: RowGuard | None = None  # withholds names, once the states are complete
        self.blocked = frozenset[int]()  # tokens that were withheld at the last step
        self._generator = random.Random(method.seed if isinstance(method, ReVisiT) else 0)
        self._draws: list[float] = []

    def restart(self) -> None:
        """Expect the states to be computed again, unless another request computes them."""
        self.complete = self.owner != self.name or not self.tokens
        self.stored[:] = self.complete
        self.guard = None

    def store(self, numbers: np.ndarray) -> None:
        """Note that the states of these vision tokens are in the pool.  (m,)"""
        self.stored[numbers] = True
        self.complete = bool(self.stored.all())

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
