"""ReVisiT's step for a whole batch at once, in torch, on any device.

All items of a batch are one padded tensor of states in the model's dtype. The candidates of every sequence are its
likeliest tokens, as many as `capacity`; those that are not plausible are masked. One gather of head rows and one
batched product give the logits of all vision tokens; nothing loops over images or sequences, and no value is read by
the host. A sequence with more plausible tokens than the capacity says so by its `size`, and the step is taken again.

`refine_logits` is for people with their own decoding loop. `BatchedStep` takes the steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from revisit.models.head import LinearHead, Projection
from revisit.step import reference
from revisit.step.rule import LARGEST_LOGIT, RESOLUTION, SOFT_TEMPERATURE, Rule

CAPACITIES = (32, 128, 512, 2048, 8192)
OUTSIDE = -4 * LARGEST_LOGIT  # logit of a token that is not plausible: probability 0, and finite
TINY = 1e-37  # smallest probability whose logarithm is taken
CPU_NUMBERS, DEVICE_NUMBERS = 1 << 19, 1 << 26  # logits of vision tokens compared at a time


@dataclass(frozen=True)
class StateBlocks:
    """The vision states of a batch: G blocks of S states, each looked at by c rows (sequences) of the batch."""

    states: Tensor  # (G, S, d)
    mask: Tensor  # (G, S) False for padding
    rows: Tensor  # (G, c) the rows that look at a block; any row where nobody does
    places: Tensor  # (B, M) the blocks of each row, as block · c + column in `rows`; -1 for none
    seen: Tensor  # (B,) whether a row has vision states

    @classmethod
    def padded(cls, states: Tensor, mask: Tensor, copies: int = 1) -> StateBlocks:
        """One block an item, shared by consecutive rows that are its copies (beams, return sequences)."""
        rows = torch.arange(len(states) * copies, device=states.device).view(-1, copies)
        return cls(states, mask, rows, rows.view(-1, 1), mask.any(-1)[:, None].expand_as(rows).flatten())

    @classmethod
    def of_items(cls, items: Sequence[Tensor], copies: int = 1) -> StateBlocks:
        """From the (n, d) states of each item; n may differ, and be 0 for an item without an image."""
        longest = max(1, *(len(item) for item in items))
        states = items[0].new_zeros(len(items), longest, items[0].shape[-1])
        mask = torch.zeros(states.shape[:2], dtype=torch.bool)
        for number, item in enumerate(items):
            states[number, : len(item)] = item
            mask[number, : len(item)] = True
        return cls.padded(states, mask.to(states.device), copies)

    @classmethod
    def pooled(cls, pool: Tensor, lengths: Tensor, table: Tensor) -> StateBlocks:
        """From a pool of blocks (G, S, d) of which the first `lengths` (G,) states count; row b owns the blocks table[b].

        The table (B, M) holds block numbers in the order of the states, -1 behind the last. All of the pool is read: pass
        the part of it that is in use.
        """
        mask = torch.arange(pool.shape[1], device=pool.device) < lengths[:, None]
        owner = torch.arange(len(table), device=table.device)[:, None].expand_as(table)
        spare = torch.zeros(
            len(pool) + 1, dtype=torch.long, device=pool.device
        )  # entries of -1 land behind the last block
        rows = spare.scatter(0, table.remainder(len(pool) + 1).flatten(), owner.flatten())[:-1, None]
        return cls(pool, mask, rows, table, (table >= 0).any(-1))

    def of_rows(self, values: Tensor) -> Tensor:
        """Values of all (block, looking row) pairs, by row; NaN where a row has fewer blocks.  (G, c, S) -> (B, M · S)"""
        found = values.flatten(0, 1)[self.places.clamp_min(0)]  # (B, M, S)
        return found.masked_fill(self.places[..., None] < 0, math.nan).flatten(1)

    def chosen(self, index: Tensor) -> Tensor:
        """States of rows by their position in `of_rows`.  (B, n) -> (B, n, d)"""
        place = self.places.gather(1, index // self.states.shape[1])
        return self.states[place.clamp_min(0) // self.rows.shape[1], index % self.states.shape[1]]


class Candidates(NamedTuple):
    """The likeliest tokens of every row, in vocabulary order."""

    ids: Tensor  # (B, K)
    inside: Tensor  # (B, K) whether it is plausible
    log_p: Tensor  # (B, K) the output distribution over the plausible ones, OUTSIDE elsewhere
    sizes: Tensor  # (B,) how many are plausible: exact if below K; 0 where no token is comparable


class Step(NamedTuple):
    """What a step gives; everything stays on the device."""

    scores: Tensor  # (B, V), -inf outside the plausible set; the logits themselves where a row is left as it is
    sizes: Tensor  # (B,) plausible tokens, -1 where a row is left as it is
    applied: Tensor  # (B,) whether a vision token was used
    changed: Tensor  # (B,) whether the likeliest token is another than before
    states: Tensor  # (B,) the selected vision state, -1 where none was
    weights: Tensor  # (B,) weight of the vision side, 0 where none was used
    refinements: tuple[reference.Refinement | None, ...] = ()  # of each row, where the reference took the step


@torch.no_grad()
def refine_logits(
    states: Tensor | Sequence[Tensor], head: Tensor | Projection, logits: Tensor, rule: Rule | None = None
) -> Tensor:
    """Scores of one decoding step, for people with their own loop.

    states: hidden states of each item's vision tokens, (items, n, d) or a list of (n, d), n = 0 without an image.
    head: the LM head's (V, d) weight, or a `LinearHead` with its bias and what the model does to its logits.
    logits: (B, V) of the step, B a multiple of the items: consecutive rows are copies of one item (beams).
    Returns (B, V) log-scores, -inf outside the plausible set; softmax and argmax of them are ReVisiT's.
    """
    blocks = StateBlocks.of_items(list(states), copies=len(logits) // len(states))
    projection = LinearHead(head) if isinstance(head, Tensor) else head
    return refine(logits, blocks, projection, rule or Rule()).scores


def refine(
    logits: Tensor,
    blocks: StateBlocks,
    head: Projection,
    rule: Rule,
    *,
    uniform: float | Tensor = 0.0,
    capacity: int | None = None,
) -> Step:
    """The step of all rows.  (B, V)

    With a capacity no value is read by the host; rows whose size reaches it must be taken again. Without one the
    capacity is the size of the largest set, which the host waits for.
    """
    return finish(logits, find_candidates(logits, rule, capacity), blocks, head, rule, uniform)


def find_candidates(logits: Tensor, rule: Rule, capacity: int | None) -> Candidates:
    """The plausible tokens, exactly as the reference finds them from log-probabilities, in `capacity` places."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    if capacity is None:
        keep = logp.isfinite() if rule.full_vocabulary else reference.plausible(logp, rule.alpha)
        capacity = max(1, int(keep.sum(-1).max()))
    ids = logp.topk(min(capacity, logp.shape[-1]), sorted=False).indices.sort(-1).values  # (B, K)
    top = logp.gather(-1, ids)
    inside = top.isfinite() if rule.full_vocabulary else reference.plausible(top, rule.alpha)
    log_p = top.masked_fill(~inside, OUTSIDE).log_softmax(-1)
    return Candidates(ids, inside, log_p, inside.sum(-1))


