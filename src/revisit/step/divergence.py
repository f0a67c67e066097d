"""Distributions of many vision states over padded sets of candidates: how far they are from P, and which are selected.

The reference's formulas for (rows, states, candidates) at once, where a candidate that is not plausible is masked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from revisit.models.head import LARGEST_LOGIT
from revisit.step import reference
from revisit.step.rule import SOFT_TEMPERATURE, Rule

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
    """The selected states of every row and their shares in Q; shares of 0 where none can be.  (B, N) -> (B, n), (B, n)"""
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
    order = reference.steps_apart(distances, least, sizes[:, None], rule).argsort(dim=-1, stable=True)
    if rule.select == "soft":
        return order, (-distances / SOFT_TEMPERATURE).softmax(-1).nan_to_num(0).gather(-1, order)
    nearest = order[:, : rule.neighbors]
    shares = (distances.gather(-1, nearest) < math.inf).to(distances.dtype)
    return nearest, shares / shares.sum(-1, keepdim=True).clamp_min(1)


def mean_by_shares(log_q: Tensor, shares: Tensor) -> Tensor:
    """The log of the mean of several distributions.  (B, n, K), (B, n, 1) -> (B, K)"""
    return torch.logsumexp(torch.where(shares > 0, log_q + shares.log(), MINUS_INFINITY), 1).clamp_min(OUTSIDE.item())
