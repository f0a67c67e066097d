"""The core that both adapters share: what a forward computed, whose it is, and the refinement of the opted-in rows."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.integrations.vllm.head import ShardedHead
from revisit.integrations.vllm.states import RequestStates
from revisit.methods.revisit import ReVisiT
from revisit.step.engine import Engine, Peaks, refine_rows
from revisit.taps.vision import resolve_layers

_OF_CONFIG: weakref.WeakValueDictionary[int, Tap] = weakref.WeakValueDictionary()


class Layout(NamedTuple):
    """Which scheduled tokens belong to which row of the batch: row r has tokens starts[r]..starts[r+1], the first of
    them at position firsts[r] of its sequence."""

    starts: Sequence[int]
    firsts: Sequence[int]


class Row(NamedTuple):
    """One row of logits that a request owns."""

    logits: int  # index into the logits
    batch: int  # index into the batch
    states: RequestStates
    position: int | None = None  # of its input token in its sequence, where the runner says so


@dataclass
class Tap:
    """One model's states on their way through one worker.

    The model calls `observe` (and `observe_sampled`) as it runs; the adapter then calls `refine` once per step, which
    uses up what was observed.
    """

    make_head: Callable[[], ShardedHead]  # called when the weights are in place
    vision_ids: tuple[int, ...]
    depth: int
    tied: bool
    collected: tuple[int, ...]  # layers the forward gives out, ascending; always with `depth`
    norm: nn.Module | None = None
    listening: bool = False  # set by the adapter: some request of this batch opted in
    layout: Layout | None = None
    hidden: dict[int, Tensor] | None = None  # layer -> (scheduled tokens, d)
    sampled: Tensor | None = None  # (rows of logits, d)
    slots: Any = None  # the V2 runner's requests; there the layout comes with them
    counters: Counter[str] = field(default_factory=Counter)

    @functools.cached_property
    def head(self) -> ShardedHead:
        return self.make_head()

    def open(self, method: ReVisiT, prompt_ids: Sequence[int]) -> RequestStates:
        """The (still empty) states of a new request."""
        states = RequestStates(
            method, prompt_ids, self.vision_ids, resolve_layers(method.layers, self.depth, self.tied)
        )
        self.counters["requests"] += 1
        self.counters["requests_without_image"] += states.tokens == 0
        return states

    def observe(self, final: Tensor, others: Iterable[Tensor], layout: Layout | None) -> None:
        """What a forward returned: the normed final states and those of the other collected layers, ascending."""
        layers = [layer for layer in self.collected if layer != self.depth]
        self.hidden = dict(zip(layers, others, strict=True))
        self.hidden[self.depth] = final
        if self.slots is None:
            self.layout = layout

    def observe_sampled(self, states: Tensor) -> None:
        """The states that logits are about to be computed from: all there is to see of a replayed graph."""
        self.sampled = states

    def refine(self, logits: Tensor, rows: Iterable[Row]) -> Tensor:
        """The logits with the rows of opted-in requests refined in place; the other rows are not touched."""
        hidden, layout, sampled = self.hidden, self.layout, self.sampled
        self.hidden = self.layout = self.sampled = None  # a step's states must never be taken for the next step's
        jobs = []
        for row in rows:
            end = self._collect(row, hidden, layout, sampled)
            if end is not None and end < row.states.prompt_length:
                continue  # the prompt is not finished: whatever is sampled here is thrown away
            if (engine := self._ready(row, end)) is not None:
                jobs.append((engine, row.logits, row.states.uniform()))
        for outcome in refine_rows(jobs, Peaks(logits), scores=logits) if jobs else []:
            self.counters["applied"] += outcome.applied
            self.counters["changed"] += outcome.applied and outcome.moved
        return logits

    def _collect(
        self, row: Row, hidden: Mapping[int, Tensor] | None, layout: Layout | None, sampled: Tensor | None
    ) -> int | None:
        """Keep what this step computed of the row's vision tokens; returns how much of the sequence is now computed."""
        states = row.states
        if layout is not None and hidden is not None:
            start, stop, first = layout.starts[row.batch], layout.starts[row.batch + 1], layout.firsts[row.batch]
            if first == 0:
                states.restart()
            if not states.complete:
                states.write(first, {layer: self._normed(states, layer, t[start:stop]) for layer, t in hidden.items()})
            return first + stop - start if row.position is None else row.position + 1
        if row.position is None:
            return None  # a decoding step of a replayed graph
        if not states.complete and sampled is not None and states.layers == (self.depth,):
            states.write(row.position, {self.depth: sampled[row.logits : row.logits + 1]})
        return row.position + 1

    def _normed(self, states: RequestStates, layer: int, hidden: Tensor) -> Tensor:
        if layer == self.depth or states.method.norm != "final" or layer not in states.layers:
            return hidden
        assert self.norm is not None
        normed: Tensor = self.norm(hidden.clone())
        return normed

    def _ready(self, row: Row, end: int | None) -> Engine | None:
        """What takes this row's step, None without an image; refuses to guess where states are missing."""
        states = row.states
        states.index = states.index + 1 if end is None else end - states.prompt_length
        self.counters["steps"] += 1
        if states.tokens == 0:  # no image in this prompt: decoded as the model would
            return None
        if not states.complete:
            raise RevisitError(
                f"A request opted in to ReVisiT but the states of {int((~states._seen).sum())} of its {states.tokens} vision tokens "
                "never passed through the model (a cache or a captured graph skipped them), and decoding without them would "
                "be something else; run vLLM with enforce_eager=True and without KV transfer."
            )
        return states.engine(self.head)


def publish(config: Any, tap: Tap) -> None:
    """Make a worker's tap known under its vLLM configuration."""
    _OF_CONFIG[id(config.compilation_config)] = tap


def tap_of(config: Any) -> Tap:
    """The tap of the model that this configuration loaded in this process."""
    tap = _OF_CONFIG.get(id(config.compilation_config))
    if tap is None:
        raise RevisitError(
            "The model of this worker was not built by ReVisiT's vLLM plug-in, so its states cannot be seen."
        )
    return tap
