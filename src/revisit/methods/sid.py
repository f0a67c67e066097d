"""SID (Huo et al.): contrast with a run that keeps only the vision tokens that the text attends to least.

The first layers of the second run determine, by the newest position's attention averaged over heads, which vision tokens matter
least. From then on only those and all text are visible to it, so that its logits are hallucination induced by unimportant
parts: score = (1 + alpha)·l − alpha·l_induced on the plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from revisit.decoding.contrastive import Contrastive, contrast
from revisit.decoding.method import StepFunction, check_layers
from revisit.decoding.run import Run
from revisit.forward.attention import Call
from revisit.forward.branch import Branch
from revisit.models import families
from revisit.registry import Share, Strength, WholeNumber


def least_attended(attention: Tensor, image: Tensor, counts: Tensor) -> Tensor:
    """Return the mask of each row's `counts` image columns with the least attention, the first of ties.  (rows, n) -> (rows, n)"""
    order = attention.masked_fill(~image, math.inf).argsort(dim=-1, stable=True)
    rank = order.argsort(-1)  # of each column in that order
    return image & (rank < counts.unsqueeze(-1))


def budget(keep: int | float | None, tokens: Tensor, model_type: str) -> Tensor:
    """Return how many vision tokens each row keeps: a number, a share, or the published share of the family.  (rows,) -> (rows,)

    Published: 100 of LLaVA-1.5's 576, and a tenth for families whose images have varying numbers of tokens.
    """
    if isinstance(keep, int):
        return tokens.clamp_max(keep)
    share = families.of(model_type).sid_share if keep is None else keep
    return (tokens * share).round().long().clamp_min(1)


def visible_without(call: Call, rows: slice, hidden: Tensor) -> Tensor:
    """Hide columns (rows, n) from the queries of some rows, and keep at least one column visible to each query.

    -> (rows of all branches, 1, q, n) bool
    """
    visible = call.visible().expand(call.query.shape[0], -1, -1, -1).clone()
    if call.query.shape[2] > 1:  # a single query is a text token, which attends to itself
        newest = newest_column(visible[rows])  # (rows, 1, q, 1)
        own_visible = visible[rows].gather(-1, newest)
    visible[rows] &= ~hidden[:, None, None, :]
    if call.query.shape[2] > 1:
        nothing = ~visible[rows].any(-1, keepdim=True)
        visible[rows] = visible[rows].scatter(-1, newest, visible[rows].gather(-1, newest) | (nothing & own_visible))
    return visible


def newest_column(visible: Tensor) -> Tensor:
    """Return the last visible column of each query; the last of all if none is visible.  (..., n) bool -> (..., 1)"""
    from_the_end = visible.flip(-1).view(torch.uint8).argmax(-1, keepdim=True)
    return visible.shape[-1] - 1 - from_the_end


class SID(Contrastive):
    """SID; the defaults are those of its scripts.

    Args:
        alpha: Strength of the contrast; the released scripts run 0.5, whatever their command line is.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        layer: The first decoder layer (from 0) in which the contrasted run keeps fewer vision tokens; at least 1.
        keep: Vision tokens that the contrasted run keeps: a number, a share of them, or None for the published budget of the
            family. They are chosen again for every token.
        constraint: Drop implausible tokens "always", or only when "sampling" as in the released code.
    """

    alpha: Strength = 0.5
    beta: Share = 0.1
    layer: Annotated[int, Field(ge=1)] = 2
    keep: WholeNumber | Share | None = None
    constraint: Literal["always", "sampling"] = "always"

    name = "sid"
    summary = "contrast with a run that keeps only the least attended vision tokens"
    cost = "2 rows per sequence, 2 prefills"
    needs_cache = True
    source = "Huo et al., SID, arXiv:2408.02032"
    # No plausibility cut under greedy decoding; the caption script keeps 50 tokens.
    released: ClassVar[dict[str, Any]] = {"constraint": "sampling"}

    def begin(self, run: Run) -> StepFunction:
        mask = run.find_vision_tokens()
        check_layers(self, (self.layer,), run.parts.depth)
        branch = self.branch(run)
        counts = budget(self.keep, mask.sum(-1), run.model.config.model_type)
        run.watch_attention(Masker(branch, mask, counts, self.layer).attention_hook, "SID")
        beta = self.beta if self.constraint == "always" or run.generation_config.do_sample else 0.0
        return self.contrasted(run, branch, mask.any(-1), lambda l, other, _: contrast(l, other, self.alpha, beta))


class Masker:
    """The hook that hides all but the least attended vision tokens, chosen anew in every forward, from one branch's rows.

    Most layers of a forward share one attention mask, so the mask with hidden tokens is computed once and kept for the next layer.
    """

    def __init__(self, branch: Branch, mask: Tensor, counts: Tensor, layer: int) -> None:
        self.branch, self.mask, self.counts, self.layer = branch, mask, counts, layer
        self.hidden: Tensor | None = None  # (rows, n) columns that are hidden in the running forward
        self._last: tuple[Tensor | None, Tensor | None] = (None, None)  # the last layer's mask before and after

    def attention_hook(self, call: Call) -> None:
        rows = self.branch.live
        if rows is None or call.layer < self.layer - 1:
            return
        if call.layer == self.layer - 1:
            image = call.columns(self.mask, self.branch.shift)
            attention = call.last_attention().mean(1)[rows]
            self.hidden = image & ~least_attended(attention, image, self.counts.to(image.device))
            self._last = (None, None)
            return
        assert self.hidden is not None
        before, after = self._last
        if after is None or call.mask is not before or after.device != call.query.device:
            before = call.mask
            call.hide(visible_without(call, rows, self.hidden.to(call.query.device)))
            self._last = (before, call.mask)
        else:
            call.mask = after
