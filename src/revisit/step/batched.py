"""ReVisiT's step for a whole batch at once, in torch, on any device.

The states of all rows are one tensor (`StateBlocks`), in the model's dtype on a GPU. The candidates of every row are its
`capacity` likeliest tokens, of which implausible ones are masked. One gather of head rows and one batched product give the
logits of all vision tokens. Nothing loops over images or rows, and with a capacity the host reads no value. `BatchedStep`
repeats the step of rows whose plausible sets exceed the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from revisit.models.parts import LARGEST_LOGIT, Projection
from revisit.step import reference
from revisit.step.interface import (
    INFINITY,
    SOFT_TEMPERATURE,
    RowDetail,
    RowStates,
    StateBlocks,
    Step,
    StepOutput,
    to_device,
)
from revisit.step.rule import AdaptiveWeight, Rule

# Logits of vision tokens that are compared at a time: what fits a CPU's cache, and 128 MB on a GPU.
CPU_NUMBERS, DEVICE_NUMBERS = 1 << 19, 1 << 25
# A tensor on the host, like INFINITY: writing a Python number to the device would take a kernel of its own.
MINUS_INFINITY = torch.tensor(-math.inf)
# Logit of an implausible token: the least that a plausible one may have, so that its probability is 0.
OUTSIDE = torch.tensor(-LARGEST_LOGIT).nextafter(torch.tensor(0.0))
TINY = 1e-37  # smallest probability whose logarithm is taken


class Candidates(NamedTuple):
    """The likeliest tokens of every row, the likeliest first."""

    ids: Tensor  # (B, K)
    inside: Tensor  # (B, K) whether each is plausible
    log_p: Tensor  # (B, K) the output distribution over the plausible ones, -inf elsewhere
    sizes: Tensor  # (B,) plausible tokens, also beyond K; 0 for ended rows and logits that are not a distribution


# -- steps with room for the candidates of most rows ---------------------------------------------------------------

CAPACITIES: tuple[int, ...] = (*(size << power for power in range(4, 12) for size in (2, 3)), 8192)  # 32, 48, 64, 96, …
# Numbers of the LM head that are copied at a time for the candidates of all blocks: what fits a CPU's cache, and 1 GB on a GPU.
CPU_HEAD_NUMBERS, HEAD_NUMBERS = 1 << 22, 1 << 28
USUAL = 128  # candidates for which all blocks are compared at once
LARGE = 512  # sets above this size do not raise the expectation for the next step,
FEW = 16  # unless more than one row in this many has one


class BatchedStep(Step):
    """Takes steps of a set of rows, which may change from step to step.

    The capacity follows the sizes of the last step's plausible sets, which the host reads from a copy that is started early
    and waited for once. The few rows with larger sets are repeated with more room, in parts, so that a flat distribution does
    not enlarge the step of other rows and memory is bounded. On a CPU, and in the first step, the sizes are read first.
    """

    name = "torch"

    def __init__(self, head: Projection, rule: Rule, room: int | None = None, record: bool = False) -> None:
        self.head, self.rule, self.room, self.record = head, rule, room, record
        self.expected = 0.0  # candidates expected for most rows; 0 before the first step

    @torch.no_grad()
    def take(
        self,
        logits: Tensor,
        states: RowStates,
        uniform: float | Tensor = 0.0,
        ended: Tensor | None = None,
        written: Tensor | None = None,
    ) -> StepOutput:
        """Take one step of all rows; see `interface.Step`."""
        blocks, counts = states.blocks(), states.counts
        numbers = CPU_HEAD_NUMBERS if logits.is_cpu else HEAD_NUMBERS
        room = self.room or room_for(sum(counts), blocks.states.shape[-1], numbers)
        most = room // max(1, sum(counts))
        first = host_sync_is_cheap(logits.device) or not self.expected
        capacity = None if first else fitting(self.expected, most)
        candidates = find_candidates(logits, self.rule, capacity, ended, most)
        early = HostCopy(candidates.sizes)
        output = finish(logits, candidates, blocks, self.head, self.rule, uniform, written, self.record)
        sizes = early.read()
        for part in larger_rows(sizes, candidates.ids.shape[1], counts, room):
            index = to_device(np.array(part), logits.device)
            candidates = find_candidates(logits[index], self.rule, max(sizes[row] for row in part))
            draws = uniform[index] if isinstance(uniform, Tensor) else uniform
            tokens = None if written is None else written[index]
            again = finish(
                logits[index], candidates, states.blocks(part), self.head, self.rule, draws, tokens, self.record
            )
            output = replace_rows(output, again, part, index)
        self.expected = max(1.5 * usual_size(sizes), 0.9 * self.expected)
        return output


def replace_rows(output: StepOutput, again: StepOutput, rows: Sequence[int], index: Tensor) -> StepOutput:
    """Replace the rows of a step that were repeated, in place."""
    for whole, part in zip(output, again, strict=True):
        if isinstance(whole, Tensor) and isinstance(part, Tensor):
            whole[index] = part
    details = dict(zip(rows, again.details, strict=False))
    return output._replace(details=tuple(details.get(row, before) for row, before in enumerate(output.details)))


class HostCopy:
    """A copy of whole numbers from the device to the host, started before later kernels are queued."""

    def __init__(self, values: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        self.values = values
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> list[int]:
        """Wait for the copy, and return the numbers."""
        if self.event is not None:
            self.event.synchronize()
        numbers: list[int] = self.values.tolist()
        return numbers


def host_sync_is_cheap(device: torch.device) -> bool:
    """Whether values can be read without waiting for queued work: true for the CPU only."""
    return device.type == "cpu"


def room_for(blocks: int, width: int, numbers: int = HEAD_NUMBERS) -> int:
    """Return how many blocks times candidates may be compared at once, for this many blocks of states of this width."""
    return max(blocks * USUAL, numbers // width)


def usual_size(sizes: Sequence[int]) -> int:
    """Return the size of the largest plausible set, ignoring a few very large ones."""
    ordered = sorted(sizes, reverse=True)
    return ordered[0] if ordered[0] <= LARGE else ordered[len(ordered) // FEW]


def fitting(expected: float, most: int) -> int:
    """Return the smallest capacity above the expected size, and not above `most`."""
    allowed = [capacity for capacity in CAPACITIES if capacity <= most] or CAPACITIES[:1]
    return next((capacity for capacity in allowed if capacity > expected), allowed[-1])


def larger_rows(sizes: Sequence[int], capacity: int, counts: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield the rows whose sets exceed the capacity, in parts of similar sizes that fit the room."""
    limits = [capacity, *[limit for limit in CAPACITIES if limit > capacity][1::2], max(sizes)]
    for small, large in pairwise(limits):
        larger = [row for row, size in enumerate(sizes) if small < size <= large]
        yield from split(larger, counts, room // max(1, large))


def split(rows: Sequence[int], counts: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield parts of consecutive rows with at most this many blocks in total; a row with more is alone."""
    part: list[int] = []
    for row in rows:
        if part and sum(counts[other] for other in part) + counts[row] > most:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


# -- one step ------------------------------------------------------------------------------------------------------


def refine_batch(
    logits: Tensor,
    blocks: StateBlocks,
    head: Projection,
    rule: Rule,
    *,
    uniform: float | Tensor = 0.0,
    capacity: int | None = None,
    ended: Tensor | None = None,
    written: Tensor | None = None,
) -> StepOutput:
    """Take one step of all rows. With a capacity the host reads no value, and rows with larger sets are wrong."""
    return finish(logits, find_candidates(logits, rule, capacity, ended), blocks, head, rule, uniform, written)


def find_candidates(
    logits: Tensor, rule: Rule, capacity: int | None, ended: Tensor | None = None, most: int | None = None
) -> Candidates:
    """Return the plausible tokens, exactly as the reference finds them from log-probabilities, in `capacity` places.

    Without a capacity, there are as many places as the largest set needs, at most `most`; the host waits for its size.
    """
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    sizes = None
    if capacity is None:
        sizes = count(logp, rule, ended)
        capacity = max(1, int(sizes.max()))
        capacity = capacity if most is None else min(capacity, max(CAPACITIES[0], most))
    top, ids = logp.topk(min(capacity, logp.shape[-1]))  # (B, K), descending
    inside = reference.plausible(top, rule.threshold, top[:, :1])
    log_p = torch.where(inside, top, MINUS_INFINITY).log_softmax(-1)
    return Candidates(ids, inside, log_p, count(logp, rule, ended, top[:, :1]) if sizes is None else sizes)


def count(logp: Tensor, rule: Rule, ended: Tensor | None, largest: Tensor | None = None) -> Tensor:
    """Return the sizes of the plausible sets; 0 for ended rows, whose sets may be of any size.  (B, V) -> (B,)"""
    sizes = reference.plausible(logp, rule.threshold, largest).sum(-1)
    return sizes if ended is None or len(sizes) == 1 else sizes.masked_fill_(ended.to(sizes.device), 0)


def finish(
    logits: Tensor,
    candidates: Candidates,
    blocks: StateBlocks,
    head: Projection,
    rule: Rule,
    uniform: float | Tensor = 0.0,
    written: Tensor | None = None,
    record: bool = False,
) -> StepOutput:
    """Complete the step of all rows from their candidates."""
    compared, xs = compare(candidates, blocks, head, rule)
    distances = blocks.by_row(compared)  # (B, N)
    index, selected = select(distances, candidates.sizes, rule, uniform)  # (B, n)
    if xs is not None:
        x = blocks.pick(xs, index)  # (B, n, K)
    else:
        states = blocks.pick(blocks.states[:, :, None].expand(-1, -1, blocks.rows.shape[1], -1), index)  # (B, n, d)
        x = mask(head.logits(states, candidates.ids, rule.model_dtype), candidates.inside[:, None], rule)
    log_q = log_distribution(x, rule)
    log_q = log_q[:, 0] if index.shape[1] == 1 else mean(log_q, index, selected, distances, rule)  # (B, K)
    if rule.fusion == "interpolation":
        log_q = torch.where(candidates.inside, log_q, MINUS_INFINITY)
    weights = rule.weight if not isinstance(rule.weight, str) else vision_weight(candidates.log_p, log_q, rule.weight)
    if rule.once and written is not None:
        repeated = contains(written, candidates.ids, logits.shape[1])
        log_q = reference.limit(candidates.log_p, log_q, repeated, rule.once)
    if rule.fusion == "poe" and isinstance(weights, Tensor):
        fused = torch.addcmul(candidates.log_p, weights[:, None], log_q)  # log Q is finite here: 0 · log Q is 0
        fused = fused.log_softmax(-1) if rule.normalize else fused
    else:
        fused = reference.fuse(candidates.log_p, log_q, rule.fusion, weights, rule.normalize)

    touched = (
        candidates.inside[:, :1] if blocks.seen is None else candidates.inside[:, :1] & blocks.seen[:, None]
    )  # (B, 1)
    several = (
        candidates.inside[:, 1:2] if candidates.inside.shape[1] > 1 else candidates.sizes[:, None] > 1
    )  # the likeliest come first
    applied = several & selected[:, :1]
    final = torch.where(applied, fused, candidates.log_p)
    kept = torch.where(touched, final.to(logits.dtype), logits.gather(-1, candidates.ids))
    scores = torch.where(touched, MINUS_INFINITY, logits).scatter_(-1, candidates.ids, kept)
    before = candidates.log_p.gather(-1, final.argmax(-1, keepdim=True))  # (B, 1), of what is now the likeliest
    changed = (before < candidates.log_p[:, :1])[:, 0]  # never where nothing was applied
    output = StepOutput(scores, candidates.sizes, applied[:, 0], changed, index[:, 0], weights, blocks.seen)
    if not record:
        return output
    return output._replace(details=record_rows(output, candidates, blocks, rule, distances, log_q, final))


def contains(written: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Return which ids are among the written tokens of their row; -1 is no token.  (B, n), (B, K) -> (B, K)"""
    marks = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return marks.scatter_(1, written.remainder(vocabulary + 1), True).gather(1, ids)


def record_rows(
    output: StepOutput,
    candidates: Candidates,
    blocks: StateBlocks,
    rule: Rule,
    distances: Tensor,
    log_q: Tensor,
    final: Tensor,
) -> tuple[RowDetail | None, ...]:
    """Return the details of each row in the reference's form; None for rows that are left unchanged."""
    divergences, real = divergences_of(distances, candidates.log_p, rule), blocks.real_by_row()  # (B, N)
    weights = output.weights if isinstance(output.weights, Tensor) else final.new_full((len(final),), output.weights)
    rows: list[RowDetail | None] = []
    for row, inside in enumerate(candidates.inside):
        if not bool(real[row].any()) or not bool(inside.any()):
            rows.append(None)
            continue
        place = inside.nonzero().squeeze(-1)
        place = place[candidates.ids[row, place].argsort()]  # in vocabulary order
        applied = bool(output.applied[row])
        state = int(real[row, : output.states[row]].sum()) if applied else -1
        rows.append(
            RowDetail(
                ids=candidates.ids[row, place],
                base=candidates.log_p[row, place],
                vision=(log_q if applied else candidates.log_p)[row, place],
                final=final[row, place],
                state=state,
                divergences=divergences[row, real[row]] if len(place) > 1 else None,
                weight=float(weights[row]) if applied else 0.0,
            )
        )
    return tuple(rows)


def compare(candidates: Candidates, blocks: StateBlocks, head: Projection, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Return the distance of every vision state from the rows that share it, and its masked logits.  -> (G, S, c), (G, S, c, K)

    The distance is inf for padding and for states that cannot be selected. Large batches are compared in slices, whose
    logits are not returned.
    """
    ids = blocks.by_block(candidates.ids)  # (G, c, K)
    inside, log_p = (blocks.by_block(x)[:, None] for x in (candidates.inside, candidates.log_p))
    # On a GPU, four tensors of this many float32 numbers stay below a quarter of the states in half precision.
    largest = CPU_NUMBERS if ids.device.type == "cpu" else max(DEVICE_NUMBERS, blocks.states.numel() // 32)
    slices = blocks.states.split(max(1, largest // ids.numel()), dim=1)
    parts = []
    for states in slices:
        x = head.logits(states, ids.flatten(1), rule.model_dtype)  # (G, s, c · K)
        x = mask(x.unflatten(-1, ids.shape[1:]), inside, rule)  # (G, s, c, K)
        parts.append(torch.where(usable(x, inside, rule), distance(log_p, x, inside, rule), INFINITY))
    distances = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    if blocks.mask is not None:
        distances = torch.where(blocks.mask[..., None], distances, INFINITY)
    return distances, x if len(slices) == 1 else None


# -- distributions over padded sets of candidates ------------------------------------------------------------------
# The reference's formulas for (rows, states, candidates) at once, with implausible candidates masked.


def mask(x: Tensor, inside: Tensor, rule: Rule) -> Tensor:
    """Keep the logits of plausible tokens, and set the others so low that their probability is 0."""
    return torch.where(inside, x, MINUS_INFINITY if rule.model_dtype else OUTSIDE)


def usable(x: Tensor, inside: Tensor, rule: Rule) -> Tensor:
    """Return which states have no NaN and no logit beyond LARGEST_LOGIT for a plausible token.  (..., s, K) -> (..., s)"""
    if rule.model_dtype:
        x = torch.where(inside, x, 0.0)
    # A norm is one kernel on a GPU, and slow on a CPU.
    largest = x.abs().amax(-1) if x.is_cpu else torch.linalg.vector_norm(x, math.inf, -1)
    return largest < LARGEST_LOGIT


def log_distribution(x: Tensor, rule: Rule) -> Tensor:
    """Return log Q from masked logits, in at least float32, and finite."""
    log_q = reference.log_softmax(x, rule.model_dtype)
    return log_q.float().clamp_min(OUTSIDE.item()) if rule.model_dtype else log_q


def entropy(p: Tensor) -> Tensor:
    """Return −Σ p ln p.  (..., K) -> (...)"""
    # torch's own is one kernel on a GPU, and slow on a CPU.
    return -p.clamp_min(TINY).log_().mul_(p).sum(-1) if p.is_cpu else torch.special.entr(p).sum(-1)


def distance(log_p: Tensor, x: Tensor, inside: Tensor, rule: Rule) -> Tensor:
    """Return the reference's divergence from masked logits, negated for select="max".  (..., 1, K), (..., s, K), (..., 1, K) -> (..., s)

    For the Jensen–Shannon divergence this is H(M) − ½ H(Q), without the term that depends on P alone.
    """
    rounded = rule.model_dtype and rule.divergence != "official"  # the released code rounds Q on its own
    q = log_distribution(x, rule).exp() if rounded else x.softmax(-1)
    p = log_p.exp()
    if rule.divergence == "jsd":
        value = torch.sub(entropy(torch.lerp(q, p.to(q.dtype), 0.5)), entropy(q), alpha=0.5)
    elif rule.divergence == "cosine":
        value = 1 - torch.nn.functional.cosine_similarity(q, p, dim=-1)
    else:
        log_q = log_distribution(x, rule)
        if rule.divergence == "official":
            m = 0.5 * (p + q)
            terms = torch.where(m > 0, m * (m.log() - 0.5 * (log_p + log_q)), 0) / inside.sum(-1, keepdim=True)
        else:
            terms = p * (log_p - log_q)
        value = torch.where(inside, terms, 0).sum(-1)
    return -value if rule.select == "max" else value


def divergences_of(distances: Tensor, log_p: Tensor, rule: Rule) -> Tensor:
    """Return the divergences for distances, NaN for states that cannot be selected.  (B, N), (B, K) -> (B, N)"""
    values = -distances if rule.select == "max" else distances
    if rule.divergence == "jsd":
        values = values - 0.5 * entropy(log_p.exp())[:, None]
    return values.masked_fill(distances.isinf(), math.nan)


def select(distances: Tensor, sizes: Tensor, rule: Rule, uniform: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the selected states of every row, the best first, and which of them can be selected.  (B, N) -> (B, n), (B, n)"""
    if rule.select == "random":
        finite = distances < math.inf
        wanted = (uniform * finite.sum(-1, keepdim=True).double()).long()  # index among the usable ones
        first = ((finite.cumsum(-1) - 1 == wanted) & finite).int().argmax(-1, keepdim=True)
        return first, finite.gather(-1, first)
    least = distances.amin(-1, keepdim=True)
    if rule.select != "soft" and rule.neighbors == 1:
        equal = distances - least <= 0.5 * reference.resolution(least, sizes[:, None], rule)  # inf − inf is not
        found, first = equal.max(-1, keepdim=True)
        return first, found
    steps, order = reference.quantized_distance(distances, least, sizes[:, None], rule).sort(dim=-1, stable=True)
    count = order.shape[1] if rule.select == "soft" else rule.neighbors
    return order[:, :count], steps[:, :count] < math.inf  # inf and NaN come last


def mean(log_q: Tensor, index: Tensor, selected: Tensor, distances: Tensor, rule: Rule) -> Tensor:
    """Return the log of the mean of the selected distributions, weighted by nearness for select="soft".

    (B, n, K), (B, n), (B, n), (B, N) -> (B, K)
    """
    equal = rule.select != "soft" and not rule.model_dtype  # rounded distributions do not sum to 1
    if not equal:
        shares = distances.gather(-1, index) / -SOFT_TEMPERATURE if rule.select == "soft" else distances.new_zeros(())
        log_q = log_q + torch.where(selected, shares, MINUS_INFINITY).softmax(-1).log()[..., None]
    parts = torch.where(selected[..., None], log_q, MINUS_INFINITY)
    total = parts.amax(1) - parts.log_softmax(1).amax(1)  # log Σ exp, for which torch takes nine kernels
    return total.log_softmax(-1) if equal else total


def vision_weight(log_p: Tensor, log_q: Tensor, weight: AdaptiveWeight) -> Tensor:
    """Return the reference's adaptive weight; the likeliest token comes first.  (B, K), (B, K) -> (B,)"""
    values = []
    if weight != "uncertainty":  # 1 − JSD / ln 2
        both = torch.stack([log_p, log_q])
        terms = both.exp() * (both - torch.logaddexp(log_p, log_q))
        values.append((terms.nansum((0, 2)) * (-0.5 / math.log(2))).clamp(0, 1))
    if weight != "agreement":
        values.append(torch.expm1(log_p[:, 0]).abs().sqrt())
    return values[0] if len(values) == 1 else values[0] * values[1]
