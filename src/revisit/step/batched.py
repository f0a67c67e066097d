"""ReVisiT's usual step for a whole batch at once, in torch, on any device.

It is used on accelerators where the Triton step does not apply. The candidates of every row are its likeliest tokens, as many as there
are in the largest plausible set; implausible ones are masked. One gather of head rows and one batched product give the logits of all
vision states. Nothing loops over images, and the host reads only the sizes of the sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from revisit.models.head import LARGEST_LOGIT, LinearHead, constant
from revisit.step import reference
from revisit.step.interface import RESOLUTION, RowStates, Step, StepInput, StepOutput, to_device
from revisit.step.rule import AdaptiveWeight, Rule

NUMBERS = 1 << 25  # logits of vision states that are compared at a time, 128 MB
COPIED = 1 << 28  # numbers of the LM head, and of states, that are copied at a time
USUAL = 128  # candidates for which all rows are compared at once
# Logit of an implausible token: the least that a plausible one may have, which gives it probability 0.
OUTSIDE = torch.tensor(-LARGEST_LOGIT).nextafter(torch.tensor(0.0)).item()


class Candidates(NamedTuple):
    """The likeliest tokens of every row, the likeliest first."""

    ids: Tensor  # (B, K)
    inside: Tensor  # (B, K) whether each is plausible
    log_p: Tensor  # (B, K) the output distribution over the plausible ones, -inf elsewhere
    sizes: Tensor  # (B,) plausible tokens, which may be more than K; 0 for ended rows and logits that are not a distribution


class BatchedStep(Step):
    """The step of all rows at once; the rows may change from step to step.

    Rows with much larger plausible sets are computed after the others, so that one flat distribution does not enlarge the step
    of all rows.
    """

    name = "torch"

    @torch.no_grad()
    def take(self, inputs: StepInput) -> StepOutput:
        logits, states, _, ended, written = inputs
        logp = log_probabilities(logits)
        sizes = count(logp, self.rule, ended)
        set_sizes: list[int] = sizes.tolist()
        parts = split(set_sizes, states)
        if len(parts) == 1:
            candidates = find_candidates(logp, sizes, max(set_sizes))
            return finish(logits, candidates, states, self.head, self.rule, written)
        outputs = []
        for part in parts:
            index = to_device(np.array(part), logits.device)
            candidates = find_candidates(logp[index], sizes[index], max(set_sizes[row] for row in part))
            tokens = None if written is None else written[index]
            outputs.append(finish(logits[index], candidates, states.rows(part), self.head, self.rule, tokens))
        return merge(outputs, parts)

    @torch.no_grad()
    def reserve(self, logits: Tensor, states: RowStates) -> None:
        part = split([USUAL] * min(len(logits), len(states)), states)[0]
        refine_batch(logits[: len(part)], states.rows(part), self.head, self.rule, USUAL)


def split(sizes: Sequence[int], states: RowStates) -> list[list[int]]:
    """Split rows into parts that copy at most COPIED numbers each, small sets first; a row that copies more is a part."""
    copied = 0 if states.in_place else states.longest  # states of each row
    room = max(COPIED // states.states.shape[-1], len(sizes) * USUAL)
    parts: list[list[int]] = [[]]
    for row in sorted(range(len(sizes)), key=lambda row: sizes[row]):
        if parts[-1] and (1 + len(parts[-1])) * (sizes[row] + copied) > room:
            parts.append([])
        parts[-1].append(row)
    return [sorted(part) for part in parts]


def merge(outputs: Sequence[StepOutput], parts: Sequence[Sequence[int]]) -> StepOutput:
    """Merge the outputs of parts of the rows, in the order of the rows."""
    index = to_device(np.argsort(np.concatenate(parts)), outputs[0].scores.device)
    fields: list[Any] = [torch.cat(x)[index] if isinstance(x[0], Tensor) else x[0] for x in zip(*outputs, strict=True)]
    return StepOutput(*fields)


# -- one step ------------------------------------------------------------------------------------------------------


def refine_batch(
    logits: Tensor, states: RowStates, head: LinearHead, rule: Rule, capacity: int, ended: Tensor | None = None
) -> StepOutput:
    """Take one step of all rows without waiting for the device; wrong for rows with more than `capacity` plausible tokens."""
    logp = log_probabilities(logits)
    candidates = find_candidates(logp, count(logp, rule, ended), capacity)
    return finish(logits, candidates, states, head, rule)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-probabilities in at least float32; NaN in rows that are not a distribution.  (B, V) -> (B, V)"""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def count(logp: Tensor, rule: Rule, ended: Tensor | None) -> Tensor:
    """Return the sizes of the plausible sets; 0 for ended rows.  (B, V) -> (B,)"""
    sizes = reference.plausible(logp, rule.threshold).sum(-1)
    return sizes if ended is None else sizes.masked_fill_(ended.to(sizes.device), 0)


