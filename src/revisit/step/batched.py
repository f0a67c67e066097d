"""ReVisiT's step for accelerators: a whole batch at once, fixed shapes, and nothing that makes the host wait for the device.

The plausible set is cut to a fixed number of candidates. A sequence with more of them says so by a flag, which is sent before
the work that hides it; an `Engine` then takes its step again exactly. Counters stay on the device until the call ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from revisit.step import reference as core
from revisit.step.reference import Select

if TYPE_CHECKING:
    from revisit.step.engine import Indexable, Rule

CAPACITY = 512  # candidates


class Flag:
    """Truth values on their way from the device to the host.

    They are sent before the host queues more work and read after, so the device never runs dry while the host waits.
    """

    def __init__(self, values: Tensor) -> None:
        self.event: Any = None
        if values.device.type == "cuda":
            self.values = torch.empty(values.shape, dtype=torch.bool, pin_memory=True)
            self.values.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.values = values

    def read(self) -> list[bool]:
        if self.event is not None:
            self.event.synchronize()
        return self.values.tolist()  # type: ignore[no-any-return]


class Fixed(NamedTuple):
    """What a step without waiting gives; everything stays on the device."""

    scores: Tensor  # (B, V), -inf outside the plausible set; the logits of a sequence without an image
    sizes: Tensor  # (B,) plausible tokens, -1 without an image
    applied: Tensor  # (B,) whether a vision row was used
    changed: Tensor  # (B,) whether the arg-max moved
    overflow: Flag  # (B,) whether there are more plausible tokens than the capacity: then all else is wrong


class Candidates(NamedTuple):
    """The likeliest tokens of some sequences, the likeliest first."""

    ids: Tensor  # (n, c)
    inside: Tensor  # (n, c) whether it is plausible
    log_p: Tensor  # (n, c) the output distribution over the plausible ones, -inf elsewhere
    sizes: Tensor  # (n,) how many are plausible

    def bounded(self, logits: Tensor) -> Tensor:
        """Logits of vision rows, -inf for tokens that are not plausible.  (n, r, c) -> (n, r, c)"""
        return logits.masked_fill(~self.inside[:, None], -math.inf)


@torch.no_grad()
def refine_without_waiting(
    logits: Tensor, visions: Sequence[Indexable], rule: Rule, *, uniform: float = 0.0, capacity: int = CAPACITY
) -> Fixed:
    """The step of all sequences, of which each item has equally many in turn; no value is read by the host.  (B, V)"""
    copies = len(logits) // len(visions)
    logp = logits.log_softmax(-1)
    count = min(capacity, logits.shape[-1])
    top, ids = logp.topk(count)  # (B, c)
    inside = top >= logp.amax(-1, keepdim=True) + math.log(rule.alpha)
    blind = torch.cat([inside.new_full((copies,), vision.rows == 0) for vision in visions])  # (B,)
    overflow = Flag(inside[:, -1] & ~blind & (count < logits.shape[-1]))
    log_p = top.masked_fill(~inside, -math.inf).log_softmax(-1)
    every = Candidates(ids, inside, log_p, inside.sum(-1))
    items = [Candidates(*part) for part in zip(*(x.split(copies) for x in every), strict=True)]

    height = max(1, *(vision.rows for vision in visions))
    divergences = torch.cat(
        [
            torch.nn.functional.pad(_divergences(vision, rule, some), (0, height - vision.rows), value=math.nan)
            for vision, some in zip(visions, items, strict=True)
        ]
    )  # (B, height)
    usable = ~divergences.isnan()
    rows = _pick(divergences, usable, rule.how, uniform)  # (B,)
    own = [
        _own_logits(vision, part, some) for vision, part, some in zip(visions, rows.split(copies), items, strict=True)
    ]
    like = next((logits for logits in own if logits is not None), log_p)
    whole = torch.cat([torch.zeros_like(like) if logits is None else logits for logits in own])  # (B, c)
    log_q = core.log_softmax(every.bounded(whole[:, None]), rule.model_dtype)[:, 0].to(log_p.dtype)  # (B, c)

    applied = (every.sizes > 1) & usable.any(-1)
    mixed = core.fuse(log_p, log_q, rule.fusion, rule.weight, rule.normalize)
    final = torch.where(applied[:, None] & inside, mixed, log_p)
    scores = torch.full_like(logits, -math.inf).scatter_(-1, ids, final.to(logits.dtype))
    changed = applied & (final.argmax(-1) != log_p.argmax(-1))
    if not all(vision.rows for vision in visions):
        scores = torch.where(blind[:, None], logits, scores)
    return Fixed(scores, every.sizes.masked_fill(blind, -1), applied, changed, overflow)


def _divergences(vision: Indexable, rule: Rule, some: Candidates) -> Tensor:
    """Divergences of an item's vision rows from the distributions of its n sequences; NaN for unusable rows.  -> (n, rows)"""
    parts = [some.log_p.new_empty(len(some.ids), 0)]
    for i, j in core.spans(vision.rows, core.CHUNK_NUMBERS // some.ids.numel()):
        raw = vision.logits(i, j, some.ids.flatten()).unflatten(-1, some.ids.shape).transpose(0, 1)  # -> (n, r, c)
        finite = (raw.isfinite() | ~some.inside[:, None]).all(-1)
        divergence = core.apart(some.log_p[:, None], some.bounded(raw), rule.divergence, rule.model_dtype)  # (n, r)
        parts.append(torch.where(finite, divergence, math.nan))
    return torch.cat(parts, dim=1)


def _own_logits(vision: Indexable, rows: Tensor, some: Candidates) -> Tensor | None:
    """Logits of each sequence's own vision row over its candidates; None without an image.  (n,) -> (n, c)"""
    if not vision.rows:
        return None
    raw: Tensor = vision.at(rows, some.ids.flatten()).unflatten(-1, some.ids.shape)  # (n, n, c)
    return raw.diagonal().T


def _pick(divergences: Tensor, usable: Tensor, how: Select, uniform: float) -> Tensor:
    """`core.select` for every sequence at once, 0 where no row is usable.  (B, rows) -> (B,)"""
    if how == "random":
        wanted = (uniform * usable.sum(-1, keepdim=True).double()).long()  # its number among the usable rows
        return ((usable.cumsum(-1) - 1 == wanted) & usable).int().argmax(-1)
    if how == "min":
        return divergences.masked_fill(~usable, math.inf).argmin(-1)
    return divergences.masked_fill(~usable, -math.inf).argmax(-1)


def waiting_is_free(device: torch.device) -> bool:
    """Whether values can be read without stopping a queue of work: true of the CPU only."""
    return device.type == "cpu"
