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
from revisit.step.rule import LARGEST_LOGIT, SOFT_TEMPERATURE, Rule

CAPACITIES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
OUTSIDE = torch.tensor(-4 * LARGEST_LOGIT)  # logit of a token that is not plausible: probability 0, and finite
# Tensors of the host, because a Python number would first be written to the device by a kernel of its own.
INFINITY, MINUS_INFINITY = torch.tensor(math.inf), torch.tensor(-math.inf)
TINY = 1e-37  # smallest probability whose logarithm is taken
CPU_NUMBERS, DEVICE_NUMBERS = 1 << 19, 1 << 22  # logits of vision tokens compared at a time, on a GPU at least


@dataclass(frozen=True)
class StateBlocks:
    """The vision states of a batch: G blocks of S states, each looked at by c rows (sequences) of the batch.

    Padded blocks (`table` None) belong to c consecutive rows each; pooled blocks to one row, which may own several.
    """

    states: Tensor  # (G, S, d)
    mask: Tensor | None  # (G, S) False for padding; None where there is none
    rows: Tensor  # (G, c) the rows that look at a block; any row where nobody does
    table: Tensor | None = None  # (B, M) the blocks of each row in order, -1 behind the last
    seen: Tensor | None = None  # (B,) whether a row has vision states; None where all rows have

    @classmethod
    def padded(cls, states: Tensor, mask: Tensor, copies: int = 1) -> StateBlocks:
        """One block an item, shared by consecutive rows that are its copies (beams, return sequences)."""
        rows = torch.arange(len(states) * copies, device=states.device).view(-1, copies)
        if bool(mask.all()):
            return cls(states, None, rows)
        return cls(states, mask, rows, None, mask.any(-1)[:, None].expand_as(rows).flatten())

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
        spare = torch.zeros(len(pool) + 1, dtype=torch.long, device=pool.device)  # -1 lands behind the last block
        rows = spare.scatter(0, table.remainder(len(pool) + 1).flatten(), owner.flatten())[:-1, None]
        return cls(pool, mask, rows, table, (table >= 0).any(-1))

    def by_block(self, values: Tensor) -> Tensor:
        """Values of rows, for the rows that look at each block.  (B, K) -> (G, c, K), (B,) -> (G, c, 1)"""
        wide = values.view(len(values), -1)
        return wide.view(*self.rows.shape, -1) if self.table is None else wide[self.rows]

    def by_row(self, values: Tensor) -> Tensor:
        """Values of the states that each row looks at; inf where it has fewer.  (G, c, S) -> (B, M · S)"""
        if self.table is None:
            return values.flatten(0, 1)
        return torch.where(self.table[..., None] < 0, INFINITY, values[self.table, 0]).flatten(1)

    def places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where the states of rows are, by their number in `by_row`: block · c + looking row, and offset.  (B, n)"""
        if self.table is None:
            return self.rows.view(-1, 1), index
        return self.table.gather(1, index // self.states.shape[1]), index % self.states.shape[1]


class Candidates(NamedTuple):
    """The likeliest tokens of every row, the likeliest first."""

    ids: Tensor  # (B, K)
    inside: Tensor  # (B, K) whether it is plausible
    log_p: Tensor  # (B, K) the output distribution over the plausible ones, OUTSIDE elsewhere
    sizes: Tensor  # (B,) how many are plausible: exact if below K; 0 where the logits are no distribution


class Step(NamedTuple):
    """What a step gives; everything stays on the device."""

    scores: Tensor  # (B, V), -inf outside the plausible set; the logits themselves where a row is left as it is
    sizes: Tensor  # (B,) plausible tokens; 0 where the logits are no distribution
    applied: Tensor  # (B,) whether a vision token was used
    changed: Tensor  # (B,) whether the likeliest token was not the likeliest before
    states: Tensor  # (B,) the selected vision state, where one was used
    weights: Tensor | float  # (B,) weight of the vision side, where one was used
    seen: Tensor | None = None  # (B,) whether a row has vision states; None where all rows have
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
    top, ids = logp.topk(min(capacity, logp.shape[-1]))  # (B, K), descending
    inside = top.isfinite() if rule.full_vocabulary else top >= top[:, :1] + math.log(rule.alpha)
    log_p = torch.where(inside, top, OUTSIDE).log_softmax(-1)
    return Candidates(ids, inside, log_p, inside.sum(-1))


def finish(
    logits: Tensor, some: Candidates, blocks: StateBlocks, head: Projection, rule: Rule, uniform: float | Tensor
) -> Step:
    """The step of all rows whose candidates are known."""
    distances, log_qs = compare(some, blocks, head, rule)
    index, shares = select(blocks.by_row(distances), some.sizes, rule, uniform)  # (B, n)
    place, offset = blocks.places(index)
    if log_qs is not None:
        log_q = log_qs.flatten(0, 1)[place, offset]  # (B, n, K)
    else:
        x = head.logits(blocks.states[place // blocks.rows.shape[1], offset], some.ids, rule.model_dtype)
        log_q = log_distribution(torch.where(some.inside[:, None], x, outside(rule)), rule)
    log_q = log_q[:, 0] if shares.shape[1] == 1 else mean_by_shares(log_q, shares[..., None])  # (B, K)
    weight = rule.weight
    weights = reference.vision_weight(some.log_p, log_q, weight) if isinstance(weight, str) else weight
    fused = reference.fuse(some.log_p, log_q, rule.fusion, weights, rule.normalize)

    touched = some.sizes > 0 if blocks.seen is None else (some.sizes > 0) & blocks.seen
    applied = (some.sizes > 1) & (shares[:, 0] > 0)  # a row without vision states has no shares
    final = torch.where(some.inside, torch.where(applied[:, None], fused, some.log_p), MINUS_INFINITY)
    kept = torch.where(touched[:, None], final.to(logits.dtype), logits.gather(-1, some.ids))
    scores = torch.where(touched[:, None], MINUS_INFINITY, logits).scatter_(-1, some.ids, kept)
    before = some.log_p.gather(-1, final.argmax(-1, keepdim=True))  # (B, 1), of what is now the likeliest
    changed = (before < some.log_p[:, :1])[:, 0]  # never where nothing was applied
    return Step(scores, some.sizes, applied, changed, index[:, 0], weights, blocks.seen)


def mean_by_shares(log_q: Tensor, shares: Tensor) -> Tensor:
    """The log of the mean of several distributions.  (B, n, K), (B, n, 1) -> (B, K)"""
    return torch.logsumexp(torch.where(shares > 0, log_q + shares.log(), MINUS_INFINITY), 1).clamp_min(OUTSIDE.item())


def compare(some: Candidates, blocks: StateBlocks, head: Projection, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """How far every vision state is from the rows that look at it, and its log-distribution.  -> (G, c, S), (G, c, S, K)

    The distance is inf for padding and for states that cannot be selected. What is too large to be held at once is
    compared in slices, and the distributions are not kept.
    """
    ids, inside, log_p, sizes = (blocks.by_block(x) for x in some)  # (G, c, K), sizes (G, c, 1)
    inside, log_p = inside[:, :, None], log_p[:, :, None]
    # On a GPU, four tensors of this many float32 numbers stay below a quarter of the states in half precision.
    largest = CPU_NUMBERS if ids.device.type == "cpu" else max(DEVICE_NUMBERS, blocks.states.numel() // 32)
    slices = blocks.states.split(max(1, largest // ids.numel()), dim=1)
    parts = []
    for states in slices:
        x = head.logits(states, ids.flatten(1), rule.model_dtype)  # (G, s, c · K)
        x = x.unflatten(-1, ids.shape[1:]).transpose(1, 2)  # (G, c, s, K)
        x = torch.where(inside, x, outside(rule))
        log_q = log_distribution(x, rule)
        usable = (x.abs() < LARGEST_LOGIT).sum(-1) == sizes
        parts.append(torch.where(usable, distance(log_p, log_q, inside, x, rule), INFINITY))
    distances = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    if blocks.mask is not None:
        distances = torch.where(blocks.mask[:, None], distances, INFINITY)
    return distances, log_q if len(slices) == 1 else None


def outside(rule: Rule) -> Tensor:
    """The logit of a token that is not plausible."""
    return MINUS_INFINITY if rule.model_dtype else OUTSIDE


def log_distribution(x: Tensor, rule: Rule) -> Tensor:
    """log Q from logits that are `outside` where a token is not plausible; in float32 at least, and finite."""
    log_q = reference.log_softmax(x, rule.model_dtype)
    return log_q.float().clamp_min(OUTSIDE.item()) if rule.model_dtype else log_q


def distance(log_p: Tensor, log_q: Tensor, inside: Tensor, x: Tensor, rule: Rule) -> Tensor:
    """The reference's divergence, negative for select="max".  (..., 1, K), (..., s, K), (..., 1, K) -> (..., s)

    With s = P + Q, the Jensen–Shannon divergence is ½ Σ (Q ln Q − s ln s) and what depends on P alone, which is left out.
    """
    p, q = log_p.exp(), log_q.exp()
    if rule.divergence == "official":
        if rule.model_dtype:  # the released code rounds Q by itself
            q = x.softmax(-1)
        m = 0.5 * (p + q)
        terms = m * (m.log() - 0.5 * (log_p + log_q))
        value = torch.where(inside & (m > 0), terms, 0).sum(-1) / inside.sum(-1)
    elif rule.divergence == "cosine":
        value = 1 - torch.nn.functional.cosine_similarity(q, p, dim=-1)
    elif rule.divergence == "kl":
        value = (p * (log_p - log_q)).sum(-1)
    else:
        s = q + p.clamp_min(TINY)
        value = 0.5 * q.mul_(log_q).addcmul_(s, s.log(), value=-1).sum(-1)
    return -value if rule.select == "max" else value


def select(distances: Tensor, sizes: Tensor, rule: Rule, uniform: float | Tensor) -> tuple[Tensor, Tensor]:
    """The selected states of every row and their shares in Q; shares of 0 where none can be.  (B, N) -> (B, n), (B, n)"""
    if rule.select == "random":
        usable = distances < math.inf
        wanted = (uniform * usable.sum(-1, keepdim=True).double()).long()  # its number among the usable ones
        first = ((usable.cumsum(-1) - 1 == wanted) & usable).int().argmax(-1, keepdim=True)
        return first, usable.gather(-1, first).to(distances.dtype)
    least = distances.amin(-1, keepdim=True)
    apart = reference.steps_apart(distances, least, sizes[:, None], rule)
    if rule.select != "soft" and rule.neighbors == 1:
        return apart.argmin(-1, keepdim=True), least < math.inf
    order = apart.argsort(dim=-1, stable=True)
    if rule.select == "soft":
        return order, (-distances / SOFT_TEMPERATURE).softmax(-1).nan_to_num(0).gather(-1, order)
    nearest = order[:, : rule.neighbors]
    shares = (distances.gather(-1, nearest) < math.inf).to(distances.dtype)
    return nearest, shares / shares.sum(-1, keepdim=True).clamp_min(1)


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
        sizes = None if host_sync_is_cheap(logits.device) else HostCopy(candidates.sizes)
        step = finish(logits, candidates, self.blocks, self.head, self.rule, uniform)
        if sizes is not None:
            largest = max(sizes.read())
            self.expected = max(1.5 * largest, 0.9 * self.expected)
            if capacity is not None and capacity <= largest < logits.shape[-1]:
                step = refine(logits, self.blocks, self.head, self.rule, uniform=uniform)
                self.expected = 1.5 * int(step.sizes.max())
        return step
