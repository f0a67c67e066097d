"""DoLa (Chuang et al.): contrast the final layer with the early layer that differs most from it.

The last position's states at some early layers are projected through the LM head, as further rows of its product. With the
layer whose distribution diverges most, score = log p_final − log p_early on the plausible tokens, p >= relative_top · max p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from revisit.decoding.contrastive import cut
from revisit.decoding.method import LayerNumbers, Method, Step, StepResult
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.models.families import resolve_layers
from revisit.registry import Share


def divergences(final: Tensor, early: Tensor) -> Tensor:
    """Return what DoLa's code calls JSD, over the whole vocabulary.  (rows, V), (rows, layers, V) -> (rows, layers)

    With M = (P + Q)/2 it is the mean over tokens of ½·M·(ln M − ln P) + ½·M·(ln M − ln Q): the roles of the textbook's
    distributions are exchanged, and it has no upper bound.
    """
    impossible = final == -math.inf
    if final.device.type != "cpu" or bool(impossible.any()):  # tokens of probability 0 are not compared
        early = early.masked_fill(impossible.unsqueeze(-2), -math.inf)
    log_p = final.log_softmax(-1).masked_fill(impossible, 0.0)  # (rows, V)
    log_q = early.log_softmax(-1)  # (rows, layers, V)
    # rounded on its own, as published
    q = log_q.exp() if early.dtype == final.dtype else early.softmax(-1).to(final.dtype)
    m = q.add_(final.softmax(-1).unsqueeze(-2)).mul_(0.5)
    log_q.nan_to_num_(neginf=0.0)
    # Differences token by token: layers may be so close that sums of each term would cancel.
    apart = m.clamp_min(torch.finfo(m.dtype).tiny).log_().mul_(2).sub_(log_p.unsqueeze(-2)).sub_(log_q)
    result: Tensor = torch.linalg.vecdot(m, apart)
    return result.mul_(0.5 / final.shape[-1])


def contrast_layers(final: Tensor, early: Tensor, relative_top: float) -> Tensor:
    """Return log p_final − log p_early on the plausible tokens, -inf elsewhere.  (..., V), (..., V) -> (..., V)"""
    if relative_top == 0:
        return final - early  # as the original: no normalization on either side
    logp = final.log_softmax(-1)
    return cut(logp - early.log_softmax(-1), logp, relative_top)


def candidate_layers(spec: str | Sequence[int], depth: int, tied: bool) -> tuple[int, ...]:
    """Return the hidden states to choose from: every second one of the "low" or "high" half, both ("all"), or a list.

    The embedding (0) is left out if the head is tied to it. The final layer is never a candidate: it may be listed, as in
    the original's lists, and is skipped.
    """
    if isinstance(spec, str):
        return resolve_layers(spec, depth, tied)[:-1]
    chosen = tuple(sorted({int(layer) for layer in spec} - {depth}))
    if not chosen or not 0 <= chosen[0] <= chosen[-1] < depth:
        raise RevisitError(
            f"DoLa: layers {list(spec)} include no early layer of this model, or one that does not exist: they are numbered 0 "
            f"(embedding) to {depth - 1}; {depth} is the final one, with which they are contrasted."
        )
    return chosen


class DoLa(Method):
    """DoLa; the defaults are those of its version in transformers.

    Args:
        layers: Candidate layers, "low" (long answers), "high" (short ones), "all", or indices; one index is static DoLa.
        relative_top: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        per_row: Choose a layer for every row; False chooses one for the whole batch, as published, so that a row depends
            on the others.
        precision: "float32", or "model" to keep early logits in the model's dtype, as transformers does.
    """

    layers: Literal["low", "high", "all"] | LayerNumbers = "low"
    relative_top: Share = 0.1
    per_row: bool = True
    precision: Literal["float32", "model"] = "float32"

    name = "dola"
    summary = "contrast the final layer with the early layer that differs most from it"
    cost = "1 forward; head rows for the early layers"
    source = "Chuang et al., DoLa, arXiv:2309.03883"
    # The authors also pass repetition_penalty=1.2 to generate().
    released = {"per_row": False, "precision": "model"}

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        layers = candidate_layers(self.layers, prompt.parts.depth, prompt.parts.tied)
        exits = passes.early_exits(layers)

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            early = exits.take(passes.raw, model_dtype=self.precision == "model")  # (rows, layers, V)
            if len(layers) == 1:
                best = early.new_zeros(len(early)).long()
            else:
                apart = divergences(passes.raw, early)  # (rows, layers)
                best = (apart if self.per_row else apart.mean(0, keepdim=True).expand_as(apart)).argmax(-1)
            chosen = early.take_along_dim(best[..., None, None], -2).squeeze(-2)  # (rows, V)
            scores = contrast_layers(logits, chosen, self.relative_top)
            return StepResult(scores, chosen, layers=layers, layer=best)

        return step
