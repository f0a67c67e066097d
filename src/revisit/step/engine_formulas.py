"""ReVisiT as pure tensor functions: plausible set, projection, divergence, selection, fusion.

One decoding step of one sequence reads top to bottom in `refine`. Logits are a vector over the vocabulary; the vision
side is any `Projector`: something that can say how many vision rows there are and give their logits over a few token
ids. Nothing here knows about models, caches or transformers.

Everything is computed in float32 (or in float64 if the logits are), except where `precision="model"` reproduces the
rounding of the published code. Rows of non-finite vision logits can never be selected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Divergence = Literal["jsd", "official", "kl", "cosine"]
Select = Literal["min", "max", "random"]
Fusion = Literal["poe", "interpolation"]

# Vision rows are projected and compared in slices of at most this many numbers, so that a flat distribution
# (thousands of plausible tokens) over thousands of vision tokens needs bounded memory.
CHUNK_NUMBERS = 1 << 23


class Projector(Protocol):
    """Vision rows that can be asked for their logits over a subset of the vocabulary."""

    @property
    def rows(self) -> int:
        """How many vision rows there are (layers × vision tokens, layer-major)."""

    def logits(self, start: int, stop: int, ids: Tensor) -> Tensor:
        """Logits of rows start..stop over the token ids: (stop - start, k)."""


@dataclass(frozen=True)
class Refinement:
    """What one step of ReVisiT did: all vectors run over the plausible ids, in vocabulary order."""

    ids: Tensor  # (k,) token ids of the plausible set
    base: Tensor  # (k,) log P, the output distribution renormalised on the set
    vision: Tensor  # (k,) log Q of the selected vision row on the set
    final: Tensor  # (k,) fused log-scores; a log-distribution unless normalisation was switched off
    row: int  # the selected vision row, -1 where the step was an identity
    divergences: Tensor | None  # (rows,) or None where the step was an identity

    @property
    def size(self) -> int:
        """How many tokens are plausible."""
        return len(self.ids)

    @property
    def applied(self) -> bool:
        """Whether a vision row was used."""
        return self.row >= 0

    @property
    def moved(self) -> bool:
        """Whether the favourite token is another than before."""
        return int(self.final.argmax()) != int(self.base.argmax())

    def materialize(self) -> Refinement:
        """All of it; the engine may have told only the numbers above so far."""
        return self


def plausible(logp: Tensor, alpha: float) -> Tensor:
    """Mask of the tokens with p >= alpha · max p; the arg-max is always inside.  (..., V) -> (..., V)"""
    return logp >= logp.amax(-1, keepdim=True) + math.log(alpha)


def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen–Shannon divergence in nats.  (k,), (rows, k) -> (rows,)"""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    p_part = (log_p.exp() * _finite(log_p - log_m)).sum(-1)
    q_part = (log_q.exp() * _finite(log_q - log_m)).sum(-1)
    return 0.5 * (p_part + q_part)


