"""ReVisiT's step for a whole batch at once, in torch, on any device.

The states of all items are one tensor (`StateBlocks`), in the model's dtype on a GPU. The candidates of every sequence are
its likeliest tokens, as many as `capacity`; those that are not plausible are masked. One gather of head rows and one
batched product give the logits of all vision tokens; nothing loops over images or sequences, and with a given capacity
no value is read by the host. Where `sizes` tells of more plausible tokens than that, the step must be taken again.

`refine_logits` is for people with their own decoding loop; `run.BatchedStep` takes the steps of one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.models.head import LinearHead, Projection
from revisit.step import reference
from revisit.step.divergence import (
    INFINITY,
    MINUS_INFINITY,
    distance,
    log_distribution,
    mask,
    mean,
    select,
    usable,
    vision_weight,
)
from revisit.step.rule import Rule
from revisit.step.states import StateBlocks

# How many logits of vision tokens are compared at a time: what stays in a CPU's cache, and on a GPU 128 MB.
CPU_NUMBERS, DEVICE_NUMBERS = 1 << 19, 1 << 25


class Candidates(NamedTuple):
    """The likeliest tokens of every row, the likeliest first."""

    ids: Tensor  # (B, K)
    inside: Tensor  # (B, K) whether it is plausible
    log_p: Tensor  # (B, K) the output distribution over the plausible ones, -inf elsewhere
    sizes: Tensor  # (B,) how many are plausible, also beyond K; 0 where the logits are no distribution or the row has ended


class Step(NamedTuple):
    """What a step gives; everything stays on the device."""

    scores: Tensor  # (B, V), -inf outside the plausible set; the logits themselves where a row is left as it is
    sizes: Tensor  # (B,) plausible tokens; 0 where the logits are no distribution or the row has ended
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
    Returns (B, V) log-scores, -inf outside the plausible set; softmax and argmax of them are ReVisiT's. What
    select="random" draws comes from torch's generator.
    """
    items, rule = list(states), rule or Rule()
    projection = LinearHead(head) if isinstance(head, Tensor) else head
    _check_shapes(items, projection, logits)
    blocks = StateBlocks.of_items(items, copies=len(logits) // len(items))
    draws = torch.rand(len(logits), 1, dtype=torch.double, device=logits.device) if rule.select == "random" else 0.0
    return refine(logits, blocks, projection, rule, uniform=draws).scores


def _check_shapes(items: Sequence[Tensor], head: Projection, logits: Tensor) -> None:
    """Raises RevisitError unless states, head and logits belong together."""
    if not items or logits.ndim != 2 or not len(logits) or len(logits) % len(items):
        raise RevisitError(
            f"refine_logits: logits must be (B, V) with B a multiple of the {len(items)} items of the states, not {tuple(logits.shape)}."
        )
    vocabulary, width = head.weight.shape if isinstance(head, LinearHead) else (logits.shape[1], items[0].shape[-1])
    if any(item.ndim != 2 or item.shape[1] != width for item in items) or logits.shape[1] > vocabulary:
        raise RevisitError(
            f"refine_logits: a head of shape ({vocabulary}, {width}) goes with states (n, {width}) and at most {vocabulary} logits a row, "
            f"not with states {', '.join(str(tuple(item.shape)) for item in items[:8])} and {logits.shape[1]} logits."
        )


def refine(
    logits: Tensor,
    blocks: StateBlocks,
    head: Projection,
    rule: Rule,
    *,
    uniform: float | Tensor = 0.0,
    capacity: int | None = None,
    ended: Tensor | None = None,
) -> Step:
    """The step of all rows, of which those that have `ended` (B,) need not be right.  (B, V)

    With a capacity no value is read by the host; rows with a larger set must be taken again. Without one the
    capacity is the size of the largest set, which the host waits for.
    """
    return finish(logits, find_candidates(logits, rule, capacity, ended), blocks, head, rule, uniform)


def find_candidates(logits: Tensor, rule: Rule, capacity: int | None, ended: Tensor | None = None) -> Candidates:
    """The plausible tokens, exactly as the reference finds them from log-probabilities, in `capacity` places."""
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    sizes = None
    if capacity is None:
        sizes = count(logp, logp.amax(-1, keepdim=True) + math.log(rule.alpha), rule, ended)
        capacity = max(1, int(sizes.max()))
    top, ids = logp.topk(min(capacity, logp.shape[-1]))  # (B, K), descending
    least = top[:, :1] + math.log(rule.alpha)
    inside = plausible(top, least, rule)
    log_p = torch.where(inside, top, MINUS_INFINITY).log_softmax(-1)
    return Candidates(ids, inside, log_p, count(logp, least, rule, ended) if sizes is None else sizes)


def count(logp: Tensor, least: Tensor, rule: Rule, ended: Tensor | None) -> Tensor:
    """How many tokens are in the set; 0 for rows that have ended, whose sets may be of any size.  (B, V), (B, 1) -> (B,)"""
    sizes = plausible(logp, least, rule).sum(-1)
    return sizes if ended is None or len(sizes) == 1 else sizes.masked_fill_(ended.to(sizes.device), 0)


def plausible(logp: Tensor, least: Tensor, rule: Rule) -> Tensor:
    """Which tokens are in the set, from log-probabilities and the least that is enough.  (B, n), (B, 1) -> (B, n)"""
    return logp.isfinite() if rule.full_vocabulary else logp >= least


def finish(
    logits: Tensor, some: Candidates, blocks: StateBlocks, head: Projection, rule: Rule, uniform: float | Tensor
) -> Step:
    """The step of all rows whose candidates are known."""
    compared, xs = compare(some, blocks, head, rule)
    distances = blocks.by_row(compared)  # (B, N)
    index, selected = select(distances, some.sizes, rule, uniform)  # (B, n)
    if xs is not None:
        x = blocks.pick(xs, index)  # (B, n, K)
    else:
        states = blocks.pick(blocks.states[:, :, None].expand(-1, -1, blocks.rows.shape[1], -1), index)  # (B, n, d)
        x = mask(head.logits(states, some.ids, rule.model_dtype), some.inside[:, None], rule)
    log_q = log_distribution(x, rule)
    log_q = log_q[:, 0] if index.shape[1] == 1 else mean(log_q, index, selected, distances, rule)  # (B, K)
    if rule.fusion == "interpolation":
        log_q = torch.where(some.inside, log_q, MINUS_INFINITY)
    weights = rule.weight if not isinstance(rule.weight, str) else vision_weight(some.log_p, log_q, rule.weight)
    if rule.fusion == "poe" and isinstance(weights, Tensor):
        fused = torch.addcmul(some.log_p, weights[:, None], log_q)  # log Q is finite here: 0 · log Q is 0
        fused = fused.log_softmax(-1) if rule.normalize else fused
    else:
        fused = reference.fuse(some.log_p, log_q, rule.fusion, weights, rule.normalize)

    touched = some.inside[:, :1] if blocks.seen is None else some.inside[:, :1] & blocks.seen[:, None]  # (B, 1)
    several = some.inside[:, 1:2] if some.inside.shape[1] > 1 else some.sizes[:, None] > 1  # the likeliest come first
    applied = several & selected[:, :1]
    final = torch.where(applied, fused, some.log_p)
    kept = torch.where(touched, final.to(logits.dtype), logits.gather(-1, some.ids))
    scores = torch.where(touched, MINUS_INFINITY, logits).scatter_(-1, some.ids, kept)
    before = some.log_p.gather(-1, final.argmax(-1, keepdim=True))  # (B, 1), of what is now the likeliest
    changed = (before < some.log_p[:, :1])[:, 0]  # never where nothing was applied
    return Step(scores, some.sizes, applied[:, 0], changed, index[:, 0], weights, blocks.seen)


def compare(some: Candidates, blocks: StateBlocks, head: Projection, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """How far every vision state is from the rows that look at it, and its masked logits.  -> (G, S, c), (G, S, c, K)

    The distance is inf for padding and for states that cannot be selected. What is too large to be held at once is
    compared in slices, and the logits are not kept.
    """
    ids = blocks.by_block(some.ids)  # (G, c, K)
    inside, log_p = (blocks.by_block(x)[:, None] for x in (some.inside, some.log_p))
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
