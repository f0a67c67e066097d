"""One decoding step of ReVisiT as in the paper, for one sequence; the reference for the other implementations.

`refine_row` reads top to bottom: the plausible tokens, the distributions of the vision tokens over them, the vision token
that agrees most, the product of the two distributions. Logits are a vector over the vocabulary; `states` are hidden
states of vision tokens (one per vision token and layer, layer-major); `head` projects states onto token ids.

Arithmetic is in float32, or in float64 if the logits are; `precision="model"` rounds vision distributions to the
model's dtype as the released code does. Edge cases that the paper leaves open:

* Logits with a NaN or +inf, or without a finite number, are not a distribution, and the sequence is left unchanged. So is a
  sequence without vision tokens. A logit of -inf is a token of probability 0.
* A single plausible token gets log-probability 0, and no vision token is compared.
* A vision token whose logit for some plausible token is NaN or beyond ±1e30 (states times head overflowed, or nearly
  so) is never selected; if the head caps its logits, those before the cap are checked, because a sum that overflows is
  ±inf or NaN depending on its order. Without another vision token, the result is the plausible set with its own distribution.
* Of equal divergences, the first vision token is selected. Divergences are equal if they differ by less than the resolution
  of float32 (1e-6 of their scale), so that the choice does not depend on the order of a sum; with `precision="model"`, which
  reproduces a program, only if they are the same number. Near that limit, or within the rounding error of the logits (1e-6
  of the largest terms), either choice is right. A NaN divergence is never selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from revisit.models.head import LARGEST_LOGIT, LinearHead, constant
from revisit.step.interface import RESOLUTION, SOFT_TEMPERATURE, RowDetail, Step, StepInput, StepOutput
from revisit.step.rule import Divergence, Fusion, Rule

# Vision tokens are projected and compared in slices of at most this many numbers, so that a flat distribution
# (thousands of plausible tokens) over thousands of vision tokens needs bounded memory.
CHUNK_NUMBERS = 1 << 23


def refine_row(
    logits: Tensor,
    states: Tensor,
    head: LinearHead,
    rule: Rule,
    uniform: float = 0.0,
    written: Tensor | None = None,
    compare: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> RowDetail | None:
    """Take one step of one sequence; None if it is left unchanged.  (V,), (n, d)

    `uniform` in [0, 1) is the draw of select="random"; `written` (m,) are the tokens generated so far, for `once`.
    `compare` computes the divergences (n,) from log P and the ids (k,), by default as `all_divergences` does.
    """
    logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)  # (V,)
    ids = plausible(logp, rule.threshold).nonzero().squeeze(-1)  # (k,); none if the logits are not a distribution
    if not len(states) or not len(ids):
        return None
    log_p = logp[ids].log_softmax(-1)
    if len(ids) == 1:
        return RowDetail(ids, log_p, log_p, log_p, -1, None)
    divergences = compare(log_p, ids) if compare else all_divergences(log_p, states, head, ids, rule)  # (n,)
    chosen, shares = select(divergences, len(ids), rule, uniform)  # (m,), (m,)
    if not len(chosen):
        return RowDetail(ids, log_p, log_p, log_p, -1, divergences)
    log_qs = log_softmax(head.logits(states[chosen], ids, rule.model_dtype), rule.model_dtype).to(log_p.dtype)
    log_q = torch.logsumexp(log_qs + shares.log()[:, None].to(log_p.dtype), 0)  # (k,): the mean by shares
    weight = vision_weight(log_p, log_q, rule.weight)
    fused = fuse(log_p, log_q, rule.fusion, weight)
    if rule.once and written is not None:
        fused = limit(log_p, fused, torch.isin(ids, written), rule.once)
    final = fused.log_softmax(-1) if rule.normalize else fused
    return RowDetail(ids, log_p, log_q, final, int(chosen[0]), divergences, float(weight))


def scatter(result: RowDetail | None, logits: Tensor) -> Tensor:
    """Return the refined scores over the whole vocabulary, -inf outside the plausible set.  (V,) -> (V,)"""
    if result is None:
        return logits
    scores = torch.full_like(logits, -math.inf)
    scores[result.ids] = result.final.to(logits.dtype)
    return scores


def plausible(logits: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the plausible tokens, those with p >= alpha · max p > 0; alpha 0 keeps all with p > 0.  (..., V) -> (..., V)

    Works on logits and on log-probabilities. `alpha` may differ by row, (..., 1).
    """
    if not isinstance(alpha, Tensor) and alpha == 0:
        return logits > -math.inf
    largest = logits.amax(-1, keepdim=True)
    return logits >= largest + (alpha.log() if isinstance(alpha, Tensor) else math.log(alpha))


# -- divergences --------------------------------------------------------------------------------------------------


