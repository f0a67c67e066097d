"""Teacher forcing: the output states of a model while it is made to write a given caption, with its picture or without.

One caption at a time, so that nothing is padded and every state is the one that decoding would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.models.parts import ModelParts, describe
from revisit.models.prompts import prepare
from revisit.taps.forcing import forced_inputs, last_logits, last_states
from revisit.taps.states import saved_positions, vision_mask

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Model, Processor


class Forced:
    """A model that can be made to write captions; gives the final states at the positions that predict each token."""

    def __init__(self, model: Model, processor: Processor) -> None:
        self.model, self.processor = model, processor
        self.parts = ModelParts.of(model)

    @torch.no_grad()
    def states(self, prompt: str, images: Sequence[Image], tokens: Sequence[int], *, vision: bool = True) -> Tensor:
        """With the picture, or with the same prompt from which every vision token was removed.  -> (tokens, d)"""
        inputs = dict(prepare(self.processor, [prompt], [list(images)], self.model.device))
        if not vision:
            inputs = without_vision(inputs, self.parts.vision_ids)
        with saved_positions(self.model, clear=True), last_states(self.parts) as seen:
            outputs = self.model(**forced_inputs(inputs, [tokens[:-1]]), use_cache=False, **last_logits(self.model))
        states = seen[0][0]  # (positions, d)
        if self.parts.head.transform is None:
            self.parts.head.calibrate(states[-1], outputs.logits[0, -1], describe(self.model))
        return states[inputs["input_ids"].shape[1] - 1 :]


def without_vision(inputs: dict[str, Any], vision_ids: Sequence[int]) -> dict[str, Any]:
    """One prompt's per-position inputs with the vision positions cut out; whatever describes pictures is dropped."""
    ids = inputs["input_ids"]
    keep = ~vision_mask(ids, vision_ids)[0]  # (T,)
    return {
        name: value[:, keep] for name, value in inputs.items() if isinstance(value, Tensor) and value.shape == ids.shape
    }
