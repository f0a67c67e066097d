"""ReVisiT's usual step as Triton kernels, for CUDA and ROCm devices.

`reference.py` defines the result; this file computes it for a whole batch (Jensen–Shannon divergence, product of experts,
any weight, any number of neighbors, `once`). Read it top to bottom: `launches` yields the kernels in order, and each kernel is
one line of the algorithm.

    maxima    largest logit and normalizer of each tile of the vocabulary           (B, tiles)
    count     plausible tokens of each tile, and their sum of probabilities         (B, tiles)
    pack      plausible tokens in vocabulary order, with log P; scores outside them (B, V)
    mark      plausible tokens that the answer already contains, only for `once`    (B, V)
    compare   divergence of every vision state; states are read from memory once    (B, N)
    select    the nearest vision states                                             (B, n)
    project   log Q of the selected states                                          (B, V)
    fuse      weight, product, normalization, scores of the plausible tokens        (B, V)

The host reads no value and the grids depend on shapes alone, so a step never synchronizes and can be captured in a CUDA
graph. Loops over candidates end at the row's own count, so a plausible set may have any size. Rows that have ended, have no
vision states or have one plausible token return before their states are read. The order of every sum is fixed: the same
input gives the same bits.

The vision states of row b are `counts[b]` states in blocks of S, in the blocks `table[b]` of one tensor (G, S, d), see `RowStates`.
"""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from revisit.models.head import HALF, LARGEST_LOGIT, LinearHead
from revisit.step import reference
from revisit.step.batched import COPIED, BatchedStep
from revisit.step.interface import RowStates, Step, StepInput, StepOutput
from revisit.step.rule import Rule

# -- kernels -------------------------------------------------------------------------------------------------------
# B rows, V tokens, k plausible tokens of a row, N vision states of the longest row, d numbers in a state.

LARGEST = tl.constexpr(LARGEST_LOGIT)
STEPS = tl.constexpr(1e6)  # distances are compared in steps of 1 / STEPS, as in the reference
LN2 = tl.constexpr(math.log(2))
INFINITY = tl.constexpr(math.inf)
FINITE = tl.constexpr(3e38)  # above every gain
# Numbers that change with the batch: a new value compiles nothing.
VARYING = ("N", "S", "blocks", "tiles", "copies", "length", "written_stride")


@triton.jit
def is_left(row, ended, counts):
    """Return whether a row keeps its logits: it has no vision states, or it has ended."""
    left = tl.load(counts + row) == 0
    if ended is not None:
        left = left | (tl.load(ended + row) != 0)
    return left


@triton.jit
def load_logits(logits, rows, row, tile, V, stride, TILE: tl.constexpr):
    """Return a tile of a row's logits in float32, the token ids, and which row of the logits it is."""
    at = row.to(tl.int64) if rows is None else tl.load(rows + row).to(tl.int64)
    token = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + at * stride + token, mask=token < V, other=-INFINITY).to(tl.float32)
    return x, token, at


@triton.jit
def maxima(logits, rows, ended, counts, largest, sums, V, stride, parts, TILE: tl.constexpr):
    """Find the largest logit of a tile, and the sum of exponentials below it: NaN if a logit is NaN or +inf."""
    tile, row = tl.program_id(0), tl.program_id(1)
    if is_left(row, ended, counts):
        return
    x, _, _ = load_logits(logits, rows, row, tile, V, stride, TILE)
    top = tl.max(x, 0)
    tl.store(largest + row * parts + tile, top)
    tl.store(sums + row * parts + tile, tl.sum(tl.exp(x - tl.where(top == -INFINITY, 0.0, top)), 0))


@triton.jit
def find_plausible(x, largest, sums, row, parts, log_alpha, TILES: tl.constexpr):
    """Return which tokens of a tile are plausible, and the row's largest logit; none in a row that is no distribution.

    The comparison is the reference's, by log-probabilities and not by logits, with the same rounding.
    """
    t = tl.arange(0, TILES)
    tops = tl.load(largest + row * parts + t, mask=t < parts, other=-INFINITY)  # (tiles,)
    each = tl.load(sums + row * parts + t, mask=t < parts, other=0.0)
    top = tl.max(tops, 0)
    log_total = tl.log(tl.sum(each * tl.exp(tops - top), 0))  # NaN if all logits are -inf
    return (x - top) - log_total >= -log_total + log_alpha, top