def official_divergence(log_p: Tensor, log_q: Tensor, q: Tensor | None = None) -> Tensor:
    """What the published code calls JSD: the mean (not the sum) over tokens of ½·M·(ln M − ln P) + ½·M·(ln M − ln Q).

    `q`: Q itself, where it was rounded on its own and is not the exponential of `log_q`.
    """
    m = 0.5 * (log_p.exp() + (log_q.exp() if q is None else q))
    log_m = m.log()
    p_part = torch.where(m > 0, m * (log_m - log_p), 0.0).mean(-1)
    q_part = torch.where(m > 0, m * (log_m - log_q), 0.0).mean(-1)
    return 0.5 * (p_part + q_part)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P ‖ Q): how badly a vision row Q explains the output distribution P, in nats."""
    return (log_p.exp() * _finite(log_p - log_q)).sum(-1)


def cosine(log_p: Tensor, log_q: Tensor) -> Tensor:
    """One minus the cosine of the two probability vectors."""
    return 1 - torch.nn.functional.cosine_similarity(log_p.exp(), log_q.exp(), dim=-1)


DIVERGENCES = {"jsd": jsd, "official": official_divergence, "kl": kl, "cosine": cosine}


def _finite(log_ratio: Tensor) -> Tensor:
    """Zero where both sides are log 0 (their difference is NaN): such a token has no mass to compare."""
    return torch.where(log_ratio.isnan(), 0.0, log_ratio)


def select(divergences: Tensor, how: Select, uniform: float = 0.0) -> int:
    """Index of the chosen row, first on ties; -1 if no row has a usable (non-NaN) divergence.

    `uniform` in [0, 1) decides "random", which draws among the usable rows.
    """
    usable = ~divergences.isnan()
    if not bool(usable.any()):
        return -1
    if how == "random":
        choices = usable.nonzero().squeeze(-1)
        return int(choices[int(uniform * len(choices))])
    worst = math.inf if how == "min" else -math.inf
    ranked = torch.where(usable, divergences, worst)
    return int(ranked.argmin() if how == "min" else ranked.argmax())


def fuse(log_p: Tensor, log_q: Tensor, fusion: Fusion, weight: float, normalize: bool = True) -> Tensor:
    """The fused log-scores: log P + w·log Q ("poe") or log((1−w)·P + w·Q) ("interpolation")."""
    if fusion == "poe":
        fused = log_p + weight * log_q if weight else log_p  # 0 · log 0 is no constraint, not NaN
    else:
        fused = torch.log((1 - weight) * log_p.exp() + weight * log_q.exp())
    return fused.log_softmax(-1) if normalize else fused


def all_divergences(log_p: Tensor, vision: Projector, ids: Tensor, divergence: Divergence, model_dtype: bool) -> Tensor:
    """Divergence of every vision row from the output distribution, in slices of bounded size.  -> (rows,)"""
    slices = (vision.logits(i, j, ids) for i, j in spans(vision.rows, CHUNK_NUMBERS // max(1, len(ids))))
    return torch.cat([compare(log_p, logits, divergence, model_dtype) for logits in slices])


def spans(total: int, step: int) -> list[tuple[int, int]]:
    """Consecutive (start, stop) that cover 0..total, each at most `step` long (and at least 1)."""
    step = max(1, step)
    return [(i, min(i + step, total)) for i in range(0, total, step)]


def compare(log_p: Tensor, logits: Tensor, divergence: Divergence, model_dtype: bool) -> Tensor:
    """Divergence of some vision rows; NaN where a row's logits are not all finite.  (k,), (rows, k) -> (rows,)"""
    return torch.where(logits.isfinite().all(-1), apart(log_p, logits, divergence, model_dtype), math.nan)


def apart(log_p: Tensor, logits: Tensor, divergence: Divergence, model_dtype: bool) -> Tensor:
    """Divergence of vision rows by their logits, -inf for tokens that do not count.  (..., k), (..., rows, k) -> (..., rows)"""
    log_q = log_softmax(logits, model_dtype)
    if divergence == "official" and model_dtype:
        return official_divergence(log_p, log_q, logits.softmax(-1))
    return DIVERGENCES[divergence](log_p, log_q)


def log_softmax(logits: Tensor, model_dtype: bool) -> Tensor:
    """log-softmax over the subset, in the logits' own dtype (as published) or in at least float32."""
    if not model_dtype and logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits.log_softmax(-1)


def refine(
    logits: Tensor,
    vision: Projector,
    *,
    alpha: float,
    divergence: Divergence = "jsd",
    how: Select = "min",
    fusion: Fusion = "poe",
    weight: float = 1.0,
    full_vocabulary: bool = False,
    normalize: bool = True,
    model_dtype: bool = False,
    uniform: float = 0.0,
) -> Refinement:
    """One step: constrain the vocabulary, find the vision row that agrees most, multiply and renormalise.

    A single plausible token leaves nothing to decide: the step is an identity and no vision row is read.
    """
    logp = logits.log_softmax(-1)  # (V,)
    keep = torch.isfinite(logp) if full_vocabulary else plausible(logp, alpha)
    ids = keep.nonzero().squeeze(-1)  # (k,)
    log_p = logp[ids].log_softmax(-1)
    if len(ids) == 1 or vision.rows == 0:
        return Refinement(ids, log_p, log_p, log_p, -1, None)
    divergences = all_divergences(log_p, vision, ids, divergence, model_dtype)  # (rows,)
    row = select(divergences, how, uniform)
    if row < 0:
        return Refinement(ids, log_p, log_p, log_p, -1, divergences)
    log_q = log_softmax(vision.logits(row, row + 1, ids)[0], model_dtype).to(log_p.dtype)
    return Refinement(ids, log_p, log_q, fuse(log_p, log_q, fusion, weight, normalize), row, divergences)


def scatter(result: Refinement, vocabulary: int) -> Tensor:
    """The refined scores over the whole vocabulary, -inf outside the plausible set.  -> (V,)"""
    scores = result.final.new_full((vocabulary,), -math.inf)
    scores[result.ids] = result.final
    return scores