def jsd(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the Jensen–Shannon divergence in nats.  (..., k), (..., k) -> (...)"""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (_mean(log_p, log_p - log_m) + _mean(log_q, log_q - log_m))


def official_divergence(log_p: Tensor, log_q: Tensor, q: Tensor | None = None) -> Tensor:
    """Return the released code's "JSD": the mean (not the sum) over tokens of ½·M·(ln M − ln P) + ½·M·(ln M − ln Q).

    `q` is Q itself, if it was rounded on its own and is not the exponential of `log_q`.
    """
    m = 0.5 * (log_p.exp() + (log_q.exp() if q is None else q))
    log_m = m.log()
    p_part = torch.where(m > 0, m * (log_m - log_p), 0.0).mean(-1)
    q_part = torch.where(m > 0, m * (log_m - log_q), 0.0).mean(-1)
    return 0.5 * (p_part + q_part)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(P ‖ Q) of the output distribution P from a vision token's Q, in nats."""
    return _mean(log_p, log_p - log_q)


def cosine(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return one minus the cosine of the two probability vectors."""
    return 1 - torch.nn.functional.cosine_similarity(log_p.exp(), log_q.exp(), dim=-1)


DIVERGENCES = {"jsd": jsd, "official": official_divergence, "kl": kl, "cosine": cosine}


def _mean(log_p: Tensor, values: Tensor) -> Tensor:
    """Return Σ P · values; tokens of probability 0 contribute nothing, whatever their value."""
    p = log_p.exp()
    return torch.where(p > 0, p * values, 0.0).sum(-1)


def log_softmax(logits: Tensor, model_dtype: bool) -> Tensor:
    """Return the log-softmax over the last dimension, in the logits' own dtype (as released) or in at least float32."""
    if not model_dtype:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1)


def logit_divergence(log_p: Tensor, logits: Tensor, divergence: Divergence, model_dtype: bool) -> Tensor:
    """Return the divergence of vision tokens from their logits, NaN for those that cannot be selected.  (k,), (n, k) -> (n,)"""
    log_q = log_softmax(logits, model_dtype)
    if divergence == "official" and model_dtype:
        values = official_divergence(log_p, log_q, logits.softmax(-1))
    else:
        values = DIVERGENCES[divergence](log_p, log_q)
    return torch.where((logits.abs() < LARGEST_LOGIT).all(-1), values, math.nan)


def all_divergences(log_p: Tensor, states: Tensor, head: LinearHead, ids: Tensor, rule: Rule) -> Tensor:
    """Return the divergence of every vision token from the output distribution, computed in slices of bounded size.  -> (n,)"""
    parts = []
    for part in states.split(max(1, CHUNK_NUMBERS // len(ids))):
        logits = head.logits(part, ids, rule.model_dtype)  # (slice, k)
        parts.append(logit_divergence(log_p, logits, rule.divergence, rule.model_dtype))
    return torch.cat(parts)


# -- selection ----------------------------------------------------------------------------------------------------


def select(divergences: Tensor, size: int, rule: Rule, uniform: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the selected vision tokens, the best first, and their shares in Q.  (n,) -> (m,), (m,)

    Empty if none can be selected. `size` is that of the plausible set, the scale of the "official" divergence.
    """
    usable = ~divergences.isnan()
    count = int(usable.sum())
    distance = (-divergences if rule.select == "max" else divergences).masked_fill(~usable, math.inf)
    ranked = torch.where(usable, quantized_distance(distance, distance.min(), size, rule), math.inf)
    order = ranked.argmin()[None] if rule.neighbors == 1 and rule.select != "soft" else ranked.argsort(stable=True)
    if rule.select == "soft":
        chosen = order[:count]
        return chosen, (-distance[chosen] / SOFT_TEMPERATURE).softmax(-1)
    if rule.select == "random":
        number = int(uniform * count)
        chosen = usable.nonzero().squeeze(-1)[number : number + 1]
    else:
        chosen = order[: min(rule.neighbors, count)]
    return chosen, torch.full_like(distance[chosen], 1 / max(1, len(chosen)))


def quantized_distance(distance: Tensor, least: Tensor, size: int | Tensor, rule: Rule) -> Tensor:
    """Round the gap between each distance and the least to the resolution, so that equal distances get the same number."""
    if rule.model_dtype:
        return distance
    gap = distance - least
    if rule.divergence in ("kl", "official"):
        return (gap / resolution(least, size, rule)).round()
    return gap.round(decimals=-round(math.log10(RESOLUTION)))  # also equal for equal distances, with one kernel


def resolution(least: Tensor, size: int | Tensor, rule: Rule) -> Tensor | float:
    """Return the resolution of float32 near the least distance; 0 compares the numbers as they are."""
    if rule.model_dtype:
        return 0.0
    if rule.divergence == "official":
        return RESOLUTION * (1 / size + least.abs())
    return RESOLUTION * (1 + least.abs()) if rule.divergence == "kl" else RESOLUTION


# -- fusion -------------------------------------------------------------------------------------------------------


def vision_weight(log_p: Tensor, log_q: Tensor, weight: float | str) -> Tensor:
    """Return the weight of the vision side: the given number, or one computed from the two distributions.  (..., k) -> (...)"""
    if not isinstance(weight, str):
        return torch.full_like(log_p[..., 0], weight)
    agreement = (1 - jsd(log_p, log_q) / math.log(2)).clamp(0, 1)
    uncertainty = (-torch.expm1(log_p.amax(-1))).clamp(0, 1).sqrt()
    return {"agreement": agreement, "uncertainty": uncertainty, "both": agreement * uncertainty}[weight]


def fuse(log_p: Tensor, log_q: Tensor, fusion: Fusion, weight: float | Tensor) -> Tensor:
    """Return the fused log-scores: log P + w·log Q ("poe") or log((1−w)·P + w·Q) ("interpolation").  (..., k), (...) -> (..., k)"""
    if fusion == "poe" and not isinstance(weight, Tensor):
        return torch.add(log_p, log_q, alpha=weight) if weight else log_p  # 0 · log 0 excludes nothing
    w = (weight if isinstance(weight, Tensor) else log_p.new_full(log_p.shape[:-1], weight)).unsqueeze(-1)
    if fusion == "poe":
        return log_p + torch.where(w > 0, w * log_q, 0.0)
    return torch.logaddexp(log_p + torch.log1p(-w), log_q + w.log())


def limit(log_p: Tensor, fused: Tensor, written: Tensor, once: float) -> Tensor:
    """Lower the scores of written tokens that the image promotes, by `once` of the excess.  (..., k) -> (..., k)

    A token's gain is its score divided by its probability P. The limit c is the mean gain under P of all tokens except the
    limited ones, the written tokens with a gain above c. With once=1 these gain c, which makes the mean gain of all tokens c,
    so normalization returns them to P: the image raises the probability of no token that the answer already contains.

    c is the least mean that some set of written tokens leaves when it is left out. That set consists of the tokens with the
    largest gains, so c is found by adding the written tokens to the others in the order of their gains.
    """
    nothing = constant(-math.inf, log_p.device)
    gain = torch.where(log_p > nothing, fused - log_p, 0.0)
    order = torch.where(written, gain, -nothing).argsort(stable=True)
    sums = []
    for values in (log_p, fused):
        others = torch.where(written, nothing, values).logsumexp(-1, keepdim=True)
        added = torch.where(written, values, nothing).gather(-1, order)
        sums.append(torch.cat([others, added], -1).logcumsumexp(-1))
    means = torch.where(sums[0] > nothing, sums[1] - sums[0], -nothing)
    excess = (gain - means.amin(-1, keepdim=True)).clamp_min(0)
    return torch.where(written, fused - once * excess, fused)


class ReferenceStep(Step):
    """The reference, applied row by row."""

    name = "reference"

    @torch.no_grad()
    def take(self, inputs: StepInput) -> StepOutput:
        scores = inputs.logits.clone()
        ended = [False] * len(scores) if inputs.ended is None else inputs.ended.tolist()
        rows = [None if ended[row] else self.take_row(inputs, row) for row in range(len(scores))]
        for row, detail in enumerate(rows):
            if detail is not None:
                scores[row] = -math.inf
                scores[row, detail.ids] = detail.final.to(scores.dtype)
        facts = [(0, 0, 0, 0, 0) if r is None else (r.size, r.applied, r.changed, r.state, 1) for r in rows]
        sizes, applied, changed, selected, seen = torch.tensor(facts, device=scores.device).T
        weights = torch.tensor([0.0 if r is None else r.weight for r in rows], device=scores.device)
        return StepOutput(scores, sizes, applied.bool(), changed.bool(), selected, weights, seen.bool(), tuple(rows))

    def take_row(self, inputs: StepInput, row: int) -> RowDetail | None:
        """Take the step of one row; None if it is left unchanged."""
        logits, states, uniform, written = inputs.logits[row], inputs.states.row(row), inputs.uniform, inputs.written
        draw = float(uniform[row]) if isinstance(uniform, Tensor) else uniform
        tokens = None if written is None else written[row]
        return refine_row(logits, states, self.head, self.rule, draw, tokens, self.comparison(inputs, row))

    def comparison(self, inputs: StepInput, row: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Return the function that computes the divergences of a row's states; None for the reference's."""
        return None
