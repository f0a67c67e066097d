"""The fast way to take ReVisiT's step; `core.refine` is the plain one, and tests hold the two equal.

`Engine` takes the steps of one item (one image's vision rows). What makes it fast:

* the plausible set is found from raw logits by group maxima, with no softmax and no sort over the vocabulary;
* a projected column (the logits of all vision rows for one token) is kept and reused when the token comes back, in a
  store of bounded size that forgets what was asked for least and longest ago;
* divergences are written as sums over unnormalised exponentials: one exp and one log a number, in blocks that stay in
  the processor's cache. They rank the rows; the few rows within rounding of the best are then compared by the
  reference formula, so the choice is the reference's;
* the usual step, of all items of a batch, is one call of compiled code (kernel.c) where there was a compiler when the
  package was installed. It ranks the rows by columns of 16-bit integers, with errors that are known, and compares in
  float32 those that this leaves in doubt. What is written here is the same for other devices, types and settings,
  without a compiler, and where the divergences of all rows are wanted (a recorded trace).

Accelerators have a step of their own, without waiting (accelerator.py); what overflows it is taken again by an `Engine`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from revisit.step import engine_formulas as core
from revisit.step.compiled import kernel
from revisit.step.engine_formulas import Divergence, Fusion, Projector, Refinement, Select, spans

GROUP = 128  # the vocabulary is searched for plausible tokens in groups of this many
BLOCK = 1 << 19  # numbers per block of the divergence arithmetic: three such buffers stay in the last cache
SLICE = 1 << 24  # numbers projected at a time when a set is too large for the store
GATHER = 8192  # head rows gathered at a time
COLUMNS = 2850  # most columns a store keeps, what its books and the arithmetic need counted as columns
SHORT_COLUMNS = 4700  # the same for columns of 16-bit integers
BESIDE = 3 << 19  # bytes of the latter
STORE_BYTES = 256 << 20  # most memory for the columns of all items of one call
ROUNDING = 1e-5  # divergences nearer to each other than this, by their scale, are compared by the reference formula
CONFIRMED = 64  # rows so near the best that all are compared by the reference formula


@dataclass(frozen=True)
class Rule:
    """The settings of a step; the same names as the arguments of `core.refine`."""

    alpha: float
    divergence: Divergence = "jsd"
    how: Select = "min"
    fusion: Fusion = "poe"
    weight: float = 1.0
    full_vocabulary: bool = False
    normalize: bool = True
    model_dtype: bool = False

    def reference(self, logits: Tensor, vision: Projector, uniform: float = 0.0) -> Refinement:
        """The step as `core` takes it."""
        return core.refine(logits, vision, **asdict(self), uniform=uniform)


def old_rule(rule: Any) -> Rule:
    """The settings by this module's names."""
    if isinstance(rule, Rule):
        return rule
    named = {f.name: getattr(rule, f.name) for f in fields(Rule) if f.name != "how"}
    return Rule(**named, how=rule.select)


class Indexable(Projector, Protocol):
    """Vision rows that can also be picked by a tensor of row numbers."""

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Logits of these rows over the token ids.  (n,), (k,) -> (n, k)"""

    def factors(self) -> tuple[Tensor, Tensor] | None:
        """States (rows, d) and head (V, d) if the logits are nothing but their product; else None."""


# -- the plausible set --------------------------------------------------------------------------------------------


class Peaks:
    """Logits of some sequences with the maximum of every group of GROUP tokens, which is all that most of the search reads."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits  # (B, V)

    @cached_property
    def groups(self) -> Tensor:
        """(B, V // GROUP)"""
        whole = self.logits.shape[-1] // GROUP * GROUP
        grouped: Tensor = self.logits[:, :whole].unflatten(-1, (-1, GROUP))
        return grouped.amax(-1)

    @cached_property
    def best(self) -> list[float]:
        """(B,)"""
        rest = self.logits[:, self.groups.shape[-1] * GROUP :]
        ends = [part.amax(-1) for part in (self.groups, rest) if part.shape[-1]]
        return torch.stack(ends).amax(0).tolist()  # type: ignore[no-any-return]