@triton.jit
def count(
    logits, rows, ended, counts, largest, sums, found, masses, V, stride, parts, log_alpha, TILE: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Count the plausible tokens of a tile, and add up their probabilities relative to the likeliest token's."""
    tile, row = tl.program_id(0), tl.program_id(1)
    if is_left(row, ended, counts):
        return
    x, _, _ = load_logits(logits, rows, row, tile, V, stride, TILE)
    keep, top = find_plausible(x, largest, sums, row, parts, log_alpha, TILES)
    tl.store(found + row * parts + tile, tl.sum(keep.to(tl.int32), 0))
    tl.store(masses + row * parts + tile, tl.sum(tl.where(keep, tl.exp(x - top), 0.0), 0))


@triton.jit
def pack(
    logits, rows, ended, counts, largest, sums, found, masses, scores, sizes, ids, log_p, marks, V, stride, score_stride, parts,
    log_alpha, gap, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """List the plausible tokens of a tile behind those of earlier tiles, and write the scores of all other tokens.

    Those are `gap` below their logit: -inf, or finite for vLLM. Rows that are left as they are keep their logits.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    x, token, at = load_logits(logits, rows, row, tile, V, stride, TILE)
    out = scores + at * score_stride + token
    if is_left(row, ended, counts):
        if tile == 0:
            tl.store(sizes + row, 0)
        tl.store(out, x, mask=token < V)
        return
    t = tl.arange(0, TILES)
    each = tl.load(found + row * parts + t, mask=t < parts, other=0)  # (tiles,)
    mass = tl.sum(tl.load(masses + row * parts + t, mask=t < parts, other=0.0), 0)
    size, before = tl.sum(each, 0), tl.sum(tl.where(t < tile, each, 0), 0)
    if tile == 0:
        tl.store(sizes + row, size)
    keep, top = find_plausible(x, largest, sums, row, parts, log_alpha, TILES)
    place = row.to(tl.int64) * V + before + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(ids + place, token, mask=keep)
    tl.store(log_p + place, (x - top) - tl.log(mass), mask=keep)
    if marks is not None:
        tl.store(marks + place, 0, mask=keep)
    tl.store(out, tl.where(size > 0, x - gap, x), mask=(token < V) & ~keep)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=("written",))
def mark(written, sizes, ids, marks, V, length, written_stride, TOKENS: tl.constexpr):
    """Mark the plausible tokens that the answer already contains, by binary search: the ids of a row ascend."""
    row, place = tl.program_id(1), tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token = tl.load(written + row.to(tl.int64) * written_stride + place, mask=place < length, other=-1)
    k, base = tl.load(sizes + row), row.to(tl.int64) * V
    low = tl.zeros((TOKENS,), tl.int32)
    high, rest = low + k, k
    while rest > 0:
        middle = (low + high) // 2
        below = tl.load(ids + base + middle, mask=low < high, other=0) < token
        low, high = tl.where((low < high) & below, middle + 1, low), tl.where((low < high) & ~below, middle, high)
        rest = rest // 2
    found = tl.load(ids + base + low, mask=low < k, other=-1) == token
    tl.store(marks + base + low, 1, mask=found & (token >= 0))


@triton.jit
def load_candidates(ids, log_p, starts, row, start, k, V, TOKENS: tl.constexpr):
    """Return whether places from `start` on hold a plausible token, its row of the head, and its log-probability."""
    place = start + tl.arange(0, TOKENS)
    inside = place < k
    at = row.to(tl.int64) * V + place
    index = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
    if starts is not None:  # the head has the rows of the plausible tokens only
        index = tl.where(inside, tl.load(starts + row) + place, 0)
    return inside, index, tl.load(log_p + at, mask=inside, other=-INFINITY)


@triton.jit
def multiply(
    states, at, real, head, token, inside, D, STATES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return the logits of some states over some tokens, with float32 sums.  -> (states, tokens)"""
    x = tl.zeros((STATES, TOKENS), tl.float32)
    row = token * D
    for start in range(0, D, WIDTH):
        column = start + tl.arange(0, WIDTH)
        some = column < D
        h = tl.load(states + at[:, None] + column[None, :], mask=real[:, None] & some[None, :], other=0.0)
        w = tl.load(head + row[None, :] + column[:, None], mask=inside[None, :] & some[:, None], other=0.0)
        if WIDE:
            h, w = h.to(tl.float32), w.to(tl.float32)
        x = tl.dot(h, w, x, input_precision="ieee")
    return x


@triton.jit(do_not_specialize=VARYING)
def compare(
    states, table, counts, sizes, ids, log_p, starts, head, distances, normalizers, nearest, V, N, S, D, blocks, tiles, copies, sign,
    STATES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the divergence of a tile of states: `sign` times it, and inf for states that cannot be selected.

    Q needs its normalizer before it can be compared, so sets of more than TOKENS candidates are projected twice; what the
    second projection reads is still in the cache. Copies of an item run next to each other for the same reason.
    """
    tile, row = tl.program_id(1), tl.program_id(2) * copies + tl.program_id(0)
    k, n = tl.load(sizes + row), tl.load(counts + row)
    if (k < 2) | (tile * STATES >= n):
        return
    number = tile * STATES + tl.arange(0, STATES)  # (states,)
    real = number < n
    block = tl.load(table + row * blocks + number // S, mask=real, other=0).to(tl.int64)
    at = (block * S + number % S) * D

    top = tl.full((STATES,), -INFINITY, tl.float32)
    total = tl.zeros((STATES,), tl.float32)
    worst = tl.zeros((STATES,), tl.int32)
    x = tl.zeros((STATES, TOKENS), tl.float32)
    for start in range(0, k, TOKENS):
        inside, token, _ = load_candidates(ids, log_p, starts, row, start, k, V, TOKENS)
        x = multiply(states, at, real, head, token, inside, D, STATES, TOKENS, WIDTH, WIDE)
        bad = inside[None, :] & ~(tl.abs(x) < LARGEST)  # NaN is not below
        worst = worst | tl.max(bad.to(tl.int32), 1)
        masked = tl.where(inside[None, :], x, -INFINITY)
        higher = tl.maximum(top, tl.max(masked, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(masked - higher[:, None]), 1)
        top = higher
    normalizer = top + tl.log(total)

    jsd = tl.zeros((STATES,), tl.float32)
    for start in range(0, k, TOKENS):
        inside, token, log_of_p = load_candidates(ids, log_p, starts, row, start, k, V, TOKENS)
        if k > TOKENS:
            x = multiply(states, at, real, head, token, inside, D, STATES, TOKENS, WIDTH, WIDE)
        log_q = x - normalizer[:, None]
        p, q = tl.exp(log_of_p)[None, :], tl.exp(log_q)
        log_m = tl.log(0.5 * (p + q))
        terms = p * (log_of_p[None, :] - log_m) + q * (log_q - log_m)
        jsd += 0.5 * tl.sum(tl.where(inside[None, :] & (p + q > 0), terms, 0.0), 1)

    distance = tl.where((worst == 0) & real, sign * jsd, INFINITY)
    place = row.to(tl.int64) * N + number
    tl.store(distances + place, distance, mask=real)
    tl.store(normalizers + place, normalizer, mask=real)
    tl.store(nearest + row * tiles + tile, tl.min(distance, 0))


@triton.jit(do_not_specialize=VARYING)
def select(
    counts, sizes, distances, nearest, chosen, chosen_count, N, tiles, neighbors, STATES: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Select the nearest states in order; equal distances (see STEPS) go to the first state.

    The least distance of each tile tells in which tile the next state is, so only that tile's distances are read.
    """
    row = tl.program_id(0)
    n = tl.load(counts + row)
    tl.store(chosen_count + row, 0)
    if tl.load(sizes + row) < 2:
        return
    t = tl.arange(0, TILES)
    least_of_tile = tl.load(nearest + row * tiles + t, mask=t * STATES < n, other=INFINITY)
    least = tl.min(least_of_tile, 0)
    if least == INFINITY:
        return
    steps_of_tile = tl.floor((least_of_tile - least) * STEPS + 0.5)  # (tiles,)
    last_step, last = least * 0 - 1, n * 0 - 1
    selected = 0
    for j in range(neighbors):
        tile = tl.argmin(steps_of_tile, 0)
        number = tile * STATES + tl.arange(0, STATES)
        distance = tl.load(distances + row.to(tl.int64) * N + number, mask=number < n, other=INFINITY)
        steps = tl.floor((distance - least) * STEPS + 0.5)  # (states,)
        free = (steps > last_step) | ((steps == last_step) & (number > last))
        steps = tl.where(free, steps, INFINITY)
        last_step = tl.min(steps, 0)
        last = tl.min(tl.where(steps == last_step, number, n), 0)
        tl.store(chosen + row * neighbors + j, last)
        selected += (last_step < INFINITY).to(tl.int32)
        rest = tl.min(tl.where(number == last, INFINITY, steps), 0)
        steps_of_tile = tl.where(t == tile, rest, steps_of_tile)
    tl.store(chosen_count + row, selected)


@triton.jit(do_not_specialize=VARYING)
def project(
    states, table, sizes, ids, log_p, starts, head, normalizers, chosen, chosen_count, log_q, V, N, S, D, blocks, neighbors,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute log Q, the mean of the distributions of the selected states."""
    first, row = tl.program_id(0), tl.program_id(1)
    selected = tl.load(chosen_count + row)
    if selected == 0:
        return
    k = tl.load(sizes + row)
    for start in range(first * TOKENS, k, tl.num_programs(0) * TOKENS):
        inside, token, _ = load_candidates(ids, log_p, starts, row, start, k, V, TOKENS)
        top = tl.full((TOKENS,), -INFINITY, tl.float32)
        total = tl.zeros((TOKENS,), tl.float32)
        for j in range(selected):
            number = tl.load(chosen + row * neighbors + j)
            block = tl.load(table + row * blocks + number // S).to(tl.int64)
            terms = tl.zeros((TOKENS, WIDTH), tl.float32)
            for begin in range(0, D, WIDTH):
                column = begin + tl.arange(0, WIDTH)
                some = column < D
                h = tl.load(states + (block * S + number % S) * D + column, mask=some, other=0.0)
                at = token[:, None] * D + column[None, :]
                w = tl.load(head + at, mask=inside[:, None] & some[None, :], other=0.0)
                terms += w.to(tl.float32) * h.to(tl.float32)[None, :]
            value = tl.sum(terms, 1) - tl.load(normalizers + row.to(tl.int64) * N + number)
            higher = tl.maximum(top, value)
            total = total * tl.exp(top - higher) + tl.exp(value - higher)
            top = higher
        mean = top + tl.log(total / selected)
        tl.store(log_q + row.to(tl.int64) * V + start + tl.arange(0, TOKENS), mean, mask=inside)


@triton.jit
def load_gain(log_q, at, mask, w):
    """Return the log of the factors that P is multiplied by, before `once` limits them; 0 where the mask is False."""
    return w * tl.load(log_q + at, mask=mask, other=0.0)


@triton.jit
def find_limit(log_p, log_q, marks, base, k, projected, w, TOKENS: tl.constexpr):
    """Return the limit of `reference.limit`: the mean gain under P of all tokens but the marked ones that are above it.

    Leaving out the marked tokens above the mean of all lowers the mean, and so on until no other marked token is above it.
    """
    place = tl.arange(0, TOKENS)
    limit, mean = k * 0.0 + INFINITY, k * 0.0 + FINITE
    while mean < limit:  # NaN is not: no token would be left
        limit = mean
        top, total, mass = k * 0.0 - INFINITY, k * 0.0, k * 0.0
        for start in range(0, k, TOKENS):
            at = base + start + place
            inside = start + place < k
            gain = load_gain(log_q, at, start + place < projected, w)
            marked = tl.load(marks + at, mask=inside, other=1) != 0
            left = inside & ~(marked & (gain > limit))
            p = tl.where(left, tl.exp(tl.load(log_p + at, mask=inside, other=-INFINITY)), 0.0)
            higher = tl.maximum(top, tl.max(tl.where(left, gain, -INFINITY), 0))
            shift = tl.where(higher == -INFINITY, 0.0, higher)
            total = total * tl.exp(top - shift) + tl.sum(tl.where(left, p * tl.exp(gain - shift), 0.0), 0)
            mass += tl.sum(p, 0)
            top = higher
        mean = top + tl.log(total / mass)
    return limit


@triton.jit
def load_fused(log_p, log_q, marks, at, inside, mask, w, limit, once):
    """Return log P and the fused score of some tokens; where marked, with a gain that `once` brings towards the limit."""
    lp = tl.load(log_p + at, mask=inside, other=-INFINITY)
    gain = load_gain(log_q, at, mask, w)
    if marks is not None:
        marked = tl.load(marks + at, mask=mask, other=0) != 0
        gain = tl.where(marked & (gain > limit), gain - once * (gain - limit), gain)
    return lp, lp + gain


@triton.jit
def fuse(
    rows, sizes, ids, log_p, log_q, marks, chosen, chosen_count, scores, applied, changed, state, weights, V, score_stride, neighbors,
    weight, gap, once, AGREEMENT: tl.constexpr, UNCERTAINTY: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Multiply the two distributions and write the scores of the plausible tokens."""
    row = tl.program_id(0)
    k, selected = tl.load(sizes + row), tl.load(chosen_count + row)
    used = selected > 0
    projected = tl.where(used, k, 0)  # tokens with log Q
    base, place = row.to(tl.int64) * V, tl.arange(0, TOKENS)
    zero = k * 0.0  # scalars in float32 that loops change
    w, limit = zero + weight, zero
    if AGREEMENT or UNCERTAINTY:
        jsd, top = zero, zero - INFINITY
        for start in range(0, k, TOKENS):
            inside = start + place < k
            lp = tl.load(log_p + base + start + place, mask=inside, other=-INFINITY)
            lq = tl.load(log_q + base + start + place, mask=start + place < projected, other=0.0)
            p, q = tl.exp(lp), tl.exp(lq)
            log_m = tl.log(0.5 * (p + q))
            terms = p * (lp - log_m) + q * (lq - log_m)
            jsd += 0.5 * tl.sum(tl.where(inside & (p + q > 0), terms, 0.0), 0)
            top = tl.maximum(top, tl.max(lp, 0))
        w = zero + 1
        if AGREEMENT:
            w *= tl.minimum(tl.maximum(1 - jsd / LN2, 0.0), 1.0)
        if UNCERTAINTY:
            w *= tl.sqrt(tl.maximum(1 - tl.exp(top), 0.0))
    w = tl.where(used, w, 0.0)
    if marks is not None:
        limit = find_limit(log_p, log_q, marks, base, k, projected, w, TOKENS)

    likeliest, best, before, total = zero - INFINITY, zero - INFINITY, zero - INFINITY, zero
    for start in range(0, k, TOKENS):
        inside = start + place < k
        at, some = base + start + place, start + place < projected
        lp, fused = load_fused(log_p, log_q, marks, at, inside, some, w, limit, once)
        top = tl.max(fused, 0)
        first = tl.argmax(fused, 0)
        before = tl.where(top > best, tl.max(tl.where(place == first, lp, -INFINITY), 0), before)
        higher = tl.maximum(best, top)
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(fused - higher), 0)
        best, likeliest = higher, tl.maximum(likeliest, tl.max(lp, 0))
    tl.store(applied + row, used)
    tl.store(changed + row, used & (before < likeliest))  # the log P of the token that is now the likeliest
    tl.store(state + row, tl.load(chosen + row * neighbors, mask=used, other=-1))
    tl.store(weights + row, w)
    shift = best + tl.log(total) if NORMALIZE else 0.0

    to = scores + (row.to(tl.int64) if rows is None else tl.load(rows + row).to(tl.int64)) * score_stride
    for start in range(0, k, TOKENS):
        inside = start + place < k
        at, some = base + start + place, start + place < projected
        lp, fused = load_fused(log_p, log_q, marks, at, inside, some, w, limit, once)
        token = tl.load(ids + at, mask=inside, other=0)
        tl.store(to + token, tl.maximum(fused - shift, lp - gap), mask=inside)


# -- launches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """The amount of work of one program, and its warps and pipeline stages."""

    states: int  # vision states
    warps: int  # of the programs that compare them
    width: int  # numbers of a state multiplied at once
    stages: int  # of the pipeline that loads these
    tokens: int = 64  # candidates compared at once; larger sets are compared in several rounds
    vocabulary: int = 2048  # logits
    projections: int = 16  # programs of a row that project its selected states,
    projected: int = 4  # on this many candidates at once


def tiles_for(rows: int, states: int, dtype: torch.dtype, hip: bool = torch.version.hip is not None) -> Tiles:
    """Choose tiles whose operands fit the shared memory of every GPU: 99 kB on NVIDIA's, 64 kB on AMD's.

    Small tiles keep the device busy where there are few states, and save registers in float32.
    """
    many = dtype in HALF and rows * states >= 256 * 64
    if hip:
        return Tiles(64, warps=8, width=128, stages=2) if many else Tiles(16, warps=4, width=128, stages=2)
    if many:
        return Tiles(64, warps=8, width=128, stages=3)
    return Tiles(16, warps=8, width=256, stages=3) if dtype in HALF else Tiles(16, warps=4, width=128, stages=3)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # the interpreter cannot multiply bfloat16
FEW_TILES, MANY_TILES = 1024, 8192  # tiles of states that `select` compares: two programs to compile


class Launch(NamedTuple):
    """A kernel, its grid and its arguments."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name, with constants
    warps: int = 4
    stages: int = 1

    def run(self) -> Any:
        """Launch the kernel, and return it as Triton compiled it."""
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}
        return self.kernel[self.grid](**self.arguments, **options)


Buffers = dict[str, Tensor]
DTYPES = dict.fromkeys(("found", "ids", "chosen", "chosen_count"), torch.int32) | {"marks": torch.int8}


def allocate(old: Buffers, logits: Tensor, states: RowStates, rule: Rule, tiles: Tiles) -> Buffers:
    """Return the memory between the kernels of a step; buffers of `old` that are large enough are used again."""
    vocabulary, longest = logits.shape[1], states.longest
    counts = {  # numbers for each row
        **dict.fromkeys(("largest", "sums", "found", "masses"), triton.cdiv(vocabulary, tiles.vocabulary)),
        **dict.fromkeys(("ids", "log_p", "log_q"), vocabulary),
        "marks": vocabulary if rule.once else 0,
        **dict.fromkeys(("distances", "normalizers"), longest),
        "nearest": triton.cdiv(longest, tiles.states),
        "chosen": rule.neighbors,
        "chosen_count": 1,
    }
    buffers = {}
    for name, count in counts.items():
        size, dtype = count * len(states), DTYPES.get(name, torch.float32)
        enough = name in old and old[name].numel() >= size
        buffers[name] = old[name] if enough else torch.empty(size, dtype=dtype, device=logits.device)
    return buffers


def launches(
    logits: Tensor,
    states: RowStates,
    head: Tensor,
    rule: Rule,
    buffers: Buffers,
    out: StepOutput,
    tiles: Tiles,
    ended: Tensor | None = None,
    rows: Tensor | None = None,
    gap: float = math.inf,
    written: Tensor | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Launch]:
    """Yield the kernels of a step in order; each must have been launched before the next one is taken.

    Args:
        logits: (·, V). Row b of the step is their row rows[b].
        states: The vision states of the B rows.
        head: (≥ V, d).
        rule: The settings.
        buffers: Memory between the kernels.
        out: Written to; `out.scores` may be `logits` itself.
        tiles: Sizes of the programs.
        ended: (B,) rows that keep their logits.
        rows: (B,) integers; None for all rows in order.
        gap: How far below its logit the score of a token outside the plausible set is.
        written: (B, n) tokens generated so far, -1 for none; only `once` needs them.
        gather: Returns the head's rows of token ids (n,), for heads that are split over several devices.
    """
    batch, vocabulary, (_, size, width) = len(states), logits.shape[1], states.states.shape
    parts, state_tiles = triton.cdiv(vocabulary, tiles.vocabulary), triton.cdiv(states.longest, tiles.states)
    adaptive = rule.weight if isinstance(rule.weight, str) else ""
    values = {
        **buffers, "logits": logits, "rows": rows, "ended": ended, "head": head, "V": vocabulary, "stride": logits.stride(0),
        "states": states.states, "table": states.blocks, "counts": states.counts, "copies": states.rows_per_item,
        "N": states.longest, "S": size, "D": width, "blocks": states.table.shape[1], "parts": parts, "tiles": state_tiles,
        "scores": out.scores, "score_stride": out.scores.stride(0), "sizes": out.sizes, "applied": out.applied,
        "changed": out.changed, "state": out.states, "weights": out.weights, "log_alpha": math.log(rule.alpha), "gap": gap,
        "sign": -1.0 if rule.select == "max" else 1.0, "neighbors": rule.neighbors, "once": rule.once,
        "weight": 1.0 if adaptive else rule.weight, "starts": None,
    }  # fmt: skip
    if rule.once and written is not None and written.shape[1]:
        values |= {"written": written, "length": written.shape[1], "written_stride": written.stride(0)}
    else:
        values["marks"] = None

    def launch(kernel: Any, *grid: int, warps: int = 4, stages: int = 1, **constants: Any) -> Launch:
        arguments = {name: constants[name] if name in constants else values[name] for name in kernel.arg_names}
        return Launch(kernel, grid, arguments, warps, stages)

    few = triton.next_power_of_2(parts)
    yield launch(maxima, parts, batch, TILE=tiles.vocabulary)
    yield launch(count, parts, batch, TILE=tiles.vocabulary, TILES=few)
    yield launch(pack, parts, batch, TILE=tiles.vocabulary, TILES=few, warps=8)
    if values["marks"] is not None:
        yield launch(mark, triton.cdiv(values["length"], 128), batch, TOKENS=128)
    if gather is not None:
        ids = plausible_ids(buffers["ids"], out.sizes, vocabulary)
        if len(ids) * width > COPIED:
            raise TooManyRows
        values |= {"head": gather(ids.long()), "starts": out.sizes.cumsum(0) - out.sizes}
    grid = (states.rows_per_item, state_tiles, batch // states.rows_per_item)
    sizes = {"STATES": tiles.states, "TOKENS": tiles.tokens, "WIDTH": tiles.width}
    yield launch(compare, *grid, **sizes, WIDE=INTERPRETED, warps=tiles.warps, stages=tiles.stages)
    yield launch(select, batch, STATES=tiles.states, TILES=MANY_TILES if state_tiles > FEW_TILES else FEW_TILES)
    yield launch(project, tiles.projections, batch, TOKENS=tiles.projected, WIDTH=1024)
    weights = {"AGREEMENT": adaptive in ("agreement", "both"), "UNCERTAINTY": adaptive in ("uncertainty", "both")}
    yield launch(fuse, batch, **weights, NORMALIZE=rule.normalize, TOKENS=1024)


def plausible_ids(ids: Tensor, sizes: Tensor, vocabulary: int) -> Tensor:
    """Return the packed ids of all rows without the gaps between them; waits for the device.  -> (n,)"""
    inside = torch.arange(vocabulary, device=ids.device) < sizes[:, None]  # (B, V)
    return ids[: inside.numel()].view_as(inside)[inside]


# -- the step ------------------------------------------------------------------------------------------------------


class TooManyRows(Exception):
    """Raised on all ranks alike if the gathered rows of a split head would take too much memory."""


def suits(head: LinearHead, rule: Rule) -> bool:
    """Return whether the kernels support this head and these settings."""
    weight = head.plain_weight
    return (
        rule.usual
        and weight is not None
        and weight.dtype in (torch.float32, *HALF)
        and weight.is_contiguous()
        and weight.shape[1] % 16 == 0  # else loads are not aligned
    )


class TritonStep(Step):
    """The kernels above.

    States of another dtype than the head's are left to torch, and so are float64 logits and more states than `select` can read.
    """

    name = "triton"

    def __init__(self, head: LinearHead, rule: Rule) -> None:
        super().__init__(head, rule)
        assert head.plain_weight is not None
        self.weight = head.plain_weight
        self.gather = None if head.local else partial(head.rows, self.weight)
        self.torch = BatchedStep(head, rule)
        self.kernels: list[Any] = []  # of the last step, as they were compiled

    @torch.no_grad()
    def take(self, inputs: StepInput) -> StepOutput:
        if self.misfit(inputs):
            return self.torch.take(inputs)
        logits, states, _, ended, written = inputs
        try:
            return self.launch(logits, states, torch.empty_like(logits), ended=ended, written=written)
        except TooManyRows:
            return self.torch.take(inputs)

    @torch.no_grad()
    def take_in_place(self, inputs: StepInput, rows: Tensor | None, gap: float) -> StepOutput:
        if self.gather is not None or self.misfit(inputs):
            return super().take_in_place(inputs, rows, gap)
        logits, states = inputs.logits, inputs.states
        return self.launch(logits, states, logits, rows=rows, gap=gap, written=inputs.written)

    def launch(
        self, logits: Tensor, states: RowStates, scores: Tensor, tiles: Tiles | None = None, **options: Any
    ) -> StepOutput:
        """Launch the kernels; for `options` see `launches`."""
        device, batch = logits.device, len(states)
        tiles = tiles or tiles_for(batch, states.longest, states.states.dtype)
        self.reserve(logits, states, tiles)
        sizes, state = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
        applied, changed = (torch.empty(batch, dtype=torch.bool, device=device) for _ in range(2))
        out = StepOutput(scores, sizes, applied, changed, state, torch.empty(batch, device=device))
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            steps = launches(
                logits, states, self.weight, self.rule, self.buffers, out, tiles, gather=self.gather, **options
            )
            self.kernels = [launch.run() for launch in steps]
        return out

    def reserve(self, logits: Tensor, states: RowStates, tiles: Tiles | None = None) -> None:
        tiles = tiles or tiles_for(len(states), states.longest, states.states.dtype)
        self.buffers |= allocate(self.buffers, logits, states, self.rule, tiles)

    def implementation(self, inputs: StepInput) -> str:
        reason = self.misfit(inputs)
        return self.name if reason is None else f"{self.torch.name}: {reason}"

    def misfit(self, inputs: StepInput) -> str | None:
        """Return why the kernels cannot compute a step, in a few words; None if they can."""
        logits, states, dtype = inputs.logits, inputs.states, inputs.states.states.dtype
        tiles = tiles_for(len(states), states.longest, dtype)
        if triton.cdiv(states.longest, tiles.states) > MANY_TILES:
            return f"{states.longest:,} vision states"
        if dtype != self.weight.dtype:
            return f"states in {dtype} and a head in {self.weight.dtype}"
        return (
            None if logits.dtype != torch.float64 and logits.stride(1) == 1 else "logits in float64, or not contiguous"
        )


# -- the check before first use ------------------------------------------------------------------------------------

CLOSE = 0.05  # by how much scores may differ from the reference's
# (device, dtype, vocabulary, variant of the kernels) -> whether the kernels agreed with the reference
_WORKS: dict[tuple[Any, ...], bool] = {}


def works(head: LinearHead, rule: Rule, device: torch.device) -> bool:
    """Return whether the kernels compile and agree with the reference on a device.

    They were compiled for many GPUs and tested in Triton's interpreter, not on every device. So every variant takes a small step
    on random numbers when it is chosen for the first time. If it fails, a warning is issued.
    """
    assert head.plain_weight is not None
    vocabulary, dtype = head.vocabulary, head.plain_weight.dtype
    key = (
        device,
        dtype,
        vocabulary,
        rule.weight if isinstance(rule.weight, str) else "",
        rule.normalize,
        rule.once > 0,
        head.local,
    )
    if key in _WORKS:
        return _WORKS[key]
    try:
        problem = find_problem(vocabulary, dtype, rule, device, head.local)
    except torch.OutOfMemoryError:
        return False  # there may be room the next time
    except Exception as error:  # from the compiler, the driver or the device
        problem = f"{type(error).__name__}: {str(error).strip()[:200]}"
    _WORKS[key] = problem is None
    if problem is not None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        warnings.warn(
            f"The Triton step of revisit cannot be used on {name} with triton {triton.__version__} and torch "
            f"{torch.__version__} ({problem}), so torch is used instead. Please report this; REVISIT_KERNEL=0 avoids it.",
            stacklevel=4,
        )
    return _WORKS[key]


@torch.no_grad()
def find_problem(
    vocabulary: int, dtype: torch.dtype, rule: Rule, device: torch.device, local: bool = True
) -> str | None:
    """Describe how a step differs from the reference's, with small and large tiles, into new scores and in place; None if not."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(4, 64, 64, generator=generator).to(device, dtype)
    states = RowStates(pool, np.array([[2, 0], [1, 1], [3, 1]]), np.array([100, 0, 40]))
    head = LinearHead((0.3 * torch.randn(vocabulary, 64, generator=generator)).to(device, dtype))
    ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:80] for _ in range(3)]).to(device)
    plausible = torch.rand(ids.shape, generator=generator).to(device) * 8
    logits = torch.full((3, vocabulary), -100.0, device=device).scatter_(1, ids, plausible)
    written, step = ids[:, :40].contiguous() if rule.once else None, TritonStep(head, rule)
    if not local:
        step.gather = partial(head.rows, head.weight)
    want = reference.ReferenceStep(head, rule).take(StepInput(logits, states, written=written))
    for size, rows in ((1, None), (1 << 20, torch.arange(3, device=device))):
        scores = torch.empty_like(logits) if rows is None else logits.clone()
        source, tiles = logits if rows is None else scores, tiles_for(size, size, dtype)
        got = step.launch(source, states, scores, tiles, rows=rows, written=written)
        if got.sizes.tolist() != want.sizes.tolist():
            return f"{got.sizes.tolist()} plausible tokens instead of {want.sizes.tolist()}"
        if not torch.allclose(got.scores, want.scores, rtol=CLOSE, atol=CLOSE):
            return f"the scores of {'large' if size > 1 else 'small'} tiles differ"
    return None
