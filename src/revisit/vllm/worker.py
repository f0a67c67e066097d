"""The opted-in requests of one worker: store their vision states, and refine their rows in every step.

The positions of vision tokens follow from the prompt and the schedule, so nothing is read back from the device. An error in
one request ends that request (see `hooks`), not the others. With tensor parallelism this holds only for errors that all ranks
raise alike (RevisitError): a rank that handled another error alone would issue other collectives than the rest, and all would
wait forever.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from revisit.errors import RevisitError
from revisit.methods.revisit import ReVisiT
from revisit.step.batched import refine_batch, room_for
from revisit.step.choice import choose
from revisit.step.interface import BlockTable, Item, StateBlocks, Step, to_device
from revisit.step.rule import Rule
from revisit.vllm.head import ShardedHead
from revisit.vllm.plan import Plan
from revisit.vllm.pool import Pool
from revisit.vllm.request import parse
from revisit.vllm.written import Written

log = logging.getLogger("vllm.revisit")  # below vLLM's own logger, which prints it

# Tokens outside the plausible set are this far below the model's own logits: they are only sampled if a grammar or a list of
# allowed tokens excludes the whole set, and then in the model's own order.
MASKED_LOGIT_GAP = 1e5
UNREAD = 512  # counters of steps that are kept before they are added up
_SERIAL = itertools.count()


class Request:
    """One opted-in request: its settings, the positions of its vision tokens, and which of their states are stored."""

    def __init__(self, method: ReVisiT, plan: Plan, prompt_ids: Sequence[int]) -> None:
        self.serial = next(_SERIAL)
        self.rule = method.rule()
        self.settings = (self.rule, method.phase)  # requests with equal ones are refined together
        thoughts = plan.thoughts if method.phase != "both" else None
        self.opened = thoughts is not None and thoughts.open_at_end(
            prompt_ids
        )  # whether the prompt ends within a thought
        self.final_norm = method.norm == "final"
        self.layers = plan.layers(method)
        self.prompt_length = len(prompt_ids)
        self.positions = plan.positions(prompt_ids)  # (N,)
        self.seen = np.zeros(self.tokens, bool)
        self.block = plan.block
        self.blocks = np.empty(0, np.int64)  # of the pool
        self.shared = False  # whether another request computes the states
        self.item: Item | None = None  # its states, for steps that read row by row
        self.line: int | None = None  # of its tokens in `Written`, if its settings need them
        self._generator = random.Random(method.seed)
        self._draws: list[float] = []

    @property
    def tokens(self) -> int:
        """The number of vision tokens in the prompt."""
        return len(self.positions)

    @property
    def states(self) -> int:
        return self.tokens * len(self.layers)

    @property
    def complete(self) -> bool:
        """Whether the states of all vision tokens are stored."""
        return bool(self.seen.all())

    def restart(self) -> None:
        """Expect the states to be computed again, unless another request computes them."""
        self.seen[:] = self.shared
        self.item = None

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Return the places of states in the pool, by number.  (m,) -> (m,)"""
        places: np.ndarray = self.blocks[numbers // self.block] * self.block + numbers % self.block
        return places

    def uniform(self, index: int) -> float:
        """Return the random draw of a token, which does not depend on interruptions."""
        while len(self._draws) <= index:
            self._draws.append(self._generator.random())
        return self._draws[index]


class PooledStates:
    """The row states (see `revisit.step.interface`) of requests that are decoded together."""

    def __init__(self, pool: Pool, requests: Sequence[Request]) -> None:
        self.pool, self.requests = pool, requests
        self.key = tuple(request.serial for request in requests)
        self.counts = [len(request.blocks) for request in requests]
        self._whole: StateBlocks | None = None  # kept only if it is not a copy

    def item(self, row: int) -> Item:
        request = self.requests[row]
        if request.item is None:
            states = self.pool.read(request.places(np.arange(request.states)))
            # The compiled step may cache as many bytes of columns as the states have, and at least a megabyte.
            request.item = Item(states, max(1 << 20, states.nbytes))
        return request.item

    def blocks(self, rows: Sequence[int] | None = None) -> StateBlocks:
        if rows is None and self._whole is not None:
            return self._whole
        requests = self.requests if rows is None else [self.requests[row] for row in rows]
        view = self.pool.view([request.blocks for request in requests], [request.states for request in requests])
        if rows is None and self.pool.holds(view.states):
            self._whole = view
        return view

    @functools.cached_property
    def _table(self) -> BlockTable:
        requests = self.requests
        return self.pool.table([request.blocks for request in requests], [request.states for request in requests])

    def table(self) -> BlockTable:
        return self._table


class Piece(NamedTuple):
    """Vision tokens low..high of a request, whose states the next forward computes."""

    name: str
    request: Request
    row: int  # of the logits after its last token
    sources: np.ndarray  # (m,) positions among the scheduled tokens
    low: int
    high: int


class Row(NamedTuple):
    """A row of the logits that decides the next token of an opted-in request."""

    name: str
    request: Request
    row: int
    token: int  # number of the token, 0 for the first after the prompt


class Worker:
    """The opted-in requests of one worker process.

    The runner reports requests (`add`, `remove`) and what each step computes (`begin`); the model then passes its states
    (`observe`) and its logits (`refine`).
    """

    def __init__(
        self,
        plan: Plan,
        pool: Pool,
        make_head: Callable[[], ShardedHead],
        collected: tuple[int, ...],
        norm: nn.Module | None = None,
    ) -> None:
        self.plan, self.pool, self.make_head, self.norm = plan, pool, make_head, norm
        self.collected = collected  # layers that the forward returns, ascending, including the last
        self.requests: dict[str, Request] = {}
        self.blocks: dict[str, np.ndarray] = {}  # of the pool, by the request that computes the states in them
        self.rehearsed = False
        self._complete: set[str] = set()  # requests whose states were all stored
        self._failed: set[str] = set()
        self._pieces: list[Piece] = []
        self._rows: list[Row] = []
        self._steps: dict[tuple[Rule, str], Step] = {}  # by settings, of the last step's groups
        self._states: dict[tuple[Rule, str], PooledStates] = {}
        self._written = Written(pool.states.device)
        self._counts: Counter[str] = Counter()
        # Rows refined by a vision token ("applied"), whose arg-max changed, and outside their phase, added up on the
        # device; those of recent steps are not added yet.
        self._device_counts: dict[str, Tensor | int] = {"applied": 0, "changed": 0, "outside": 0}
        self._unread: defaultdict[str, list[Tensor]] = defaultdict(list)

    @functools.cached_property
    def head(self) -> ShardedHead:
        return self.make_head()  # after the weights are loaded

    @property
    def counters(self) -> dict[str, int]:
        """Counters so far; reading them waits for the device."""
        self._add_counts()
        return {**self._counts, **{name: int(count) for name, count in self._device_counts.items()}}

    # -- requests --------------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        params: Any,
        prompt_ids: Sequence[int] | None,
        grant: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        """Add a request; one that is added again is prefilled again.

        Args:
            name: Its id.
            params: Its sampling parameters.
            prompt_ids: Its prompt.
            grant: From the scheduler: the request that computes its states, itself by default, and requests whose blocks
                are free again.
        """
        owner, dropped = grant or (name, ())
        self.drop(dropped)
        self.remove(name)
        try:
            method = None if params is None else parse(params.extra_args, self.plan.model)
            if method is None:
                return
            request = Request(method, self.plan, prompt_ids or [])
            if request.tokens:
                self._give_blocks(request, name, owner)
        except Exception as error:
            self.fail(name, error)
            return
        self._counts["requests"] += 1
        self._counts["requests_without_image"] += request.tokens == 0
        if request.rule.once or method.phase != "both":
            request.line = self._written.take_line()
        self.requests[name] = request

    def _give_blocks(self, request: Request, name: str, owner: str) -> None:
        request.shared = owner != name
        if request.shared and owner not in self._complete:
            raise RevisitError(f"the vision states of {owner}, which it shares, were not stored; send it again.")
        if owner not in self.blocks:
            self.blocks[name] = self.pool.take(self.plan.blocks_for(request.states))
        request.blocks = self.blocks[owner]
        request.restart()

    def remove(self, name: str) -> None:
        """Remove a request; its states stay until the scheduler drops them."""
        request = self.requests.pop(name, None)
        if request is not None and request.line is not None:
            self._written.give_back(request.line)

    def drop(self, owners: Iterable[str]) -> None:
        """Free the blocks of requests, of which some may never have come here."""
        for owner in owners:
            self.pool.give_back(self.blocks.pop(owner, ()))
            self._complete.discard(owner)

    def fail(self, name: str, error: Exception) -> None:
        """End a request, and no other; see the module's docstring for tensor parallelism."""
        if self.plan.ranks > 1 and not isinstance(error, RevisitError):
            raise error
        log.error("ReVisiT ends request %s: %s", name, error, exc_info=not isinstance(error, RevisitError))
        self.remove(name)
        self._failed.add(name)

    def take_failed(self) -> frozenset[str]:
        """Return the requests to end and clear the list."""
        failed, self._failed = frozenset(self._failed), set()
        return failed

    # -- one step --------------------------------------------------------------------------------------------------

    def begin(
        self,
        names: Sequence[str],
        firsts: Iterable[int],
        counts: Iterable[int],
        drafts: Iterable[int] | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Plan the next step.

        Args:
            names: The requests, in the order of the batch.
            firsts: The first position that is computed of each.
            counts: The number of positions.
            drafts: How many of these, at the end, are candidates of speculative decoding. Each has a row of logits of its
                own, behind the row of the last known token; none by default.
            inputs: The tokens at these positions, on the device, those of all requests in turn; only `once` and `phase` need them.
        """
        self._pieces, self._rows = [], []
        if not self.requests:
            return
        start = row = 0
        for name, first, count, draft in zip(names, firsts, counts, drafts or [0] * len(names), strict=True):
            request = self.requests.get(name)
            if request is not None:
                self._plan_rows(name, request, row, start, int(first), int(first + count - draft), draft)
            start += int(count)
            row += 1 + draft
        if inputs is not None:
            self._written.store(inputs)

    def _plan_rows(self, name: str, request: Request, row: int, start: int, first: int, end: int, draft: int) -> None:
        if first == 0:
            request.restart()
        if not request.complete:
            low, high = np.searchsorted(request.positions, [first, end]).tolist()
            if low < high:
                sources = request.positions[low:high] - first + start
                self._pieces.append(Piece(name, request, row, sources, low, high))
        generated = max(first, request.prompt_length)  # the first position of a generated token
        if request.line is not None and generated < end:
            self._written.plan(
                request.line, generated - request.prompt_length, start + generated - first, end - generated
            )
        if end >= request.prompt_length:  # else the sampled token is discarded
            token = end - request.prompt_length
            self._rows += [Row(name, request, row + i, token + i) for i in range(1 + draft)]

    def observe(self, final: Tensor, others: Iterable[Tensor]) -> None:
        """Store the vision states of a forward: the normed final states, and those of the other collected layers."""
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []
        hidden = dict(zip((layer for layer in self.collected if layer != self.plan.depth), others, strict=True))
        hidden[self.plan.depth] = final
        self._keep(pieces, hidden)

    def _observe_sampled(self, states: Tensor) -> None:
        """Store the states of prompts' last tokens, if a replayed graph returned no others."""
        pieces, self._pieces = self._pieces, []
        pieces = [piece._replace(sources=np.array([piece.row])) for piece in pieces if len(piece.sources) == 1]
        self._keep([p for p in pieces if p.request.layers == (self.plan.depth,)], {self.plan.depth: states})

    def _keep(self, pieces: Sequence[Piece], hidden: dict[int, Tensor]) -> None:
        """Write the states of all pieces into the pool, with two kernels per layer for any number of requests."""
        jobs: dict[tuple[int, bool], list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for piece in pieces:
            request, numbers = piece.request, np.arange(piece.low, piece.high)
            for j, layer in enumerate(request.layers):
                normed = request.final_norm and layer != self.plan.depth
                jobs[layer, normed].append((piece.sources, request.places(numbers + j * request.tokens)))
        try:
            for (layer, normed), parts in jobs.items():
                sources, places = (np.concatenate(part) for part in zip(*parts, strict=True))
                states = hidden[layer][to_device(sources, hidden[layer].device)]  # (m, d)
                if normed:
                    assert self.norm is not None
                    states = self.norm(states)
                self.pool.write(to_device(places, states.device), states)
        except Exception as error:
            for piece in pieces:
                self.fail(piece.name, error)
            return
        for piece in pieces:
            piece.request.seen[piece.low : piece.high] = True
            if piece.request.complete:
                self._complete.add(piece.name)

    def refine(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """Refine the logits of opted-in requests; `sampled` are the states they were computed from."""
        if self._pieces:
            self._observe_sampled(sampled)
        rows, self._rows = [row for row in self._rows if row.name in self.requests], []
        groups: dict[tuple[Rule, str], list[Row]] = defaultdict(list)
        for row in rows:
            self._counts["steps"] += 1
            if not row.request.tokens:
                continue  # no image: not refined
            if row.request.complete:
                groups[row.request.settings].append(row)
            elif row.name in self.requests:
                missing = (
                    f"{int((~row.request.seen).sum())} of its {row.request.tokens} vision tokens were not computed here"
                )
                self.fail(row.name, RevisitError(f"{missing}: use enforce_eager=True and no KV transfer."))
        if not groups:
            return logits
        logits = logits.float()  # as the sampler does next; no copy if it is float32
        for (rule, _), group in groups.items():
            self._refine_group(logits, rule, group)
        self._steps = {settings: step for settings, step in self._steps.items() if settings in groups}
        self._states = {settings: states for settings, states in self._states.items() if settings in groups}
        return logits

    def _refine_group(self, logits: Tensor, rule: Rule, group: Sequence[Row]) -> None:
        """Refine rows with the same settings in place; if that fails, retry one by one, and end those that fail."""
        try:
            self._take_step(logits, rule, group)
        except Exception as error:
            if len(group) == 1 or self.plan.ranks > 1:
                for row in group:
                    self.fail(row.name, error)
                return
            for row in group:
                self._refine_group(logits, rule, [row])

    def _take_step(self, logits: Tensor, rule: Rule, group: Sequence[Row]) -> None:
        numbers = [row.row for row in group]
        whole = numbers == list(range(len(logits)))
        rows = None if whole else to_device(np.array(numbers), logits.device)
        settings = group[0].request.settings
        if settings not in self._steps:
            self._steps[settings] = choose(self.head, rule, self.pool.states.device)
        states, draws = self._states_of(settings, group), _draws(rule, group, logits)
        lines = [row.request.line for row in group if row.request.line is not None]
        written = self._written.of(lines, [row.token for row in group]) if lines else None
        outside = None if written is None else self._outside_phase(group, written)
        before = None if outside is None else logits.clone() if rows is None else logits[rows]
        output = self._steps[settings].take_in_place(
            logits, rows, states, draws, MASKED_LOGIT_GAP, written if rule.once else None
        )
        applied, changed = output.applied, output.changed
        if outside is not None and before is not None:
            after = torch.where(outside[:, None], before, logits if rows is None else logits[rows])
            logits.copy_(after) if rows is None else logits.index_copy_(0, rows, after)
            applied, changed = applied & ~outside, changed & ~outside
            self._unread["outside"].append(outside)
        self._unread["applied"].append(applied)
        self._unread["changed"].append(changed)
        if len(self._unread["applied"]) > UNREAD:
            self._add_counts()

    def _outside_phase(self, group: Sequence[Row], written: Tensor) -> Tensor | None:
        """Return which rows are outside the phase that they are limited to; None if they are not limited.  -> (n,)"""
        _, phase = group[0].request.settings
        thoughts = self.plan.thoughts
        if phase == "both" or thoughts is None:
            return None
        first = np.array([[thoughts.open if row.request.opened else thoughts.close] for row in group])
        inside = thoughts.inside(torch.cat([to_device(first, written.device), written], dim=1))
        return ~inside if phase == "thought" else inside

    def _states_of(self, settings: tuple[Rule, str], group: Sequence[Row]) -> PooledStates:
        """Return the states of a group, reused while the same requests are decoded together."""
        states = PooledStates(self.pool, [row.request for row in group])
        if settings not in self._states or self._states[settings].key != states.key:
            self._states[settings] = states
        return self._states[settings]

    def _add_counts(self) -> None:
        """Add up, on the device, what later steps did; not in every step, because that costs kernels."""
        for name, values in self._unread.items():
            # Not in place: vLLM takes steps in inference mode, and counters are read outside it.
            self._device_counts[name] = self._device_counts[name] + torch.cat(values).sum()
        self._unread.clear()

    @torch.no_grad()
    def rehearse(self, logits: Tensor) -> None:
        """Take the largest possible step, so that vLLM's memory profile includes it."""
        self.rehearsed = True
        owned = np.array_split(np.arange(self.pool.blocks), len(logits))
        counts = [len(numbers) * self.pool.size for numbers in owned]
        view = self.pool.view(owned, counts)
        copied = self.pool.states[: self.pool.blocks // 2].clone()  # the largest copy of `Pool.view`
        capacity = room_for(self.pool.blocks, self.plan.width, logits.device) // self.pool.blocks
        refine_batch(logits.float(), view, self.head, Rule(), capacity=capacity)
        del copied
        rows = 1 + self.plan.drafts  # of a request
        choose(self.head, Rule(), self.pool.states.device).reserve(logits, self.pool.table(owned * rows, counts * rows))


def _draws(rule: Rule, group: Sequence[Row], like: Tensor) -> Tensor | float:
    """Return the draws of select="random".  -> (n, 1)"""
    if rule.select != "random":
        return 0.0
    return to_device(np.array([[row.request.uniform(row.token)] for row in group]), like.device)