def plausible_ids(peaks: Peaks, row: int, alpha: float) -> Tensor:
    """The ids of `core.plausible` applied to the row's log-probabilities, to the last bit, ascending.  -> (k,)

    A token is in if log p >= max log p + ln alpha, which for real numbers is logit >= max logit + ln alpha. Rounding
    can only matter within `slack` of that threshold: a row with a token there is decided from its log-probabilities.
    """
    logits = peaks.logits[row]
    ids = kernel.plausible(logits, alpha) if kernel.suits(logits) else _by_groups(peaks, row, alpha)
    return _from_log_probabilities(logits, alpha) if ids is None else ids


def _by_groups(peaks: Peaks, row: int, alpha: float) -> Tensor | None:
    """The set found from raw logits; None where only log-probabilities can decide."""
    logits, best = peaks.logits[row], peaks.best[row]
    cut = best + math.log(alpha)
    slack = 4 * torch.finfo(logits.dtype).eps * (abs(best) + abs(math.log(alpha)) + math.log(logits.numel()))
    if not math.isfinite(best):
        return None
    hot = (peaks.groups[row] >= cut - slack).nonzero()  # (h, 1)
    if 8 * len(hot) > peaks.groups.shape[-1]:
        ids = (logits >= cut - slack).nonzero().squeeze(-1)
        values = logits[ids]
    else:
        inside = torch.arange(GROUP, device=logits.device)
        ids = (hot * GROUP + inside).flatten()
        whole = peaks.groups.shape[-1] * GROUP
        if whole < logits.numel():  # the last group is not full
            ids = torch.cat([ids, torch.arange(whole, logits.numel(), device=logits.device)])
        values = logits[ids]
        keep = (values >= cut - slack).nonzero().squeeze(-1)
        ids, values = ids[keep], values[keep]
    return None if float(values.min()) <= cut + slack else ids


def _from_log_probabilities(logits: Tensor, alpha: float) -> Tensor:
    return core.plausible(logits.log_softmax(-1), alpha).nonzero().squeeze(-1)


# -- projected columns --------------------------------------------------------------------------------------------


