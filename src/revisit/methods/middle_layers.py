"""MiddleLayers (Jiang et al., "Devils in Middle Layers"; also called HGAI): let the heads of the middle layers guide each other.

In the layers that gather visual information, the newest position's scores for each vision token, before the softmax, grow by
alpha times the mean of their absolute values over all heads. The prompt's last position is changed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from revisit.decoding.method import LayerNumbers, Method, Refine
from revisit.methods.layers import check_layers, layers_of_32
from revisit.registry import Strength

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.decoding.run import Run
    from revisit.taps.attention import Call


def guide(scores: Tensor, image: Tensor, alpha: float) -> Tensor:
    """Scores with alpha · the heads' mean of |score| added at the image's columns.  (rows, heads, q, n), (rows, n) -> as scores"""
    guided = scores + alpha * scores.abs().mean(1, keepdim=True)
    return guided.where(image[:, None, None] & scores.isfinite(), scores)


class MiddleLayers(Method):
    """Settings of MiddleLayers; the defaults are those of its CHAIR program.

    Args:
        alpha: How much more attention the image gets.
        layers: Decoder layers (from 0) whose attention is changed: "middle" (5 to 18 of 32, scaled to the decoder's depth) or
            numbers.

    Only the newest position's attention is changed; with `use_cache=False` what that did to earlier steps is not kept.
    """

    alpha: Strength = 0.5
    layers: Literal["middle"] | LayerNumbers = "middle"

    name = "middle_layers"
    summary = "more attention to the image in the middle layers, guided by the mean over heads"
    cost = "1 forward; the newest position's attention is computed twice in the middle layers"
    source = "Jiang et al., Devils in Middle Layers, arXiv:2411.16724"

    def begin(self, run: Run) -> Refine:
        mask = run.find_vision_tokens()
        has_image, depth = mask.any(-1), run.parts.depth
        layers = layers_of_32(5, 18, depth) if self.layers == "middle" else check_layers(self, self.layers, depth)

        def attention_hook(call: Call) -> Callable[[Tensor], Tensor] | None:
            if call.layer not in layers or run.contrasting:
                return None
            image = call.columns(mask, run.clean_shift)  # (rows, n)
            return call.attend(guide(call.scores()[: len(mask)], image, self.alpha))

        run.watch_attention(attention_hook, "MiddleLayers")
        return lambda input_ids, logits: run.decode_by(input_ids, logits, logits, acted=has_image)
