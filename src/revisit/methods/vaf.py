"""VAF (Yin et al., "ClearSight"): amplify the image, and damp what precedes it, where the two modalities meet.

In the middle layers, every position after the image multiplies its attention scores before the softmax: those of vision tokens
by `enhance`, those of everything before the image (the system message) by `suppress`. That holds for the question in the prompt
and for every new token. Of several images, positions after the last one do so, and "before" means before the first.
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


def amplify(scores: Tensor, image: Tensor, before: Tensor, after: Tensor, enhance: float, suppress: float) -> Tensor:
    """Scores times `enhance` at the image's columns and `suppress` at those before it, for the queries after it.

    (rows, heads, q, n), (rows, n), (rows, n), (rows, q) -> (rows, heads, q, n)
    """
    import torch

    factor = torch.where(image, enhance, torch.where(before, suppress, 1.0))  # (rows, n)
    return (scores * factor[:, None, None]).where(after[:, None, :, None] & scores.isfinite(), scores)


class VAF(Method):
    """Settings of VAF; the defaults are those of its POPE script.

    Args:
        enhance: What scores of vision tokens are multiplied by.
        suppress: What scores of tokens before the image are multiplied by.
        layers: Decoder layers (from 0) whose attention is changed: "middle" (9 to 14 of 32, scaled to the decoder's depth) or
            numbers.
    """

    enhance: Strength = 1.15
    suppress: Strength = 0.95
    layers: Literal["middle"] | LayerNumbers = "middle"

    name = "vaf"
    summary = "amplify attention to the image in the middle layers, and damp attention to the system message"
    cost = "1 forward; attention after the image is computed twice in the middle layers"
    source = "Yin et al., ClearSight, arXiv:2503.13107"

    def begin(self, run: Run) -> Refine:
        import torch

        mask = run.find_vision_tokens()
        depth, (rows, length) = run.parts.depth, mask.shape
        layers = layers_of_32(9, 14, depth) if self.layers == "middle" else check_layers(self, self.layers, depth)
        place = torch.arange(length, device=mask.device)
        last = place.where(mask, -1).amax(-1)  # (rows,) the last vision token; -1 without an image
        last = last.where(last >= 0, length + run.generation_config.max_length)  # nothing comes after no image
        has_image = mask.any(-1)
        system = (place < place.where(mask, length).amin(-1, keepdim=True)) & has_image[:, None]
        after_all = int(last.min()) + 1  # the first position that comes after the image of some row

        def attention_hook(call: Call) -> Callable[[Tensor], Tensor] | None:
            if call.layer not in layers or run.contrasting:
                return None
            q = call.query.shape[2]
            start = length if q == 1 else max(length - q, 0)  # the first query's position
            skip = max(after_all - start, 0)
            if skip >= q:
                return None
            image, before = (call.columns(columns, run.clean_shift) for columns in (mask, system))
            after = torch.arange(start + skip, start + q, device=image.device) > last[:, None].to(image.device)
            scores = call.scores(skip)[:rows]
            return call.attend(amplify(scores, image, before, after, self.enhance, self.suppress), after)

        run.watch_attention(attention_hook, "VAF")
        return lambda input_ids, logits: run.decode_by(input_ids, logits, logits, acted=has_image)
