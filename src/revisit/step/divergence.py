"""Distributions of many vision states over padded sets of candidates: how far they are from P, and which are selected.

The reference's formulas for (rows, states, candidates) at once, where a candidate that is not plausible is masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from revisit.models.head import LARGEST_LOGIT
from revisit.step import reference
from revisit.step.rule import SOFT_TEMPERATURE, AdaptiveWeight, Rule

# Tensors of the host, because a Python number would first be written to the device by a kernel of its own.
INFINITY, MINUS_INFINITY = torch.tensor(math.inf), torch.tensor(-math.inf)
# Logit of a token that is not plausible: the least that a plausible one may have, so that its probability is 0.
OUTSIDE = torch.tensor(-LARGEST_LOGIT).nextafter(torch.tensor(0.0))
TINY = 1e-37  # smallest probability whose logarithm is taken


def mask(x: Tensor, inside: Tensor, rule: Rule) -> Tensor:
    """The logits of plausible tokens as they are, and of others so low that they have no probability."""
    return torch.where(inside, x, MINUS_INFINITY if rule.model_dtype else OUTSIDE)


def usable(x: Tensor, inside: Tensor, rule: Rule) -> Tensor:
    """Which states have no logit beyond LARGEST_LOGIT, and no NaN, for a plausible token.  (..., s, K) -> (..., s)"""
    if rule.model_dtype:
        x = torch.where(inside, x, 0.0)
    # A norm is one kernel on a GPU, and slow on a CPU.
    largest = x.abs().amax(-1) if x.is_cpu else torch.linalg.vector_norm(x, math.inf, -1)
    return largest < LARGEST_LOGIT


def log_distribution(x: Tensor, rule: Rule) -> Tensor:
    """log Q from masked logits, in float32 at least, and finite."""
    log_q = reference.log_softmax(x, rule.model_dtype)
    return log_q.float().clamp_min(OUTSIDE.item()) if rule.model_dtype else log_q


def entropy(p: Tensor) -> Tensor:
    """−Σ p ln p.  (..., K) -> (...)"""
    # torch's own is one kernel on a GPU, and slow on a CPU.
    return -p.clamp_min(TINY).log_().mul_(p).sum(-1) if p.is_cpu else torch.special.entr(p).sum(-1)


def distance(log_p: Tensor, x: Tensor, inside: Tensor, rule: Rule) -> Tensor:
    """The reference's divergence from masked logits, negative for select="max".  (..., 1, K), (..., s, K), (..., 1, K) -> (..., s)

    The Jensen–Shannon divergence is H(M) − ½ H(Q) and what depends on P alone, which is left out.
    """
    rounded = rule.model_dtype and rule.divergence != "official"  # the released code rounds Q by itself
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


def select(distances: Tensor, sizes: Tensor, rule: Rule, uniform: float | Tensor) -> tuple[Tensor, Tensor]:
    """The selected states of every row, the best first, and which of them could be selected.  (B, N) -> (B, n), (B, n)"""
    if rule.select == "random":
        finite = distances < math.inf
        wanted = (uniform * finite.sum(-1, keepdim=True).double()).long()  # its number among the usable ones
        first = ((finite.cumsum(-1) - 1 == wanted) & finite).int().argmax(-1, keepdim=True)
        return first, finite.gather(-1, first)
    least = distances.amin(-1, keepdim=True)
    if rule.select != "soft" and rule.neighbors == 1:
        equal = distances - least <= 0.5 * reference.resolution(least, sizes[:, None], rule)  # inf − inf is not
        found, first = equal.max(-1, keepdim=True)
        return first, found
    steps, order = reference.steps_apart(distances, least, sizes[:, None], rule).sort(dim=-1, stable=True)
    count = order.shape[1] if rule.select == "soft" else rule.neighbors
    return order[:, :count], steps[:, :count] < math.inf  # inf and NaN, of those that cannot be, come last


def mean(log_q: Tensor, index: Tensor, selected: Tensor, distances: Tensor, rule: Rule) -> Tensor:
    """The log of the mean of the selected distributions, of which nearer ones count more if soft.

    (B, n, K), (B, n), (B, n), (B, N) -> (B, K)
    """
    equal = rule.select != "soft" and not rule.model_dtype  # and each is a distribution, not a rounded one
    if not equal:
        shares = distances.gather(-1, index) / -SOFT_TEMPERATURE if rule.select == "soft" else distances.new_zeros(())
        log_q = log_q + torch.where(selected, shares, MINUS_INFINITY).softmax(-1).log()[..., None]
    parts = torch.where(selected[..., None], log_q, MINUS_INFINITY)
    total = parts.amax(1) - parts.log_softmax(1).amax(1)  # log Σ exp, which is nine kernels of torch's own
    return total.log_softmax(-1) if equal else total


def vision_weight(log_p: Tensor, log_q: Tensor, weight: AdaptiveWeight) -> Tensor:
    """The reference's adaptive weight, where the likeliest token comes first.  (B, K), (B, K) -> (B,)"""
    values = []
    if weight != "uncertainty":  # 1 − JSD / ln 2
        both = torch.stack([log_p, log_q])
        terms = both.exp() * (both - torch.logaddexp(log_p, log_q))
        values.append((terms.nansum((0, 2)) * (-0.5 / math.log(2))).clamp(0, 1))
    if weight != "agreement":
        values.append(torch.expm1(log_p[:, 0]).abs().sqrt())
    return values[0] if len(values) == 1 else values[0] * values[1]
