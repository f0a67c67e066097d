"""ONLY (Wan et al.): contrast with, or add, what one early layer's attention to the text alone would say.

1. In one early layer, the newest position's attention loses what stands out: weights above mean + one standard deviation,
   among the text's and among the image's columns, become 0. Heads whose attention to the text is less spread, relative to
   the image, than the heads' average, are dropped.
2. What is left of that layer's attention goes through the last layer's norm, a fifth of the last layer's input is added,
   and the last feed-forward network, the final norm and the head give l′ (with half of the final state added before the head).
3. If Σ|p − p′| is below gamma, score = l + alpha_add·l′, otherwise (1 + alpha_contrast)·l − alpha_contrast·l′; on the
   plausible tokens, p >= beta · max p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from revisit.decoding.method import Method, Refine
from revisit.errors import RevisitError
from revisit.methods.contrastive import cut
from revisit.methods.layers import check_layers
from revisit.registry import Share, Strength, WholeNumber

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.run import Run
    from revisit.taps.attention import Call

RESIDUAL, FINAL = 0.2, 0.5  # shares of the last layer's input and of the final state


def without_peaks(weights: Tensor, columns: Tensor) -> Tensor:
    """Attention with what exceeds mean + standard deviation of some columns set to 0 there.  (rows, heads, n), (rows, n)"""
    columns = columns[:, None]
    count = columns.sum(-1, keepdim=True)
    mean = (weights * columns).sum(-1, keepdim=True) / count
    variance = ((weights - mean).square() * columns).sum(-1, keepdim=True) / (count - 1)
    return weights.masked_fill(columns & (weights > mean + variance.sqrt()), 0.0)


def spread(weights: Tensor, columns: Tensor) -> Tensor:
    """Entropy of the attention to some columns, NaN where they get none.  (rows, heads, n), (rows, n) -> (rows, heads)"""
    own = weights * columns[:, None]
    p = own / own.sum(-1, keepdim=True)
    return -(p * (p + 1e-6).log()).sum(-1)


def textual(weights: Tensor, text: Tensor, image: Tensor) -> Tensor:
    """Attention without its peaks, and 0 in heads that spread less over the text than others.  (rows, heads, n), (rows, n)"""
    weights = without_peaks(without_peaks(weights, text), image)
    of_text, of_image = spread(weights, text).nan_to_num(nan=0.0), spread(weights, image).nan_to_num(nan=float("inf"))
    ratio = of_text / of_image  # (rows, heads)
    return weights.masked_fill((ratio < ratio.mean(-1, keepdim=True))[..., None], 0.0)


def combine(logits: Tensor, other: Tensor, gamma: float, add: float, contrast: float, beta: float) -> Tensor:
    """The logits with l′ added where the two agree, contrasted where they do not.  (rows, V), (rows, V) -> (rows, V)"""
    apart = (logits.softmax(-1) - other.softmax(-1)).abs().sum(-1, keepdim=True)
    scores = (logits + add * other).where(apart < gamma, (1 + contrast) * logits - contrast * other)
    return cut(scores, logits, beta)


class ONLY(Method):
    """Settings of ONLY; the defaults are those of its script for captions.

    Args:
        gamma: How far the two distributions may be apart, from 0 to 2, to be added and not contrasted.
        alpha_add: Weight of l′ where it is added.
        alpha_contrast: Strength of the contrast.
        beta: How unlikely a token may be, relative to the likeliest, and still be considered; 0 cuts nothing.
        layer: The decoder layer (from 0) whose attention is taken.
    """

    gamma: Strength = 0.25
    alpha_add: Strength = 3.0
    alpha_contrast: Strength = 1.0
    beta: Share = 0.1
    layer: WholeNumber = 0

    name = "only"
    summary = "add or contrast what one early layer's attention to the text would say"
    cost = "1 forward; one more row of the last feed-forward network and of the head"
    source = "Wan et al., ONLY, arXiv:2507.00898"

    @classmethod
    def pope(cls, **overrides: Any) -> Self:
        """The settings of its script for POPE."""
        return cls(**{"gamma": 0.2, **overrides})

    def begin(self, run: Run) -> Refine:
        mask = run.find_vision_tokens()
        has_image = mask.any(-1)
        check_layers(self, (self.layer,), run.parts.depth)
        shortcut = Shortcut(run, mask, self.layer)

        def refine(input_ids: Tensor, logits: Tensor) -> Tensor:
            assert run.raw is not None
            other = shortcut.logits(run.raw).to(logits.device)
            scores = combine(logits, other, self.gamma, self.alpha_add, self.alpha_contrast, self.beta)
            scores = scores.where(has_image[:, None].to(scores.device), logits)
            return run.decode_by(input_ids, logits, scores, other, has_image)

        return refine


class Shortcut:
    """From one layer's attention straight to the last feed-forward network, at the newest position of the clean rows."""

    def __init__(self, run: Run, mask: Tensor, layer: int) -> None:
        from revisit.taps.states import Hooks

        self.run, self.mask, self.layer, self.rows = run, mask, layer, len(mask)
        given = run.model_kwargs.get("attention_mask")
        seen = mask.new_ones(mask.shape) if given is None else given[:, : mask.shape[1]].bool().to(mask.device)
        self.first = seen & (seen.cumsum(-1) == 1)  # a text's first token draws attention whatever it says
        self.attended: Tensor | None = None  # (rows, d)
        self.last: Tensor | None = None  # (rows, d) what the last layer reads
        self.final: Tensor | None = None  # (rows, d) the final state
        run.watch_attention(self._attention_hook, "ONLY")
        block = run.parts.layers[layer]
        attention = getattr(block, "self_attn", None) or getattr(block, "attention", None)
        self.project = getattr(attention, "o_proj", None)
        if self.project is None:
            raise RevisitError("ONLY: no output projection was found in this model's attention; use another method.")
        hooks = Hooks(run.stack)
        hooks.state(run.parts, run.parts.depth - 1, lambda states: self._keep("last", states))
        hooks.state(run.parts, run.parts.depth, lambda states: self._keep("final", states))

    def _keep(self, name: str, states: Tensor) -> None:
        if not self.run.contrasting:
            setattr(self, name, states[: self.rows, -1])

    def _attention_hook(self, call: Call) -> None:
        if call.layer != self.layer or self.run.contrasting:
            return
        from revisit.taps.states import taps_paused

        weights = call.last_attention()[: self.rows]  # (rows, heads, n)
        image = call.columns(self.mask, self.run.clean_shift)
        first = call.columns(self.first, self.run.clean_shift)
        # (rows or 1, n): neither padding nor places that are still empty
        seen = call.visible()[: self.rows, 0, -1, : image.shape[-1]]
        text = seen & ~image & ~first
        kept = textual(weights, text, image)
        value = call.value[: self.rows].float()  # (rows, key heads, n, d)
        mixed = (kept.unflatten(1, (value.shape[1], -1)) @ value).flatten(1)  # (rows, heads · d)
        with taps_paused():
            assert self.project is not None
            self.attended = self.project(mixed.to(call.value.dtype)[:, None])[:, 0]

    def logits(self, raw: Tensor) -> Tensor:
        """l′ of this step; `raw` (rows, V) are the model's own logits.  -> (rows, V)"""
        from revisit.models.parts import describe
        from revisit.taps.states import normed, taps_paused

        assert self.attended is not None
        assert self.last is not None
        assert self.final is not None
        parts = self.run.parts
        head, block = parts.head, parts.layers[-1]
        if head.transform is None:
            head.calibrate(self.final[0], raw[0], describe(parts.model))
        with taps_paused():
            state = normed(block.input_layernorm, self.attended[:, None])  # type: ignore[arg-type]
            state = state + RESIDUAL * self.last[:, None].to(state.device)
            state = normed(parts.final_norm, parts.feed_forward(-1, state))
            state = state + FINAL * self.final[:, None].to(state.device)
            other = head.all_logits(state[:, 0].to(head.device))
        self.attended = self.last = self.final = None
        return other
