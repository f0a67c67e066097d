"""The vision states of one request, gathered as its prefill runs in whatever pieces the scheduler likes."""

from __future__ import annotations

import random
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.integrations.vllm.head import Rows, ShardedHead
from revisit.methods.revisit import ReVisiT
from revisit.step.engine import Engine, Scratch

STORE_BYTES = 8 << 20  # projected columns that a request keeps, beside its states
_SCRATCH = Scratch()  # one worker takes one step at a time
_LIVE: weakref.WeakSet[RequestStates] = weakref.WeakSet()


@dataclass(frozen=True)
class Held:
    """What the plug-in holds right now, over all requests."""

    requests: int
    bytes: int


def held() -> Held:
    """Requests with vision states in memory, and the size of those states."""
    live = [states for states in _LIVE if states.by_layer]
    return Held(len(live), sum(t.numel() * t.element_size() for s in live for t in s.by_layer.values()))


class RequestStates:
    """Where a request's vision tokens are, their states as far as computed, and its settings.

    Row j·N + i of `matrix()` is vision token i at the j-th of the request's layers. Writing the same positions twice
    (a prefill that is computed again after a preemption) is harmless.
    """

    def __init__(
        self, method: ReVisiT, prompt_ids: Sequence[int], vision_ids: Sequence[int], layers: tuple[int, ...]
    ) -> None:
        self.method, self.layers = method, layers
        self.prompt_length = len(prompt_ids)
        known = frozenset(vision_ids)
        self.positions = torch.tensor([i for i, token in enumerate(prompt_ids) if token in known], dtype=torch.long)
        self.by_layer: dict[int, Tensor] = {}  # layer -> (N, d)
        self.index = 0  # of the next token to be decided, 0 for the first after the prompt
        self._missing = self.tokens  # vision tokens not seen yet
        self._seen = torch.zeros(self.tokens, dtype=torch.bool)
        self._draws: list[float] = []
        self._generator = random.Random(method.seed)
        self._matrix: Tensor | None = None
        self._engine: Engine | None = None
        _LIVE.add(self)

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def complete(self) -> bool:
        """Whether the state of every vision token has been seen."""
        return self._missing == 0

    def write(self, first: int, hidden: Mapping[int, Tensor]) -> None:
        """Keep the vision rows of the states of positions first, first + 1, …: layer -> (q, d)."""
        if self.complete:
            return
        length = next(iter(hidden.values())).shape[0]
        low, high = torch.searchsorted(self.positions, torch.tensor([first, first + length])).tolist()
        if low == high:
            return
        for layer in self.layers:
            source = hidden[layer]
            rows = source[(self.positions[low:high] - first).to(source.device)]  # (n, d), a copy
            store = self.by_layer.get(layer)
            if store is None:
                store = self.by_layer[layer] = rows.new_empty(self.tokens, rows.shape[-1])
            store[low:high] = rows
        self._seen[low:high] = True
        self._missing = int((~self._seen).sum())

    def restart(self) -> None:
        """Forget what was seen: the prefill begins again, and states of another run must not be mixed in."""
        if not self.complete:
            self._seen.zero_()
            self._missing = self.tokens

    def matrix(self) -> Tensor:
        """All rows, layer-major.  -> (|J|·N, d)"""
        if self._matrix is None:
            if len(self.layers) == 1:
                self._matrix = self.by_layer[self.layers[0]]
            else:
                self._matrix = torch.cat([self.by_layer[layer] for layer in self.layers])
                self.by_layer = dict(zip(self.layers, self._matrix.chunk(len(self.layers)), strict=True))
        return self._matrix

    def engine(self, head: ShardedHead) -> Engine:
        """What takes this request's steps; it keeps projected columns from step to step."""
        if self._engine is None:
            rule = self.method.rule(normalize=self.method.normalize)
            self._engine = Engine(
                Rows(self.matrix(), head, rule.model_dtype), rule, store_bytes=STORE_BYTES, scratch=_SCRATCH
            )
        return self._engine

    def uniform(self) -> float:
        """The draw that belongs to the token being decided; the same however often the request was interrupted."""
        while len(self._draws) <= self.index:
            self._draws.append(self._generator.random())
        return self._draws[self.index]