def find_candidates(logp: Tensor, sizes: Tensor, capacity: int) -> Candidates:
    """Return the `capacity` likeliest tokens of each row, the plausible ones first."""
    top, ids = logp.topk(max(1, min(capacity, logp.shape[-1])))  # (B, K), descending
    inside = torch.arange(top.shape[1], device=top.device) < sizes[:, None]
    return Candidates(ids, inside, torch.where(inside, top, constant(-math.inf, top.device)).log_softmax(-1), sizes)


def finish(
    logits: Tensor,
    candidates: Candidates,
    states: RowStates,
    head: LinearHead,
    rule: Rule,
    written: Tensor | None = None,
) -> StepOutput:
    """Complete the step of all rows from their candidates."""
    head = head if head.local else head.gathered(candidates.ids)  # once, for all slices of the states
    distances, xs = compare(candidates, states, head, rule)
    index, selected = select(distances, rule)  # (B, n)
    number = index.view(-1, states.rows_per_item, index.shape[1], 1)  # (I, c, n, 1)
    if xs is not None:
        x = xs.transpose(1, 2).gather(2, number.expand(-1, -1, -1, xs.shape[-1])).flatten(0, 1)  # (B, n, K)
    else:
        padded = states.padded[0]
        chosen = padded.gather(1, number.flatten(1, 2).expand(-1, -1, padded.shape[-1]))
        x = mask(head.logits(chosen.view(*index.shape, -1), candidates.ids), candidates.inside[:, None])
    log_q = reference.log_softmax(x, False)  # finite, where log P is -inf too: 0 · log Q is 0
    log_q = log_q[:, 0] if index.shape[1] == 1 else mean(log_q, selected)  # (B, K)
    weights: Tensor | float
    if isinstance(rule.weight, str):
        adaptive = vision_weight(candidates.log_p, log_q, rule.weight)
        weights, fused = adaptive, torch.addcmul(candidates.log_p, adaptive[:, None], log_q)
    else:
        weights, fused = rule.weight, reference.fuse(candidates.log_p, log_q, "poe", rule.weight)
    if rule.once and written is not None:
        repeated = contains(written, candidates.ids, logits.shape[1])
        fused = reference.limit(candidates.log_p, fused, repeated, rule.once)
    if rule.normalize:
        fused = fused.log_softmax(-1)

    touched = candidates.inside[:, :1]  # (B, 1)
    if states.seen is not None:
        touched = touched & states.seen[:, None]
    # The likeliest tokens come first, so the second one tells whether there are several.
    several = candidates.inside[:, 1:2] if candidates.inside.shape[1] > 1 else candidates.sizes[:, None] > 1
    applied = several & selected[:, :1]
    final = torch.where(applied, fused, candidates.log_p)
    kept = torch.where(touched, final.to(logits.dtype), logits.gather(-1, candidates.ids))
    scores = torch.where(touched, constant(-math.inf, logits.device), logits).scatter_(-1, candidates.ids, kept)
    likeliest = final.argmax(-1, keepdim=True)
    before = candidates.log_p.gather(-1, likeliest)  # (B, 1)
    changed = (before < candidates.log_p[:, :1])[:, 0]  # never where nothing was applied
    return StepOutput(scores, candidates.sizes, applied[:, 0], changed, index[:, 0], weights, states.seen)


