"""DeCo (Wang et al.): correct the final logits by the earlier layer that is most confident about a candidate.

Candidates are the likeliest tokens up to a probability mass of top_p, at most top_k of them. Among the early layers, through
the final norm and the head, the one that gives any candidate the highest probability m corrects: score = l + alpha · m ·
l_early.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from revisit.decoding.method import LayerNumbers, Method, Step, StepResult, layers_of
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Count, PositiveShare, Strength


def candidates(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return the mask of the likeliest tokens that reach a mass of top_p, at most top_k.  (..., V) -> (..., V)"""
    best = logits.softmax(-1).topk(min(top_k, logits.shape[-1]), dim=-1)
    before = torch.nn.functional.pad(best.values.cumsum(-1)[..., :-1], (1, 0))  # mass of the likelier ones
    within = before < top_p if top_p < 1 else torch.ones_like(before, dtype=torch.bool)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best.indices, within)


def correct(logits: Tensor, early: Tensor, alpha: float, top_p: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the corrected scores and the layer that each row used.  (rows, V), (rows, layers, V) -> (rows, V), (rows,)"""
    keep = candidates(logits, top_p, top_k)
    confidence = early.softmax(-1).masked_fill(~keep.unsqueeze(-2), 0.0).amax(-1)  # (rows, layers)
    m, layer = confidence.max(-1)
    chosen = early.take_along_dim(layer[..., None, None], -2).squeeze(-2)  # (rows, V)
    scores = logits + (alpha * m).unsqueeze(-1) * chosen if alpha else logits
    return scores.masked_fill(~keep, -math.inf), layer


class DeCo(Method):
    """DeCo; the defaults are those of its command line.

    Args:
        alpha: Strength of the correction.
        layers: Hidden states that may correct: "late" (20 to 28 of 32, scaled to the decoder's depth), "released"
            (these numbers in decoders that have them), or indices.
        top_p: Probability mass that the candidates reach.
        top_k: Most candidates.
    """

    alpha: Strength = 0.6
    layers: Literal["late", "released"] | LayerNumbers = "late"
    top_p: PositiveShare = 0.9
    top_k: Count = 20

    name = "deco"
    summary = "correct the final logits by the earlier layer that is most confident about a candidate"
    cost = "1 forward; head rows for the early layers"
    source = "Wang et al., DeCo, arXiv:2410.11779"
    released = {"layers": "released"}

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        layers = layers_of(self, 20, 28, prompt.parts.depth, 1)
        exits = passes.early_exits(layers, final_norm=True)

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            early = exits.take(passes.raw)
            scores, layer = correct(logits, early, self.alpha, self.top_p, self.top_k)
            chosen = early.take_along_dim(layer[..., None, None], -2).squeeze(-2) if prompt.record else None
            return StepResult(scores, chosen, layers=layers, layer=layer)

        return step
