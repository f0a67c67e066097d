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
OUTSIDE = torch.tensor(-4 * LARGEST_LOGIT)  # logit of a token that is not plausible: probability 0, and finite
TINY = 1e-37  # smallest probability whose logarithm is taken


def outside(rule: Rule) -> Tensor:
    """The logit of a token that is not plausible."""
    return MINUS_INFINITY if rule.model_dtype else OUTSIDE


def log_distribution(x: Tensor, rule: Rule) -> Tensor:
    """log Q from logits that are `outside` where a token is not plausible; in float32 at least, and finite."""
    log_q = reference.log_softmax(x, rule.model_dtype)
    return log_q.float().clamp_min(OUTSIDE.item()) if rule.model_dtype else log_q


def distance(log_p: Tensor, log_q: Tensor, inside: Tensor, x: Tensor, rule: Rule) -> Tensor:
    """The reference's divergence, negative for select="max".  (..., 1, K), (..., s, K), (..., 1, K) -> (..., s)

    With s = P + Q, the Jensen–Shannon divergence is ½ Σ (Q ln Q − s ln s) and what depends on P alone, which is left out.
    """
    p, q = log_p.exp(), log_q.exp()
    if rule.divergence == "official":
        if rule.model_dtype:  # the released code rounds Q by itself
            q = x.softmax(-1)
        m = 0.5 * (p + q)
        terms = m * (m.log() - 0.5 * (log_p + log_q))
        value = torch.where(inside & (m > 0), terms, 0).sum(-1) / inside.sum(-1)
    elif rule.divergence == "cosine":
        value = 1 - torch.nn.functional.cosine_similarity(q, p, dim=-1)
    elif rule.divergence == "kl":
        value = (p * (log_p - log_q)).sum(-1)
    else:
        s = q + p.clamp_min(TINY)
        value = 0.5 * q.mul_(log_q).addcmul_(s, s.log(), value=-1).sum(-1)
    return -value if rule.select == "max" else value


def select(distances: Tensor, sizes: Tensor, rule: Rule, uniform: float | Tensor) -> tuple[Tensor, Tensor]:
    """The selected states of every row and their shares in Q; shares of 0 where none can be.  (B, N) -> (B, n), (B, n)"""
    if rule.select == "random":
        usable = distances < math.inf
        wanted = (uniform * usable.sum(-1, keepdim=True).double()).long()  # its number among the usable ones
        first = ((usable.cumsum(-1) - 1 == wanted) & usable).int().argmax(-1, keepdim=True)
        return first, usable.gather(-1, first).to(distances.dtype)
    least = distances.amin(-1, keepdim=True)
    apart = reference.steps_apart(distances, least, sizes[:, None], rule)
    if rule.select != "soft" and rule.neighbors == 1:
        return apart.argmin(-1, keepdim=True), least < math.inf
    order = apart.argsort(dim=-1, stable=True)
    if rule.select == "soft":
        return order, (-distances / SOFT_TEMPERATURE).softmax(-1).nan_to_num(0).gather(-1, order)
    nearest = order[:, : rule.neighbors]
    shares = (distances.gather(-1, nearest) < math.inf).to(distances.dtype)
    return nearest, shares / shares.sum(-1, keepdim=True).clamp_min(1)


def mean_by_shares(log_q: Tensor, shares: Tensor) -> Tensor:
    """The log of the mean of several distributions.  (B, n, K), (B, n, 1) -> (B, K)"""
    return torch.logsumexp(torch.where(shares > 0, log_q + shares.log(), MINUS_INFINITY), 1).clamp_min(OUTSIDE.item())
