"""MiddleLayers (Jiang et al., "Devils in Middle Layers"; also called HGAI): raise attention to the image in the middle layers.

In the layers that gather visual information, alpha times the mean of their absolute values over all heads is added to the newest
position's scores for the vision tokens, before the softmax. The last position of the prompt is changed too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from revisit.decoding.method import LayerNumbers, Method, Step, StepResult, layers_of
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Strength


def guide(scores: Tensor, image: Tensor, alpha: float) -> Tensor:
    """Add alpha · the mean of |score| over heads at the image's columns.  (rows, heads, q, n), (rows, n) -> as scores"""
    guided = scores + alpha * scores.abs().mean(1, keepdim=True)
    return guided.where(image[:, None, None] & scores.isfinite(), scores)


class MiddleLayers(Method):
    """MiddleLayers; the defaults are those of its CHAIR program.

    Args:
        alpha: Strength of the change.
        layers: Decoder layers (from 0) whose attention is changed: "middle" (5 to 18 of 32, scaled to the decoder's
            depth), "released" (these numbers in decoders that have them), or numbers.

    Only the newest position's attention is changed.
    """

    alpha: Strength = 0.5
    layers: Literal["middle", "released"] | LayerNumbers = "middle"

    name = "middle_layers"
    summary = "raise attention to the image in the middle layers, by the mean over heads"
    cost = "1 forward; the newest position's attention is computed twice in the middle layers"
    source = "Jiang et al., Devils in Middle Layers, arXiv:2411.16724"
    released = {"layers": "released"}
    changes_forward = True
    needs_cache = True

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        vision = prompt.vision

        def attention_hook(call: Call) -> Callable[[Tensor], None]:
            return call.attend(guide(call.scores(), call.columns(vision), self.alpha))

        passes.on_attention(attention_hook, layers_of(self, 5, 18, prompt.parts.depth))
        return lambda input_ids, logits: StepResult(logits, acted=prompt.has_image)
