"""Projection, softmax and Jensen–Shannon divergence of all vision rows in one Triton kernel, which reads the states once.

Switched on by REVISIT_FUSED=1; Triton comes with PyTorch for CUDA. It was tested in Triton's interpreter and never run on a
GPU, so it is off unless asked for, and no speed is claimed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.errors import RevisitError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise RevisitError(
        "REVISIT_FUSED=1 asks for the fused kernel, which needs Triton: pip install triton, or unset REVISIT_FUSED."
    ) from error

if TYPE_CHECKING:
    from revisit.engine import Rule

ROWS, COLUMNS, DEEP = 32, 64, 32  # vision rows of a program, tokens and numbers of a state that it takes at a time


def suits(rule: Rule, states: Tensor, head: Tensor) -> bool:
    """Whether the kernel can take steps by this rule with these states and this head."""
    plain = rule.divergence == "jsd" and not rule.model_dtype
    alike = states.dtype == head.dtype and states.dtype in (torch.float32, torch.float16, torch.bfloat16)
    here = states.is_cuda or _interpreted()
    return plain and alike and here and states.is_contiguous() and head.is_contiguous()


def divergences(states: Tensor, head: Tensor, ids: Tensor, log_p: Tensor, sizes: Tensor) -> Tensor:
    """Divergences of vision rows from n distributions over candidates, of which the first `sizes` count.

    NaN where a logit is not finite.  (rows, d), (V, d), (n, c), (n, c), (n,) -> (n, rows)
    """
    out = torch.empty((len(ids), len(states)), dtype=torch.float32, device=states.device)
    grid = (triton.cdiv(len(states), ROWS), len(ids))
    widen = _interpreted() and states.dtype == torch.bfloat16  # the interpreter would multiply their bits
    _divergences[grid](
        states, head, ids.contiguous(), log_p.float().contiguous(), sizes, out, len(states), states.shape[1], ids.shape[1],
        WIDEN=widen, ROWS=ROWS, COLUMNS=COLUMNS, DEEP=DEEP,
    )  # fmt: skip
    return out


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


# Below is Triton: what a program does for one block of rows and one sequence.


@triton.jit
def _divergences(
    states, head, ids, log_p, sizes, out, height, width, capacity,
    WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Few tokens are projected once; more are projected twice, for the softmax and for the terms, and never kept."""
    sequence = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    size = tl.load(sizes + sequence)
    ids += sequence * capacity
    log_p += sequence * capacity
    if size <= COLUMNS:
        logits, inside = _logits(states, head, ids, 0, size, row, height, width, WIDEN, ROWS, COLUMNS, DEEP)
        bounded = tl.where(inside, logits, float("-inf"))
        top = tl.max(bounded, 1)
        log_total = tl.log(tl.sum(tl.exp(bounded - top[:, None]), 1))
        result = _terms(logits, inside, top + log_total, log_p, 0, size, COLUMNS)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, size, COLUMNS):
            logits, inside = _logits(states, head, ids, start, size, row, height, width, WIDEN, ROWS, COLUMNS, DEEP)
            bounded = tl.where(inside, logits, float("-inf"))
            higher = tl.maximum(top, tl.max(bounded, 1))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(bounded - higher[:, None]), 1)
            top = higher
        normaliser = top + tl.log(total)
        result = tl.zeros([ROWS], tl.float32)
        for start in range(0, size, COLUMNS):
            logits, inside = _logits(states, head, ids, start, size, row, height, width, WIDEN, ROWS, COLUMNS, DEEP)
            result += _terms(logits, inside, normaliser, log_p, start, size, COLUMNS)
    tl.store(out + sequence * height + row, result, mask=row < height)


@triton.jit
def _logits(
    states, head, ids, start, size, row, height, width,
    WIDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """Logits of the rows for some tokens, and which of them count.  -> (ROWS, COLUMNS), (1, COLUMNS)"""
    column = start + tl.arange(0, COLUMNS)
    token = tl.load(ids + column, mask=column < size, other=0)
    logits = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(0, width, DEEP):
        place = depth + tl.arange(0, DEEP)
        some = tl.load(
            states + row[:, None].to(tl.int64) * width + place[None, :],
            mask=(row < height)[:, None] & (place < width)[None, :],
            other=0.0,
        )
        heads = tl.load(
            head + token[None, :] * width + place[:, None],
            mask=(column < size)[None, :] & (place < width)[:, None],
            other=0.0,
        )
        if WIDEN:
            logits = tl.dot(some.to(tl.float32), heads.to(tl.float32), logits, input_precision="ieee")
        else:
            logits = tl.dot(some, heads, logits, input_precision="ieee")
    return logits, (column < size)[None, :]


@triton.jit
def _terms(logits, inside, normaliser, log_p, start, size, COLUMNS: tl.constexpr):
    """What some tokens add to the divergences; NaN if a logit is not finite.  -> (ROWS,)"""
    column = start + tl.arange(0, COLUMNS)
    log_q = logits - normaliser[:, None]
    spoken = tl.load(log_p + column, mask=column < size, other=0.0)[None, :]
    p, q = tl.exp(spoken), tl.exp(log_q)
    log_m = tl.log(tl.maximum(0.5 * (p + q), 1e-38))
    terms = 0.5 * (p * (spoken - log_m) + q * (log_q - log_m)) + logits * 0.0
    return tl.sum(tl.where(inside, terms, 0.0), 1)
