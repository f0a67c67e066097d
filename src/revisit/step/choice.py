"""The choice between the implementations of ReVisiT's step, and the step as one function."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from revisit import settings
from revisit.errors import RevisitError, unknown
from revisit.models.devices import widest_float
from revisit.models.head import LinearHead
from revisit.step.batched import BatchedStep
from revisit.step.cached import CachedStep
from revisit.step.interface import RowStates, Step, StepInput
from revisit.step.reference import ReferenceStep
from revisit.step.rule import Rule

Implementation = Literal["reference", "torch", "triton"]


@torch.no_grad()
def refine_logits(
    states: Tensor | Sequence[Tensor],
    head: Tensor | LinearHead,
    logits: Tensor,
    method: Rule | None = None,
    implementation: Implementation | None = None,
    *,
    written: Tensor | None = None,
    withheld: Tensor | None = None,
) -> Tensor:
    """Return ReVisiT's scores for one decoding step of a loop of your own.

    Args:
        states: Hidden states of each item's vision tokens, (items, n, d) or a list of (n, d); n = 0 without an image.
        head: The LM head's (V, d) weight, or a `LinearHead` with its bias, scale and cap.
        logits: (B, V) of the step. B is a multiple of the items: consecutive rows belong to one item (beams).
        method: A `ReVisiT` with the settings; the paper's by default. select="random" draws from torch's generator.
        implementation: "reference", "torch" or "triton" (GPUs); by default the one that `choose` selects.
        written: (B, n) tokens generated so far, -1 where a row has fewer; required by the setting `once`.
        withheld: (V,) or (B, V) mask of tokens that must not be chosen. Their scores are -inf. A row in which no plausible token
            is left gets its logits, with those of withheld tokens -inf.

    Returns:
        (B, V) log-scores, -inf outside the plausible set; their softmax and argmax are ReVisiT's.
    """
    items, rule = list(states), method or Rule()
    projection = LinearHead(head) if isinstance(head, Tensor) else head
    _check_shapes(items, projection, logits)
    if rule.once and (written is None or written.ndim != 2 or len(written) != len(logits)):
        raise RevisitError(
            "refine_logits: the setting once needs the tokens generated so far: pass written, of shape (B, n)."
        )
    if withheld is not None and (
        withheld.dtype != torch.bool or withheld.shape not in (logits.shape, logits.shape[1:])
    ):
        raise RevisitError(
            f"refine_logits: withheld must be a mask of bool, of shape (V,) or (B, V), not {withheld.dtype} {tuple(withheld.shape)}."
        )
    if getattr(rule, "phase", "both") != "both":
        raise RevisitError("refine_logits takes one step and cannot tell thoughts from the answer: leave out phase.")
    step = choose(projection, rule, logits.device, implementation)
    padded = RowStates.of_items(items, rows_per_item=len(logits) // len(items))
    device = logits.device
    random = rule.select == "random"
    draws = torch.rand(len(logits), 1, dtype=widest_float(device), device=device) if random else 0.0
    tokens = None if written is None else written.to(device, torch.long)
    scores = step.take(StepInput(logits, padded, draws, written=tokens)).scores
    return scores if withheld is None else withhold(scores, logits, withheld.to(device))


def withhold(scores: Tensor, logits: Tensor, withheld: Tensor) -> Tensor:
    """Exclude tokens after a step; a row without another plausible token gets its logits.  (B, V), (B, V), (V,) or (B, V) -> (B, V)"""
    left, plain = (values.masked_fill(withheld, -math.inf) for values in (scores, logits))
    return torch.where(left.amax(-1, keepdim=True) == -math.inf, plain, left)


def choose(head: LinearHead, rule: Rule, device: torch.device, implementation: Implementation | None = None) -> Step:
    """Choose the step implementation for these settings.

    On a CPU, torch works row by row with a cache; the reference handles the full vocabulary and the rounding of the released code.
    On an accelerator, the usual settings are computed for the whole batch, by Triton kernels or else by torch, and all others by the
    reference.

    Args:
        head: The LM head.
        rule: The settings.
        device: The device of the states.
        implementation: Use this one instead; raises RevisitError if it does not support the head or the settings.
    """
    fallback = None
    if implementation is None:
        exact = rule.full_vocabulary or rule.model_dtype or not supports("torch", head, rule, device)
        fallback = None if device.type == "cpu" else without_triton(device, head, rule)
        with_triton = device.type != "cpu" and fallback is None
        implementation = "reference" if exact else "triton" if with_triton else "torch"
    if not supports(implementation, head, rule, device):
        raise RevisitError(
            f"The {implementation} step is not available here, or does not support this head, device or setting: leave "
            'implementation out, or pass "torch" or "reference".'
        )
    if implementation == "triton":
        from revisit.step.triton import TritonStep

        return TritonStep(head, rule)
    step: Step
    if implementation == "reference":
        step = ReferenceStep(head, rule)
    else:
        step = CachedStep(head, rule) if device.type == "cpu" else BatchedStep(head, rule)
    step.fallback = fallback
    return step


def supports(implementation: Implementation, head: LinearHead, rule: Rule, device: torch.device) -> bool:
    """Return whether an implementation is available on a device and supports the head and the settings."""
    if implementation not in get_args(Implementation):
        raise unknown("implementation", str(implementation), get_args(Implementation))
    if implementation == "triton":
        return without_triton(device, head, rule) is None
    return implementation == "reference" or device.type == "cpu" or rule.usual


def usual_step(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the implementation that is used with a plain head and the paper's settings."""
    return choose(LinearHead(torch.zeros(1, 16, dtype=dtype)), Rule(), device).name


def without_triton(device: torch.device, head: LinearHead | None = None, rule: Rule | None = None) -> str | None:
    """Return why the Triton step cannot be used on a device, or with a head and settings, in a few words; None if it can."""
    if not settings.triton_step():
        return "turned off by REVISIT_KERNEL"
    if find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        if device.type != "cuda":
            return "it needs a CUDA or ROCm device"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs compute capability 8.0"
    if head is None or rule is None:
        return None
    from revisit.step import triton  # where torch was built for GPUs

    if not triton.suits(head, rule):
        return "it does not support this head, or these settings"
    return None if triton.works(head, rule, device) else "it failed its check"


def _check_shapes(items: Sequence[Tensor], head: LinearHead, logits: Tensor) -> None:
    """Raise RevisitError unless the shapes of states, head and logits match."""
    if not items or logits.ndim != 2 or not len(logits) or len(logits) % len(items):
        raise RevisitError(
            f"refine_logits: logits must be (B, V) with B a multiple of the {len(items)} items of the states, not {tuple(logits.shape)}."
        )
    vocabulary, width = head.weight.shape
    if any(item.ndim != 2 or item.shape[1] != width for item in items) or logits.shape[1] > vocabulary:
        raise RevisitError(
            f"refine_logits: a head of shape ({vocabulary}, {width}) needs states (n, {width}) and at most {vocabulary} logits per row, "
            f"not states {', '.join(str(tuple(item.shape)) for item in items[:8])} and {logits.shape[1]} logits."
        )
