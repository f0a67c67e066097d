"""The prompts of one call of generate(): everything that is known before the first token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig

from revisit.errors import RevisitError
from revisit.models.families import IMAGE_INPUTS
from revisit.models.parts import ModelParts, no_image, vision_mask
from revisit.models.processors import processor_of
from revisit.models.types import Inputs, Processor

CACHE = "past_key_values"


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompts of one call of `generate`, one per row, as transformers has prepared them.

    A row is a sequence of the batch. With beams or return sequences, `rows_per_item` consecutive rows belong to one item.
    """

    model: Any
    ids: Tensor  # (rows, T), repeated for beams and return sequences
    inputs: Inputs  # arguments of generate() before any preparation (pixels, grid sizes, ...)
    prepared: Inputs  # keyword arguments of the model for the first forward pass
    config: GenerationConfig
    method: str  # its name in error messages
    record: bool = False  # whether the details of every step are recorded
    given_processor: Processor | None = None
    given_mask: Tensor | None = None  # (items, T) vision positions, from the caller

    @property
    def rows_per_item(self) -> int:
        return max(self.config.num_beams, self.config.num_return_sequences)  # type: ignore[no-any-return]

    @property
    def beams(self) -> bool:
        """Whether rows are beams, which are compared with each other and reordered."""
        return bool(self.config.num_beams > 1)

    @property
    def cache(self) -> Cache | None:
        """The KV cache of the call."""
        return self.prepared.get(CACHE)

    @cached_property
    def parts(self) -> ModelParts:
        """The model's decoder, layers, final norm and head; RevisitError if it keeps no vision tokens in its sequence."""
        return ModelParts.of(self.model)

    @property
    def processor(self) -> Processor:
        """The processor passed to the call, or else the model's; RevisitError if there is none."""
        return self.given_processor or processor_of(self.model, self.method)

    @cached_property
    def vision(self) -> Tensor:
        """(rows, T) which positions hold vision tokens; RevisitError if no prompt has an image."""
        mask = self._vision_mask()
        if not bool(mask.any()):
            raise no_image(self.model)
        has_pixels = any(self.inputs.get(name) is not None for name in (*IMAGE_INPUTS, "inputs_embeds"))
        if not has_pixels and (self.cache is None or self.cache.get_seq_length() == 0):
            raise RevisitError(
                "The prompt has placeholders for an image but no pixels: pass everything the processor returned "
                "(model.generate(**inputs))."
            )
        return mask

    @cached_property
    def has_image(self) -> Tensor:
        """(rows,) which rows have an image; RevisitError if none has."""
        return self.vision.any(-1)

    @cached_property
    def real(self) -> Tensor:
        """(rows, T) which positions are not padding."""
        attended, vision = self.prepared.get("attention_mask"), self.vision
        return torch.ones_like(vision) if attended is None else attended[:, : vision.shape[1]].bool().to(vision)

    def vision_counts(self) -> list[int]:
        """Return the number of vision tokens of each row; 0 if there are none, or if the model has none."""
        try:
            return self.vision.sum(-1).tolist()  # type: ignore[no-any-return]
        except RevisitError:
            return [0] * len(self.ids)

    def check_empty_cache(self) -> None:
        """Raise RevisitError if the call's KV cache holds a part of the prompt, so that its first forward pass skips it."""
        if self.cache is not None and self.cache.get_seq_length() > 0:
            raise RevisitError(
                f"{self.method} runs the whole prompt, but the KV cache passed as past_key_values already holds a part of it: start "
                "from an empty cache."
            )

    def _vision_mask(self) -> Tensor:
        embeds = self.prepared.get("inputs_embeds")
        only_embeds = embeds is not None and self.ids.shape[1] == 0
        if self.given_mask is not None:
            mask = self.given_mask.to(self.ids.device).bool()
            length = embeds.shape[1] if embeds is not None and only_embeds else self.ids.shape[1]
            shape = (self.ids.shape[0] // self.rows_per_item, length)
            if tuple(mask.shape) != shape:
                raise RevisitError(
                    f"vision_mask must have the shape of the prompts, {shape} (batch, length), not {tuple(mask.shape)}."
                )
            return mask.repeat_interleave(self.rows_per_item, dim=0)
        if only_embeds:
            raise RevisitError(
                "The prompt was passed as inputs_embeds, so the positions of the vision tokens are unknown: pass vision_mask, a "
                "(batch, length) mask that is True at their positions."
            )
        return vision_mask(self.ids, self.parts.vision_ids)