def contains(written: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """Return the mask of ids that are among their row's written tokens, where -1 is no token.  (B, n), (B, K) -> (B, K)"""
    marks = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return marks.scatter_(1, written.remainder(vocabulary + 1), True).gather(1, ids)


def compare(candidates: Candidates, states: RowStates, head: LinearHead, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """Return the distance of every vision state, and the masked logits of each item's states.  -> (B, N), (I, N, c, K)

    The distance is inf for padding and for states that cannot be selected. Large batches are compared in slices, whose
    logits are not returned. c is the number of rows of an item.
    """
    padded, real = states.padded  # (I, N, d), (I, N)
    shape = (len(padded), states.rows_per_item, -1)
    ids = candidates.ids.view(shape)  # (I, c, K)
    inside, log_p = (x.view(shape)[:, None] for x in (candidates.inside, candidates.log_p))
    # Four tensors of this many float32 numbers stay below a quarter of the states in half precision.
    slices = padded.split(max(1, max(NUMBERS, padded.numel() // 32) // ids.numel()), dim=1)
    infinity = constant(math.inf, ids.device)
    parts = []
    for part in slices:
        x = mask(head.logits(part, ids.flatten(1)).unflatten(-1, ids.shape[1:]), inside)  # (I, s, c, K)
        usable = torch.linalg.vector_norm(x, math.inf, -1) < LARGEST_LOGIT  # NaN is not below
        parts.append(torch.where(usable, distance(log_p, x, rule), infinity))
    distances = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)  # (I, N, c)
    if real is not None:
        distances = torch.where(real[..., None], distances, infinity)
    return distances.mT.flatten(0, 1), x if len(slices) == 1 else None


# -- distributions over padded sets of candidates ------------------------------------------------------------------
# The reference's formulas for (rows, states, candidates) at once, with implausible candidates masked.


def mask(x: Tensor, inside: Tensor) -> Tensor:
    """Keep the logits of plausible tokens, and set the others so low that their probability is 0."""
    return torch.where(inside, x, constant(OUTSIDE, x.device))


def distance(log_p: Tensor, x: Tensor, rule: Rule) -> Tensor:
    """Return the divergence from masked logits, negated for select="max".  (..., 1, K), (..., s, K) -> (..., s)

    This is H(M) − ½ H(Q), without the term that depends on P alone.
    """
    q = x.softmax(-1)
    both = torch.special.entr(torch.lerp(q, log_p.exp().to(q.dtype), 0.5)).sum(-1)
    value = torch.sub(both, torch.special.entr(q).sum(-1), alpha=0.5)
    return -value if rule.select == "max" else value


def select(distances: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the selected states of every row, the best first, and the mask of those that can be selected.  (B, N) -> (B, n), (B, n)"""
    least = distances.amin(-1, keepdim=True)
    if rule.neighbors == 1:
        any_usable, first = (distances - least <= 0.5 * RESOLUTION).max(-1, keepdim=True)  # False for inf − inf
        return first, any_usable
    steps, order = reference.quantized_distance(distances, least, 1, rule).sort(dim=-1, stable=True)
    return order[:, : rule.neighbors], steps[:, : rule.neighbors] < math.inf  # inf and NaN come last


def mean(log_q: Tensor, selected: Tensor) -> Tensor:
    """Return the log of the mean of the selected distributions.  (B, n, K), (B, n) -> (B, K)"""
    parts = torch.where(selected[..., None], log_q, constant(-math.inf, log_q.device))
    total = parts.amax(1) - parts.log_softmax(1).amax(1)  # log Σ exp, for which torch takes nine kernels
    return total.log_softmax(-1)


def vision_weight(log_p: Tensor, log_q: Tensor, weight: AdaptiveWeight) -> Tensor:
    """Return the reference's adaptive weight, with few kernels; the likeliest token comes first.  (B, K), (B, K) -> (B,)"""
    values = []
    if weight != "uncertainty":  # 1 − JSD / ln 2
        both = torch.stack([log_p, log_q])
        terms = both.exp() * (both - torch.logaddexp(log_p, log_q))
        values.append((terms.nansum((0, 2)) * (-0.5 / math.log(2))).clamp(0, 1))
    if weight != "agreement":
        values.append(torch.expm1(log_p[:, 0]).abs().sqrt())
    return values[0] if len(values) == 1 else values[0] * values[1]
