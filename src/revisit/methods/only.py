"""ONLY (Wan et al.): add or contrast logits from one early layer's attention to the text.

In that layer, the peaks of the newest position's attention (above mean + one standard deviation, among the text's and among the
image's columns) become 0, and heads that spread less over the text, relative to the image, than the average are dropped. The
rest goes through the last layer's norm, with a fifth of its input added, its feed-forward network, the final norm and, with
half of the final state added, the head: l′. If Σ|p − p′| < gamma, score = l + alpha_add·l′, else (1 + alpha_contrast)·l −
alpha_contrast·l′; where p >= beta · max p.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Self

from revisit.decoding.contrastive import cut
from revisit.decoding.method import Method, Step, StepResult, check_layers
from revisit.errors import RevisitError
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.forward.states import hooks_paused, normed
from revisit.models.head import Head
from revisit.registry import Share, Strength, WholeNumber

RESIDUAL, FINAL = 0.2, 0.5  # shares of the last layer's input and of the final state


def without_peaks(weights: Tensor, columns: Tensor) -> Tensor:
    """Set attention weights in these columns to 0 if they exceed the columns' mean + standard deviation.  (rows, heads, n), (rows, n)"""
    columns = columns[:, None]
    count = columns.sum(-1, keepdim=True)
    mean = (weights * columns).sum(-1, keepdim=True) / count
    variance = ((weights - mean).square() * columns).sum(-1, keepdim=True) / (count - 1)
    return weights.masked_fill(columns & (weights > mean + variance.sqrt()), 0.0)


def spread(weights: Tensor, columns: Tensor) -> Tensor:
    """Return the entropy of the attention to these columns, NaN if they get none.  (rows, heads, n), (rows, n) -> (rows, heads)"""
    own = weights * columns[:, None]
    p = own / own.sum(-1, keepdim=True)
    return -(p * (p + 1e-6).log()).sum(-1)


def textual(weights: Tensor, text: Tensor, image: Tensor) -> Tensor:
    """Remove the peaks, and set heads to 0 that spread less over the text than the average head.  (rows, heads, n), (rows, n)"""
    weights = without_peaks(without_peaks(weights, text), image)
    of_text, of_image = spread(weights, text).nan_to_num(nan=0.0), spread(weights, image).nan_to_num(nan=float("inf"))
    ratio = of_text / of_image  # (rows, heads)
    return weights.masked_fill((ratio < ratio.mean(-1, keepdim=True))[..., None], 0.0)


def combine(logits: Tensor, other: Tensor, gamma: float, add: float, contrast: float, beta: float) -> Tensor:
    """Add l′ to the logits where the two agree, contrast where they do not.  (rows, V), (rows, V) -> (rows, V)"""
    apart = (logits.softmax(-1) - other.softmax(-1)).abs().sum(-1, keepdim=True)
    scores = (logits + add * other).where(apart < gamma, (1 + contrast) * logits - contrast * other)
    return cut(scores, logits, beta)


class ONLY(Method):
    """ONLY; the defaults are those of its script for captions.

    Args:
        gamma: Distance of the two distributions, from 0 to 2, below which l′ is added and not contrasted.
        alpha_add: Weight of l′ where it is added.
        alpha_contrast: Strength of the contrast.
        beta: Plausibility threshold relative to the likeliest token; 0 keeps every token.
        layer: The decoder layer (from 0) whose attention is used.
    """

    gamma: Strength = 0.25
    alpha_add: Strength = 3.0
    alpha_contrast: Strength = 1.0
    beta: Share = 0.1
    layer: WholeNumber = 0

    name = "only"
    summary = "add or contrast logits from one early layer's attention to the text"
    cost = "1 forward; one more row of the last feed-forward network and of the head"
    source = "Wan et al., ONLY, arXiv:2507.00898"

    @classmethod
    def pope(cls, **overrides: Any) -> Self:
        """Return the settings of its script for POPE."""
        return cls(**{"gamma": 0.2, **overrides})

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        check_layers(self, (self.layer,), prompt.parts.depth)
        shortcut = Shortcut(prompt, passes, self.layer)

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            other = shortcut.logits(passes.raw).to(logits.device)
            scores = combine(logits, other, self.gamma, self.alpha_add, self.alpha_contrast, self.beta)
            return StepResult(scores, other, prompt.has_image)

        return step


class Shortcut:
    """A shortcut from one layer's attention to the last feed-forward network, at the newest position."""

    def __init__(self, prompt: Prompt, passes: Passes, layer: int) -> None:
        self.parts, self.mask = prompt.parts, prompt.vision
        # The first token of a text draws attention whatever it is.
        self.first = prompt.real & (prompt.real.cumsum(-1) == 1)
        self.attended: Tensor | None = None  # (rows, d)
        self.last: Tensor | None = None  # (rows, d) input of the last layer
        self.final: Tensor | None = None  # (rows, d) the final state
        self.head: Head | None = None  # known from the first step on
        passes.on_attention(self._attention_hook, (layer,))
        block = self.parts.layers[layer]
        attention = getattr(block, "self_attn", None) or getattr(block, "attention", None)
        self.project = getattr(attention, "o_proj", None)
        if self.project is None:
            raise RevisitError("ONLY: no output projection was found in this model's attention; use another method.")
        passes.on_layer(self.parts.depth - 1, lambda states: setattr(self, "last", states[:, -1]))
        passes.on_layer(self.parts.depth, lambda states: setattr(self, "final", states[:, -1]))

    def _attention_hook(self, call: Call) -> None:
        weights = call.last_attention()  # (rows, heads, n)
        image, first = call.columns(self.mask), call.columns(self.first)
        # (rows or 1, n): neither padding nor empty places of a static cache
        seen = call.visible()[:, 0, -1, : image.shape[-1]]
        text = seen & ~image & ~first
        kept = textual(weights, text, image)
        value = call.value.float()  # (rows, key heads, n, d)
        mixed = (kept.unflatten(1, (value.shape[1], -1)) @ value).flatten(1)  # (rows, heads · d)
        with hooks_paused():
            assert self.project is not None
            self.attended = self.project(mixed.to(call.value.dtype)[:, None])[:, 0]

    def logits(self, raw: Tensor) -> Tensor:
        """Return l′ of this step; `raw` (rows, V) are the model's own logits.  -> (rows, V)"""
        assert self.attended is not None
        assert self.last is not None
        assert self.final is not None
        parts = self.parts
        block = parts.layers[-1]
        if self.head is None:
            self.head = parts.calibrate(self.final[0], raw[0])
        with hooks_paused():
            state = normed(block.input_layernorm, self.attended[:, None])  # type: ignore[arg-type]
            state = state + RESIDUAL * self.last[:, None].to(state.device)
            state = normed(parts.final_norm, parts.feed_forward(-1, state))
            state = state + FINAL * self.final[:, None].to(state.device)
            other = self.head.all_logits(state[:, 0].to(self.head.device))
        self.attended = self.last = self.final = None
        return other
