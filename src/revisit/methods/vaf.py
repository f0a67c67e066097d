"""VAF (Yin et al., "ClearSight"): amplify attention to the image, and damp attention to what precedes it.

In the middle layers, attention scores of positions after the image are multiplied before the softmax: those of vision tokens
by `enhance`, those of everything before the image (the system message) by `suppress`. This applies to the question in the prompt
and to every new token. With several images, it applies to positions after the last one, and "before" means before the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from revisit.decoding.method import LayerNumbers, Method, Step, StepResult, layers_of
from revisit.forward.attention import Call
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Strength


def amplify(scores: Tensor, image: Tensor, before: Tensor, after: Tensor, enhance: float, suppress: float) -> Tensor:
    """Multiply scores by `enhance` at the image's columns and by `suppress` at those before it, for the queries after it.

    (rows, heads, q, n), (rows, n), (rows, n), (rows, q) -> (rows, heads, q, n)
    """
    factor = torch.where(image, enhance, torch.where(before, suppress, 1.0))  # (rows, n)
    return (scores * factor[:, None, None]).where(after[:, None, :, None] & scores.isfinite(), scores)


class VAF(Method):
    """VAF; the defaults are those of its POPE script.

    Args:
        enhance: Factor of the scores of vision tokens.
        suppress: Factor of the scores of tokens before the image.
        layers: Decoder layers (from 0) whose attention is changed: "middle" (9 to 14 of 32, scaled to the decoder's
            depth), "released" (these numbers in decoders that have them), or numbers.
    """

    enhance: Strength = 1.15
    suppress: Strength = 0.95
    layers: Literal["middle", "released"] | LayerNumbers = "middle"

    name = "vaf"
    summary = "amplify attention to the image in the middle layers, and damp attention to the system message"
    cost = "1 forward; attention after the image is computed twice in the middle layers"
    source = "Yin et al., ClearSight, arXiv:2503.13107"
    released = {"layers": "released"}
    changes_forward = True

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        mask = prompt.vision
        length = mask.shape[1]
        place = torch.arange(length, device=mask.device)
        last = place.where(mask, -1).amax(-1)  # (rows,) position of the last vision token; -1 without an image
        last = last.where(last >= 0, length + prompt.config.max_length)  # never reached
        system = (place < place.where(mask, length).amin(-1, keepdim=True)) & prompt.has_image[:, None]
        after_all = int(last.min()) + 1  # the first position after the image of any row

        def attention_hook(call: Call) -> Callable[[Tensor], None] | None:
            q = call.query.shape[2]
            start = length if q == 1 else max(length - q, 0)  # the first query's position
            skip = max(after_all - start, 0)
            if skip >= q:
                return None
            image, before = (call.columns(columns) for columns in (mask, system))
            after = torch.arange(start + skip, start + q, device=image.device) > last[:, None].to(image.device)
            scores = amplify(call.scores(skip), image, before, after, self.enhance, self.suppress)
            return call.attend(scores, after)

        passes.on_attention(attention_hook, layers_of(self, 9, 14, prompt.parts.depth))
        return lambda input_ids, logits: StepResult(logits, acted=prompt.has_image)