def finish(
    logits: Tensor, some: Candidates, blocks: StateBlocks, head: Projection, rule: Rule, uniform: float | Tensor
) -> Step:
    """The step of all rows whose candidates are known."""
    divergences = blocks.of_rows(all_divergences(some, blocks, head, rule))  # (B, N)
    index, shares = select(divergences, some.sizes, rule, uniform)  # (B, n)
    log_q = mixture(some, head.logits(blocks.chosen(index), some.ids, rule.model_dtype), shares, rule)  # (B, K)

    touched = blocks.seen & (some.sizes > 0)
    applied = touched & (some.sizes > 1) & (shares[:, 0] > 0)
    log_p = some.log_p
    weights = reference.vision_weight(log_p, log_q, rule.weight)
    fused = reference.fuse(log_p, log_q, rule.fusion, weights, rule.normalize)
    final = torch.where(applied[:, None], fused, log_p).masked_fill(~some.inside, -math.inf)
    kept = torch.where(touched[:, None], final.to(logits.dtype), logits.gather(-1, some.ids))
    scores = logits.masked_fill(touched[:, None], -math.inf).scatter_(-1, some.ids, kept)
    return Step(
        scores,
        some.sizes.masked_fill(~touched, -1),
        applied,
        applied & (final.argmax(-1) != log_p.argmax(-1)),
        index[:, 0].masked_fill(~applied, -1),
        weights.masked_fill(~applied, 0),
    )


