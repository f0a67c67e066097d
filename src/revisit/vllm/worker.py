"""The opted-in requests of one worker process: store their vision states, and refine their logits in every step.

The runner adds and removes requests. In every step it passes the schedule (`begin`), then the model passes its hidden states
(`observe`) and its logits (`refine`). The positions of vision tokens follow from the prompt and the schedule, so nothing is read
back from the device.

An error in one request ends that request (see `hooks`), not the others. With tensor parallelism this holds only for errors
that all ranks raise alike (RevisitError): a rank that handled any other error alone would no longer issue the collectives that
the others wait for.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from revisit.decoding.row_guard import RowGuard
from revisit.errors import RevisitError
from revisit.forward.support import name_support
from revisit.methods.revisit import ReVisiT
from revisit.models.names import Categories
from revisit.step.batched import BatchedStep
from revisit.step.choice import choose
from revisit.step.interface import StepInput, to_device
from revisit.step.rule import Rule
from revisit.vllm.generated_tokens import GeneratedTokens
from revisit.vllm.head import ShardedHead
from revisit.vllm.plan import Entry, Plan, needs_tokens
from revisit.vllm.pool import Pool
from revisit.vllm.request import parse
from revisit.vllm.states import Group, GroupSettings, RequestState, Row, Scheduled

log = logging.getLogger("vllm.revisit")  # below vLLM's own logger, which prints it
OVERRULED = "a withheld token, because nothing else was allowed"  # by a schema, for example


class Worker:
    """The opted-in requests of one worker process.

    Args:
        plan: The shape of the model and the size of the pool.
        device: Where the pool is allocated.
        make_head: Returns the LM head once the weights are loaded.
        norm: The decoder's final norm.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device | str,
        make_head: Callable[[], ShardedHead],
        norm: nn.Module | None = None,
    ) -> None:
        self.plan, self.make_head, self.norm = plan, make_head, norm
        self.pool = Pool(plan.blocks, plan.block, plan.width, plan.dtype, device)
        self.requests: dict[str, RequestState] = {}
        self.blocks: dict[str, np.ndarray] = {}  # of the pool, by the request that computes the states in them
        self.rehearsed = False
        self.counts: Counter[str] = Counter()  # steps by implementation, and withheld tokens that had to be written
        self._complete: set[str] = set()  # requests whose states were all stored
        self._failed: set[str] = set()
        self._scheduled: list[Scheduled] = []
        self._observed = True  # whether `observe` was called in this step
        self._groups: WeakValueDictionary[GroupSettings, Group] = WeakValueDictionary()  # of the requests here
        self._buffers: dict[str, Tensor] = {}  # of all steps, which follow each other
        # By the request that computed the states: the support of categories of names, by layer and list.
        self._supports: dict[str, dict[tuple[int, Categories], dict[str, float]]] = defaultdict(dict)
        self._generated = GeneratedTokens(self.pool.states.device)

    @functools.cached_property
    def head(self) -> ShardedHead:
        return self.make_head()

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, name: str, params: Any, prompt_ids: Sequence[int] | None, owner: str | None = None) -> None:
        """Add a request; one that is added again is prefilled again.

        Args:
            name: Its id.
            params: Its sampling parameters.
            prompt_ids: Its prompt.
            owner: The request that computes its states, itself by default.
        """
        self.remove(name)
        try:
            method = None if params is None else parse(params.extra_args, self.plan.model)
            if method is None:
                return
            rule = method.rule() if isinstance(method, ReVisiT) else None
            settings = GroupSettings(rule, method.phase, self.plan.gap(params))
            group = self._groups.setdefault(settings, Group(settings))
            request = RequestState(name, method, self.plan, prompt_ids or [], group)
            if request.tokens:
                self._assign_blocks(request, owner or name)
        except Exception as error:
            self.fail(name, error)
            return
        if needs_tokens(method):
            request.slot = self._generated.take_slot()
        self.requests[name] = request

    def resume(self, name: str, owner: str) -> None:
        """Prefill a request again after a preemption; its states may have another owner now."""
        request = self.requests.get(name)
        if request is not None:
            try:
                self._assign_blocks(request, owner)
            except RevisitError as error:
                self.fail(name, error)

    def _assign_blocks(self, request: RequestState, owner: str) -> None:
        request.owner = owner
        if owner != request.name and owner not in self._complete:
            raise RevisitError(
                f"the vision states that it shares with {owner} were not stored; send the request again."
            )
        if owner not in self.blocks:
            states = request.tokens * len(request.entries)
            self.blocks[owner] = self.pool.take(self.plan.blocks_for(states))
        request.blocks = self.blocks[owner]
        request.restart()

    def remove(self, name: str) -> None:
        """Remove a request; its states stay until the scheduler drops them."""
        request = self.requests.pop(name, None)
        if request is None:
            return
        request.group.requests = []
        if request.slot is not None:
            self._generated.free_slot(request.slot)

    def drop(self, owners: Iterable[str]) -> None:
        """Free the blocks of requests; requests without blocks are skipped."""
        for owner in owners:
            self.pool.free(self.blocks.pop(owner, ()))
            self._supports.pop(owner, None)
            self._complete.discard(owner)

    def fail(self, name: str, error: Exception) -> None:
        """End a request, and no other; see the module's docstring for tensor parallelism."""
        if self.plan.ranks > 1 and not isinstance(error, RevisitError):
            raise error
        log.error("ReVisiT ends request %s: %s", name, error, exc_info=not isinstance(error, RevisitError))
        self.remove(name)
        self._failed.add(name)

    def take_failed(self) -> frozenset[str]:
        """Return the requests that failed, and forget them."""
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
        """Begin a step.

        Args:
            names: The requests, in the order of the batch.
            firsts: The first position of each that the step computes.
            counts: The number of positions that it computes.
            drafts: How many of these, at the end, are candidates of speculative decoding; none by default. Their rows of
                logits follow the row of the last known token.
            inputs: The tokens at these positions, request after request, on the device; only `once` and `phase` need them.
        """
        self._scheduled, self._observed = [], False
        if not self.requests:
            return
        columns = (names, map(int, firsts), map(int, counts), drafts or [0] * len(names))
        start = row = 0
        copies = []
        for name, first, count, draft in zip(*columns, strict=True):
            request, end = self.requests.get(name), first + count - draft
            if request is not None:
                self._scheduled.append(Scheduled(request, first, end, start, row, draft))
                if first == 0:
                    request.restart()
                    request.group.requests = []  # it may have other blocks
                new = max(first, request.prompt_length)  # the first position of a generated token
                if request.slot is not None and new < end:
                    copies.append((request.slot, new - request.prompt_length, start + new - first, end - new))
            start += count
            row += 1 + draft
        if inputs is not None:
            self._generated.store(inputs, copies)

    def observe(self, final: Tensor, others: Sequence[Tensor]) -> None:
        """Store the vision states of a forward: the normed final states, and those of the other collected layers."""
        if len(others) != len(self.plan.collected) - 1:
            raise RevisitError(
                f"The compiled model returns the states of {len(others)} layers before the last, not of "
                f"{len(self.plan.collected) - 1}: delete vLLM's compile cache (torch_compile_cache in VLLM_CACHE_ROOT, by default "
                "~/.cache/vllm), and start the server again."
            )
        if self._observed or not self._scheduled:
            return
        self._observed = True
        jobs = []
        for part in self._scheduled:
            if not part.request.complete:
                numbers = part.new_vision_tokens()
                jobs.append((part.request, numbers, part.request.positions[numbers] - part.first + part.start))
        self._store(jobs, dict(zip(self.plan.collected, (*others, final), strict=True)))

    def _observe_sampled(self, states: Tensor) -> None:
        """Store vision states that logits were computed from, because a replayed graph returns no others."""
        depth, jobs = self.plan.depth, []
        for part in self._scheduled:
            if part.request.complete:
                continue
            numbers = part.new_vision_tokens()
            if part.request.entries == ((depth, False),) and part.request.positions[numbers].tolist() == [part.end - 1]:
                jobs.append((part.request, numbers, np.array([part.row])))
        self._store(jobs, {depth: states})

    def _store(self, jobs: Sequence[tuple[RequestState, np.ndarray, np.ndarray]], hidden: dict[int, Tensor]) -> None:
        """Write states into the pool, with two kernels per layer for any number of requests.

        Args:
            jobs: Requests with the numbers of their vision tokens (m,) and the rows of these tokens in the hidden states (m,).
            hidden: The hidden states (rows, d) of a step, by layer.
        """
        jobs = [job for job in jobs if len(job[1])]
        copies: dict[Entry, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)
        for request, numbers, rows in jobs:
            for j, entry in enumerate(request.entries):
                copies[entry].append((rows, self.pool.index(request.blocks, numbers + j * request.tokens)))
        try:
            for (layer, normed), pairs in copies.items():
                sources, targets = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
                states = hidden[layer][to_device(sources, hidden[layer].device)]  # (m, d)
                if normed:
                    assert self.norm is not None
                    states = self.norm(states)
                self.pool.write(to_device(targets, states.device), states)
        except Exception as error:
            for request, _, _ in jobs:
                self.fail(request.name, error)
            return
        for request, numbers, _ in jobs:
            request.store(numbers)
            if request.complete:
                self._complete.add(request.name)

    def refine(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """Refine the logits of opted-in requests; `sampled` are the states that they were computed from."""
        if not self._observed:
            self._observe_sampled(sampled)
        scheduled, self._scheduled = self._scheduled, []
        groups: dict[Group, list[Row]] = defaultdict(list)
        for part in scheduled:
            request, rows = part.request, part.rows()
            if not rows or not request.tokens or request.name not in self.requests:
                continue
            if request.complete:
                groups[request.group] += rows
            else:
                missing = f"{int((~request.stored).sum())} of its {request.tokens} vision tokens were not computed here"
                self.fail(request.name, RevisitError(f"{missing}: use enforce_eager=True and no KV transfer."))
        if groups:
            logits = logits.float()  # as the sampler does next; no copy if it is float32
            for group in groups.values():
                self._refine_group(logits, group)
        return logits

    def _refine_group(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Refine rows with the same settings in place; if that fails, retry one by one, and end those that fail."""
        try:
            self._take_step(logits, rows)
        except Exception as error:
            if len(rows) == 1 or self.plan.ranks > 1:
                for row in rows:
                    self.fail(row.request.name, error)
                return
            for row in rows:
                self._refine_group(logits, [row])

    def _take_step(self, logits: Tensor, rows: Sequence[Row]) -> None:
        requests, numbers = [row.request for row in rows], [row.number for row in rows]
        group = requests[0].group
        rule, phase, gap = group.settings
        chosen = None if numbers == list(range(len(logits))) else to_device(np.array(numbers), logits.device)
        index = slice(None) if chosen is None else chosen
        slots = [request.slot for request in requests if request.slot is not None]
        written = self._generated.read(slots, [row.token for row in rows]) if slots else None
        guarded = [number for number, request in enumerate(requests) if request.method.floor]
        before = logits[index].clone() if guarded or phase != "both" else None
        if rule is not None:
            if group.step is None:
                group.step = choose(self.head, rule, self.pool.states.device)
                group.step.buffers = self._buffers
            if group.states is None or group.requests != requests:  # else the same requests are still decoded together
                group.requests = requests
                group.states = self.pool.rows([one.blocks for one in requests], [one.states for one in requests])
            draws: Tensor | float = 0.0
            if rule.select == "random":
                draws = to_device(np.array([[row.request.uniform(row.token)] for row in rows]), logits.device)  # (n, 1)
            inputs = StepInput(logits, group.states, draws, written=written if rule.once else None)
            group.step.take_in_place(inputs, chosen, gap)
            self._count(group.step.implementation(inputs))
        if before is None or written is None:
            return
        if phase != "both":
            outside = self._outside_phase(requests, written)
            logits[index] = torch.where(outside[:, None], before, logits[index])
        if guarded:
            texts = written.tolist()
            for number in guarded:
                tokens = [token for token in texts[number] if token >= 0]
                self._withhold(logits[numbers[number]], before[number], requests[number], tokens)

    def _withhold(self, scores: Tensor, logits: Tensor, request: RequestState, tokens: list[int]) -> None:
        """Exclude the tokens that would write a withheld name after a request's answer so far.  (V,), (V,)

        A row with no other plausible token gets its logits without them. If anything else may exclude tokens, they are only
        far below all others, so that a schema which allows nothing else is still followed.
        """
        if request.guard is None:
            request.guard = self._guard(request)
        if tokens and tokens[-1] in request.blocked:
            self._count(OVERRULED)
        request.blocked = frozenset()
        answer: list[int] | None = tokens
        if self.plan.thoughts is not None:
            split = self.plan.thoughts.split(tokens, request.in_thought)
            answer = None if split.unclosed else split.answer
        if answer is None:
            return
        blocked = request.guard.blocked(answer)
        request.blocked = frozenset(blocked.tolist())
        blocked = blocked.to(scores.device)
        scores[blocked] = logits[blocked] - 2 * request.group.settings.gap
        if bool(scores.amax() == -math.inf):
            scores.copy_(logits.index_fill(0, blocked, -math.inf))

    def _count(self, what: str) -> None:
        """Count a step, and log how many there were at 1, 10, 100, and so on."""
        self.counts[what] += 1
        if str(count := self.counts[what]).rstrip("0") == "1":
            log.info("ReVisiT, steps so far: %d × %s.", count, what)

    def _guard(self, request: RequestState) -> RowGuard:
        """Return what withholds names from a request, by the support of its images, which is computed once for their states."""
        method, entry = request.method, self.plan.floor_entry(request.method)
        spelling, supports = self.plan.spelling(method.names), self._supports[request.owner]
        key = entry[0], method.names
        if key not in supports:
            numbers = request.entries.index(entry) * request.tokens + np.arange(request.tokens)
            index = to_device(self.pool.index(request.blocks, numbers), self.pool.states.device)
            supports[key] = name_support(self.head, self.pool.states.flatten(0, 1)[index], spelling)
        return RowGuard(spelling, supports[key], method.floor)

    def _outside_phase(self, requests: Sequence[RequestState], written: Tensor) -> Tensor:
        """Return which rows are outside the phase of their request.  -> (n,)"""
        thoughts = self.plan.thoughts
        assert thoughts is not None  # else such requests are rejected
        marks = np.array([[thoughts.open if request.in_thought else thoughts.close] for request in requests])
        inside = thoughts.inside(torch.cat([to_device(marks, written.device), written], dim=1))
        return ~inside if requests[0].method.phase == "thought" else inside

    @torch.no_grad()
    def rehearse(self, logits: Tensor) -> None:
        """Take the largest possible step to include it in vLLM's memory profile."""
        self.rehearsed = True
        owned = np.array_split(np.arange(self.plan.blocks), len(logits))
        rows = 1 + self.plan.drafts  # of a request
        states = self.pool.rows(owned * rows, [len(numbers) * self.plan.block for numbers in owned] * rows)
        BatchedStep(self.head, Rule()).reserve(logits.float(), states)
        step = choose(self.head, Rule(), self.pool.states.device)
        step.buffers = self._buffers
        step.reserve(logits, states)


def count_steps(model: Any) -> dict[str, int]:
    """Count the steps of a vLLM model by implementation; a function that vLLM's `apply_model` can send to a worker."""
    return dict(model.revisit.counts)
