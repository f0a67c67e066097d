"""VISTA (Li et al.): steer every layer toward what the image adds to the prompt, and mix in the logits of late layers.

For each layer, v is its output at the prompt's last token with the image minus that without. From then on, the output x of its
feed-forward network is turned toward v: x ← |x| · n(n(x) + strength · (1 + max(0, cos(x, −v))) · n(v)), with n(x) = x / |x|.
score = (1 − share)·l + share · the mean logits of late layers, without the final norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize
from typing_extensions import Self

from revisit.decoding.method import LayerNumbers, Method, Step, StepResult, layers_of
from revisit.decoding.prompt_edits import prompt_without_image
from revisit.errors import RevisitError
from revisit.forward.passes import Passes
from revisit.forward.prompt import Prompt
from revisit.registry import Number, Share, Strength

ROUNDING = 1e-5  # relative to a state's length


def steer(states: Tensor, direction: Tensor, strength: float) -> Tensor:
    """Turn states toward a direction, keeping their length.  (rows, q, d), (rows, d) -> (rows, q, d)"""
    direction = direction[:, None]  # (rows, 1, d)
    wide = states.float()
    away = cosine_similarity(wide, -direction, dim=-1).clamp_min(0)[..., None]  # (rows, q, 1)
    turned = normalize(normalize(wide, dim=-1) + strength * (1 + away) * normalize(direction, dim=-1), dim=-1)
    result: Tensor = (turned * wide.norm(dim=-1, keepdim=True)).to(states.dtype)
    return result


def added(with_image: Tensor, without: Tensor) -> Tensor:
    """Return what the image adds to a state, or 0 if that is only rounding.  (rows, d), (rows, d) -> (rows, d)"""
    direction = with_image - without
    small = direction.norm(dim=-1, keepdim=True) <= ROUNDING * with_image.norm(dim=-1, keepdim=True)
    return direction.masked_fill(small, 0.0)


class VISTA(Method):
    """VISTA; the defaults are those of its script for captions.

    Args:
        strength: How far states are turned; 0 steers nothing and needs no extra prefills.
        share: Weight of the late layers' logits; 0 leaves them out.
        layers: Hidden states whose logits are averaged: "late" (26 to 31 of 32, scaled to the decoder's depth),
            "released" (these numbers in decoders that have them), or indices.
        first: Added to the first number of the first layer's direction. The released code adds 1, the result of a principal
            component analysis of a single example.
    """

    strength: Strength = 0.17
    share: Share = 0.3
    layers: Literal["late", "released"] | LayerNumbers = "late"
    first: Number = 0.0

    name = "vista"
    summary = "steer every layer toward what the image adds, and mix in the logits of late layers"
    cost = "1 forward; head rows for the late layers; 2 further prefills, with and without the image"
    source = "Li et al., VISTA, arXiv:2502.03628"
    released = {"layers": "released", "first": 1.0}
    changes_forward = True

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if self.strength == 0 and self.share == 0:
            raise RevisitError("VISTA: strength 0 and share 0 do nothing; set one of them.")
        return self

    @classmethod
    def pope(cls, **overrides: Any) -> Self:
        """Return the released code's settings for questions with short answers."""
        return cls.official(**{"strength": 0.01, **overrides})

    def begin(self, prompt: Prompt, passes: Passes) -> Step:
        layers = layers_of(self, 26, 32, prompt.parts.depth, 1)
        if self.strength:
            self._steer(prompt, passes)
        if not self.share:
            return lambda input_ids, logits: StepResult(logits, acted=prompt.has_image)
        exits = passes.early_exits(layers)

        def step(input_ids: Tensor, logits: Tensor) -> StepResult:
            late = exits.take(passes.raw).mean(1)  # (rows, V)
            scores = (1 - self.share) * logits + self.share * late
            scores = scores.masked_fill(logits == -torch.inf, -torch.inf)  # NaN with share 1, after a cut in a chain
            return StepResult(scores, late, prompt.has_image, layers)

        return step

    def _steer(self, prompt: Prompt, passes: Passes) -> None:
        """Steer the states for the rest of the call."""
        with_image, without = passes.last_states(None), passes.last_states(prompt_without_image(prompt))
        for number, mlp in enumerate(prompt.parts.mlps):
            direction = added(with_image[number].float(), without[number].float())  # (rows, d)
            if number == 0:
                direction[:, 0] += self.first
            direction = direction * prompt.has_image[:, None].to(direction.device)
            passes.on_output(mlp, partial(self._turn, direction))

    def _turn(self, direction: Tensor, states: Tensor) -> Tensor:
        return steer(states, direction.to(states.device), self.strength)