def all_divergences(some: Candidates, blocks: StateBlocks, head: Projection, rule: Rule) -> Tensor:
    """Divergence of every vision state from the distributions of the rows that look at it.  -> (G, c, S)

    NaN for padding and for states that cannot be selected.
    """
    ids, inside, log_p = (x[blocks.rows] for x in some[:3])  # (G, c, K)
    sizes = inside.sum(-1, keepdim=True)  # (G, c, 1)
    largest = CPU_NUMBERS if ids.device.type == "cpu" else DEVICE_NUMBERS
    parts = []
    for states in blocks.states.split(max(1, largest // ids.numel()), dim=1):
        x = head.logits(states, ids.flatten(1), rule.model_dtype)  # (G, s, c · K)
        x = x.unflatten(-1, ids.shape[1:]).transpose(1, 2)  # (G, c, s, K)
        x = x.masked_fill(~inside[:, :, None], -math.inf if rule.model_dtype else OUTSIDE)
        usable = (x.abs() < LARGEST_LOGIT).sum(-1) == sizes
        value = divergence(log_p[:, :, None], inside[:, :, None], x, rule)
        parts.append(value.masked_fill(~usable, math.nan))
    return torch.cat(parts, dim=-1).masked_fill(~blocks.mask[:, None], math.nan)


def divergence(log_p: Tensor, inside: Tensor, x: Tensor, rule: Rule) -> Tensor:
    """The divergences of the reference, over the tokens inside.  (..., 1, K), (..., 1, K), (..., s, K) -> (..., s)

    With s = P + Q, the Jensen–Shannon divergence is ½ Σ (P ln P + Q ln Q − s ln s) + ln 2.
    """
    log_q = reference.log_softmax(x, rule.model_dtype)
    q = x.softmax(-1) if rule.model_dtype and rule.divergence == "official" else log_q.exp()
    p = log_p.exp()
    if rule.model_dtype:
        log_q = log_q.to(p.dtype).clamp_min(OUTSIDE)
    if rule.divergence == "official":
        m = 0.5 * (p + q)
        terms = m * (m.log() - 0.5 * (log_p + log_q))
        return torch.where(inside & (m > 0), terms, 0).sum(-1) / inside.sum(-1)
    if rule.divergence == "cosine":
        return 1 - torch.nn.functional.cosine_similarity(q, p, dim=-1)
    entropy = torch.xlogy(p, p).sum(-1)
    if rule.divergence == "kl":
        return entropy - (log_q * p).sum(-1)
    s = q + p.clamp_min(TINY)
    return 0.5 * (entropy + torch.addcmul(q * log_q, s, s.log(), value=-1).sum(-1)) + math.log(2)


def select(divergences: Tensor, sizes: Tensor, rule: Rule, uniform: float | Tensor) -> tuple[Tensor, Tensor]:
    """The selected states of every row and their shares in Q; shares of 0 where none can be.  (B, N) -> (B, n), (B, n)"""
    usable = ~divergences.isnan()
    if rule.select == "soft":
        shares = (-divergences / SOFT_TEMPERATURE).masked_fill(~usable, -math.inf).softmax(-1)
        order = shares.argsort(dim=-1, descending=True, stable=True)
        return order, shares.gather(-1, order).nan_to_num(0)
    if rule.select == "random":
        wanted = (uniform * usable.sum(-1, keepdim=True).double()).long()  # its number among the usable ones
        first = ((usable.cumsum(-1) - 1 == wanted) & usable).int().argmax(-1, keepdim=True)
        return first, usable.gather(-1, first).to(divergences.dtype)
    distance = (-divergences if rule.select == "max" else divergences).masked_fill(~usable, math.inf)
    if rule.neighbors > 1:
        nearest = distance.topk(min(rule.neighbors, distance.shape[-1]), largest=False).indices
        shares = usable.gather(-1, nearest).to(divergences.dtype)
        return nearest, shares / shares.sum(-1, keepdim=True).clamp_min(1)
    least = distance.amin(-1, keepdim=True)
    scale = 1 / sizes[:, None] if rule.divergence == "official" else 1.0
    reach = 0.0 if rule.model_dtype else RESOLUTION * (scale + least.abs())
    first = (distance <= least + reach).int().argmax(-1, keepdim=True)
    return first, usable.gather(-1, first).to(divergences.dtype)


def mixture(some: Candidates, x: Tensor, shares: Tensor, rule: Rule) -> Tensor:
    """log Q of the selected states.  (B, n, K), (B, n) -> (B, K)"""
    outside = -math.inf if rule.model_dtype else OUTSIDE
    log_q = reference.log_softmax(x.masked_fill(~some.inside[:, None], outside), rule.model_dtype)
    log_q = log_q.to(some.log_p.dtype)
    if shares.shape[1] == 1:
        return log_q[:, 0]
    return torch.logsumexp(log_q + shares[..., None].log(), 1)


# -- the steps of a run -------------------------------------------------------------------------------------------


def host_sync_is_cheap(device: torch.device) -> bool:
    """Whether values can be read without stopping a queue of work: true of the CPU only."""
    return device.type == "cpu"


class HostCopy:
    """Numbers copied asynchronously from the device to the host, before later kernels are queued."""

    def __init__(self, values: Tensor) -> None:
        self.event: Any = None
        self.values = values
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> Any:
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()


class BatchedStep:
    """Takes the steps of one run, with a capacity that follows the sizes of the plausible sets."""

    def __init__(self, blocks: StateBlocks, head: Projection, rule: Rule) -> None:
        self.blocks, self.head, self.rule = blocks, head, rule
        self.expected = 0.0  # plausible tokens that the next step should have room for; 0 before the first step

    def capacity(self) -> int | None:
        """Places for candidates in the next step; None where the size of the largest set is read first."""
        if not self.expected or self.rule.full_vocabulary:
            return None
        return next((capacity for capacity in CAPACITIES if capacity > self.expected), None)

    @torch.no_grad()
    def __call__(self, logits: Tensor, uniform: float | Tensor = 0.0, ended: Tensor | None = None) -> Step:
        """One step of all rows, ended ones too; on a GPU the host waits once, for sizes that were copied before most of the work."""
        capacity = None if host_sync_is_cheap(logits.device) else self.capacity()
        candidates = find_candidates(logits, self.rule, capacity)
        sizes = None if host_sync_is_cheap(logits.device) else HostCopy(candidates.sizes.amax())
        step = finish(logits, candidates, self.blocks, self.head, self.rule, uniform)
        if sizes is not None:
            largest = sizes.read()
            self.expected = max(1.5 * largest, 0.9 * self.expected)
            if capacity is not None and capacity <= largest < logits.shape[-1]:
                return refine(logits, self.blocks, self.head, self.rule, uniform=uniform)
        return step