class Books:
    """Which token's column is in which slot of a store.

    A full store forgets what was asked for least often (eight times is as good as more) and longest ago: a rare wide step
    must not push out the words that every step needs.
    """

    CREDIT = 64  # steps that each use of a column counts for
    PAGE = 1 << 14  # tokens by which the books grow

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held, self.clock = capacity, 0, 0
        self.slot_of = torch.zeros(0, dtype=torch.int16)  # token id -> slot + 1, 0 where there is none
        self.uses = torch.zeros(0, dtype=torch.uint8)  # token id -> steps that asked for it
        self.id_in = torch.zeros(capacity, dtype=torch.long)  # slot -> token id
        self.used_at = torch.zeros(capacity, dtype=torch.long)  # slot -> the last step that read it

    def grow(self, vocabulary: int) -> None:
        """Make room for ids below this."""
        if vocabulary > len(self.slot_of):
            more = -(-vocabulary // self.PAGE) * self.PAGE - len(self.slot_of)
            self.slot_of, self.uses = (torch.cat([x, x.new_zeros(more)]) for x in (self.slot_of, self.uses))

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The slots of ascending ids, after newcomers were given one; the ids of the newcomers, and their slots."""
        self.grow(int(ids[-1]) + 1)
        self.clock += 1
        found = kernel.find(self, ids) if kernel.available() else self._find(ids)
        self.held = min(self.capacity, self.held + len(found[1]))
        return found

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slots = self.slot_of[ids].long() - 1
        known = slots >= 0
        self.used_at[slots[known]] = self.clock
        self.uses[ids] = (self.uses[ids].int() + 1).clamp_max(255).byte()
        unknown = ids[~known]
        if len(unknown):
            slots[~known] = fresh = self._room(len(unknown))
            self.slot_of[self.id_in[fresh[fresh < self.held]]] = 0
            self.slot_of[unknown], self.id_in[fresh], self.used_at[fresh] = (fresh + 1).short(), unknown, self.clock
            return slots, unknown, fresh
        return slots, unknown, unknown

    def _room(self, count: int) -> Tensor:
        """Slots for newcomers: empty ones first, which lie at the end; never one that this step reads."""
        spare = self.capacity - self.held
        if spare >= count:
            return torch.arange(self.held, self.held + count)
        worth = self.used_at[: self.held] + self.CREDIT * self.uses[self.id_in[: self.held]].clamp_max(8).long()
        worth[self.used_at[: self.held] == self.clock] = 1 << 40
        return torch.cat([torch.arange(self.held, self.capacity), worth.topk(count - spare, largest=False).indices])


class Columns:
    """Logits of all vision rows by token id, kept for tokens that come back."""

    def __init__(self, vision: Indexable, store_bytes: int) -> None:
        self.vision = vision
        column = 4 * max(1, vision.rows)  # bytes
        self.books = Books(min(max(COLUMNS // 2, COLUMNS - BESIDE // column), store_bytes // column))
        self.store: Tensor | None = None  # (capacity, rows); memory is touched only as columns arrive
        self.asked = self.projected = 0  # columns used and columns computed, over all steps

    @property
    def capacity(self) -> int:
        return self.books.capacity

    def slots(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The store, and where in it the columns of these ascending tokens are; what was not there is projected first."""
        if self.store is None:
            self.open(self.vision.logits(0, 1, ids[:1]))
        assert self.store is not None
        slots, unknown, fresh = self.books.find(ids.cpu())
        self.asked += len(ids)
        if len(unknown):
            self._project(self.store, unknown.to(ids.device), fresh.to(ids.device))
        return self.store, slots.to(ids.device)

    def open(self, like: Tensor) -> Tensor:
        """The store, for columns of this type on this device."""
        self.store = torch.empty((self.capacity, self.vision.rows), dtype=like.dtype, device=like.device)
        return self.store

    def _project(self, store: Tensor, ids: Tensor, slots: Tensor) -> None:
        self.projected += len(ids)
        factors = self.vision.factors()
        if factors is not None and kernel.suits(store, *factors) and int(ids[-1]) < len(factors[1]):
            kernel.project(*factors, ids, store, slots)
            return
        step = max(1, core.CHUNK_NUMBERS // len(ids))
        for i in range(0, self.vision.rows, step):
            part = self.vision.logits(i, min(i + step, self.vision.rows), ids)  # (b, n)
            store[:, i : i + step].index_copy_(0, slots, part.T)


# -- divergences --------------------------------------------------------------------------------------------------


class Scratch:
    """Buffers of the arithmetic, reused by every block of every step."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.room = kernel.Room()

    def views(self, count: int, shape: tuple[int, int], like: Tensor) -> list[Tensor]:
        """Some tensors of this shape with arbitrary content."""
        size = shape[0] * shape[1]
        if len(self.buffers) < count or self.buffers[0].numel() < size or self.buffers[0].dtype != like.dtype:
            self.buffers = [torch.empty(size, dtype=like.dtype, device=like.device) for _ in range(3)]
        return [buffer[:size].view(shape) for buffer in self.buffers[:count]]


def screen(x: Tensor, log_p: Tensor, divergence: Divergence, e: Tensor, u: Tensor) -> Tensor:
    """Divergences of the columns of logits x from P, to within rounding; x, e and u are overwritten.  (k, rows) -> (rows,)

    With X = x − max, e = exp X, s = Σ e, Q = e / s and u = e + s·P (so that (P + Q)/2 = u / 2s), all sums run over
    u ln u, e·X, P·X and e·ln P, and only u needs a logarithm. NaN where a logit is not finite: 0 · inf is.
    """
    p = log_p.exp()
    top = x.amax(0)  # (rows,)
    x.sub_(top)
    torch.exp(x, out=e)
    total = e.sum(0)
    log_total = total.log()
    entropy = torch.dot(p, log_p)
    if divergence == "kl":
        result = entropy - torch.mv(x.T, p) + log_total + 0 * x.sum(0)
    elif divergence == "cosine":
        result = 1 - torch.mv(e.T, p) / (p.norm() * torch.linalg.vector_norm(e, dim=0)) + 0 * x.sum(0)
    else:
        torch.addr(e, p.clamp_min(1e-30), total, out=u)
        if divergence == "jsd":
            x.mul_(e).addcmul_(u, torch.log(u, out=e), value=-1)  # e·X − u ln u
            result = 0.5 * (entropy + log_total + x.sum(0) / total) + math.log(2)
        else:
            cross = torch.mv(x.T, p) + torch.mv(e.T, log_p) / total
            own = x.mul_(e).sum(0) / total
            mixed = torch.log(u, out=x).mul_(u).sum(0) / total
            whole = 0.5 * mixed - math.log(2) - 0.25 * (entropy + cross + own) - 0.5 * log_total
            result = whole / len(log_p)
    return result


# -- the step -----------------------------------------------------------------------------------------------------


class Engine:
    """Takes the steps of one item: `refine` gives what `core.refine` gives, faster from step to step."""

    def __init__(
        self,
        vision: Indexable,
        rule: Any,
        *,
        store_bytes: int = STORE_BYTES,
        scratch: Scratch | None = None,
        all_divergences: bool = False,
    ) -> None:
        rule = old_rule(rule)
        self.vision, self.rule = vision, rule
        self.columns = Columns(vision, store_bytes)
        self.scratch = scratch or Scratch()
        self.block = min(BLOCK, max(1 << 17, 64 * vision.rows))  # few rows need little room
        self.stepper = None if all_divergences else self._stepper(store_bytes)

    def _stepper(self, store_bytes: int) -> kernel.Stepper | None:
        """The compiled step, where the settings are the usual ones and the states and the head suit it."""
        factors = self.vision.factors() if kernel.Stepper.takes(self.rule) else None
        if factors is None or not len(factors[0]) or not kernel.suits(*factors):
            return None
        column = kernel.Shorts.column_bytes(self.vision.rows)
        capacity = min(max(SHORT_COLUMNS // 2, SHORT_COLUMNS - BESIDE // column), store_bytes // column)
        return kernel.Stepper(Books(capacity), *factors, self.rule, ROUNDING) if capacity else None

    @property
    def asked(self) -> int:
        """Columns that the steps so far have used."""
        return self.columns.asked + (self.stepper.asked if self.stepper else 0)

    @property
    def projected(self) -> int:
        """Columns that had to be computed for them."""
        return self.columns.projected + (self.stepper.projected if self.stepper else 0)

    def refine(self, peaks: Peaks, row: int = 0, uniform: float = 0.0) -> Refinement:
        """The step of one sequence; `peaks` holds its logits in the given row."""
        return refine_rows([(self, row, uniform)], peaks)[0].materialize()

    @torch.no_grad()
    def settle(self, step: Refinement, near: Tensor) -> Refinement:
        """The compiled code's step, whose selected row is decided by the reference formula among those near the best."""
        assert step.divergences is not None
        place, log_q = self._compare_again(
            step.divergences, step.base, step.ids, near, lambda rows: self._rows(rows, step.ids)
        )
        final = core.fuse(step.base, log_q, self.rule.fusion, self.rule.weight, self.rule.normalize)
        return Refinement(step.ids, step.base, log_q, final, place, step.divergences)

    @torch.no_grad()
    def refine_in_torch(self, peaks: Peaks, row: int, uniform: float) -> Refinement:
        """The same step in torch."""
        logits, rule = peaks.logits[row], self.rule
        if rule.model_dtype or rule.full_vocabulary:  # the published rounding begins with log-probabilities
            logp = logits.log_softmax(-1)
            keep = torch.isfinite(logp) if rule.full_vocabulary else core.plausible(logp, rule.alpha)
            ids = keep.nonzero().squeeze(-1)  # (k,)
            log_p = logp[ids].log_softmax(-1)
        else:
            ids = plausible_ids(peaks, row, rule.alpha)
            log_p = logits[ids].log_softmax(-1)
        if len(ids) <= 1 or self.vision.rows == 0:
            return Refinement(ids, log_p, log_p, log_p, -1, None)
        if self.stepper is not None and self.stepper.reads(logits) and len(ids) <= self.stepper.books.capacity:
            taken = self.stepper.take(
                logits, ids, self.scratch.room
            )  # a token on the threshold was all that was unusual
            if taken is not None:
                return taken.materialize() if taken.near is None else self.settle(taken.materialize(), taken.near)
        if len(ids) <= self.columns.capacity and self.stepper is None:
            store, slots = self.columns.slots(ids)
            divergences = self._over_store(store, slots, log_p)
            row, log_q = self._choose(divergences, log_p, ids, lambda rows: store[slots[:, None], rows].T, uniform)
        else:
            divergences = self._streamed(ids, log_p)
            row, log_q = self._choose(divergences, log_p, ids, lambda rows: self._rows(rows, ids), uniform)
        if log_q is None:
            return Refinement(ids, log_p, log_p, log_p, -1, divergences)
        final = core.fuse(log_p, log_q, rule.fusion, rule.weight, rule.normalize)
        return Refinement(ids, log_p, log_q, final, row, divergences)

    def _over_store(self, store: Tensor, slots: Tensor, log_p: Tensor) -> Tensor:
        """Divergences of all rows from their stored columns.  -> (rows,)"""
        if self.rule.divergence == "jsd" and not self.rule.model_dtype and kernel.suits(store, log_p):
            return kernel.divergences(store, slots, log_p)
        step = max(16, self.block // len(slots))
        parts = []
        for i in range(0, self.vision.rows, step):
            block = store[:, i : i + step]  # (capacity, b)
            if self.rule.model_dtype:
                parts.append(self._compare(log_p, block.index_select(0, slots).T))
            else:
                x, e, u = self.scratch.views(3, (len(slots), block.shape[1]), store)
                torch.index_select(block, 0, slots, out=x)
                parts.append(screen(x, log_p, self.rule.divergence, e, u))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _streamed(self, ids: Tensor, log_p: Tensor) -> Tensor:
        """Divergences of all rows for a set too large to keep, projected in slices of bounded size.  -> (rows,)"""
        k, parts = len(ids), []
        plain = self.rule.divergence == "jsd" and not self.rule.model_dtype and kernel.suits(log_p)
        factors = self._factors(ids) if plain else None
        for i, j in spans(self.vision.rows, SLICE // k):
            if factors is not None:
                columns, places = kernel.columns(factors[0][i:j], factors[1], ids)
                parts.append(kernel.divergences(columns, places, log_p))
                continue
            logits = self._logits(i, j, ids)  # (b, k)
            for a, b in spans(j - i, self.block // k):
                part = logits[a:b]
                if self.rule.model_dtype:
                    parts.append(self._compare(log_p, part))
                else:
                    e, u = self.scratch.views(2, (b - a, k), part)
                    parts.append(screen(part.T, log_p, self.rule.divergence, e.T, u.T))
        return torch.cat(parts)

    def _logits(self, start: int, stop: int, ids: Tensor) -> Tensor:
        """Logits of some rows over any number of tokens, whose head rows are gathered a few thousand at a time."""
        if len(ids) <= GATHER:
            return self.vision.logits(start, stop, ids)
        return torch.cat([self.vision.logits(start, stop, part) for part in ids.split(GATHER)], dim=-1)

    def _rows(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Logits of these rows.  (n,), (k,) -> (n, k)"""
        factors = self._factors(ids)
        if factors is not None:
            return kernel.columns(factors[0][rows], factors[1], ids)[0].T
        return torch.cat([self._logits(row, row + 1, ids) for row in rows.tolist()])

    def _factors(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """States and head, where compiled code can multiply them for these ascending tokens."""
        factors = self.vision.factors()
        return factors if factors and kernel.suits(*factors) and int(ids[-1]) < len(factors[1]) else None

    def _compare(self, log_p: Tensor, logits: Tensor) -> Tensor:
        """The reference's divergences.  (k,), (rows, k) -> (rows,)"""
        return core.compare(log_p, logits, self.rule.divergence, self.rule.model_dtype)

    def _choose(
        self,
        divergences: Tensor,
        log_p: Tensor,
        ids: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        uniform: float,
    ) -> tuple[int, Tensor | None]:
        """The selected row and its log-distribution on the set; (-1, None) if no row is usable."""
        row, rows = self._candidates(divergences, len(log_p), uniform)
        if row < 0:
            return row, None
        if len(rows) == 1:
            return row, core.log_softmax(logits_of(rows), self.rule.model_dtype)[0].to(log_p.dtype)
        return self._compare_again(divergences, log_p, ids, rows, logits_of)

    def _compare_again(
        self, divergences: Tensor, log_p: Tensor, ids: Tensor, rows: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> tuple[int, Tensor]:
        """The best of the rows that rounding could have put before or behind it, by the reference formula.

        Its values replace theirs; those of all rows, if there are as many such rows as are told apart.
        """
        rule = self.rule
        if len(rows) < CONFIRMED:
            log_q = core.log_softmax(logits_of(rows), rule.model_dtype)  # (n, k)
            divergences[rows] = core.DIVERGENCES[rule.divergence](log_p, log_q).to(divergences.dtype)
            place = core.select(divergences[rows], rule.how)
            return int(rows[place]), log_q[place].to(log_p.dtype)
        divergences[:] = core.all_divergences(log_p, self.vision, ids, rule.divergence, rule.model_dtype)
        row = core.select(divergences, rule.how)
        return row, core.log_softmax(logits_of(rows.new_tensor([row])), rule.model_dtype)[0].to(log_p.dtype)

    def _candidates(self, divergences: Tensor, size: int, uniform: float) -> tuple[int, Tensor]:
        """The selected row, -1 for none, and all rows that rounding could have put before it."""
        how, scale = self.rule.how, 1 / size if self.rule.divergence == "official" else 1.0
        exact = how == "random" or self.rule.model_dtype
        if not exact and kernel.suits(divergences):
            return kernel.nearest(divergences, how == "max", scale, ROUNDING, CONFIRMED)
        row = core.select(divergences, how, uniform)
        if row < 0 or exact:
            return row, torch.tensor([row], device=divergences.device)
        best = float(divergences[row])
        reach = ROUNDING * (scale + abs(best)) if math.isfinite(best) else 0.0
        near = divergences <= best + reach if how == "min" else divergences >= best - reach
        return row, near.nonzero().squeeze(-1)[:CONFIRMED]


Outcome = Refinement | kernel.Taken  # both tell `size`, `applied`, `moved` and the `whole`


def refine_rows(jobs: Sequence[tuple[Engine, int, float]], peaks: Peaks, scores: Tensor | None = None) -> list[Outcome]:
    """The steps of several items at once: of each the row of the logits, and the draw of "random".

    The scores (B, V) of these rows are written, -inf outside the plausible set; they may be the logits.
    """
    logits, written = peaks.logits.unbind(), [] if scores is None else scores.unbind()
    quick = [
        (engine.stepper, logits[row], written[row] if written else None)
        for engine, row, _ in jobs
        if engine.stepper is not None and engine.stepper.reads(logits[row])
    ]
    steps = kernel.take(quick, jobs[0][0].scratch.room) if quick else []
    taken = {stepper: step for (stepper, *_), step in zip(quick, steps, strict=True)}
    outcomes: list[Outcome] = []
    for engine, row, uniform in jobs:
        step = taken.get(engine.stepper) if engine.stepper else None
        if step is not None and step.near is None:
            outcomes.append(step)
            continue
        if step is not None and step.near is not None:
            result = engine.settle(step.materialize(), step.near)
        else:
            result = engine.refine_in_torch(peaks, row, uniform)
        if written:
            written[row].fill_(-math.inf)[result.ids] = result.final.to(written[row].dtype)
        outcomes.append(result)
    return outcomes
