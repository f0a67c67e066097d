"""Teacher forcing: one forward pass over prompts and the texts that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from revisit.errors import RevisitError
from revisit.hooks.forcing import forced_inputs, last_logits, last_states
from revisit.hooks.states import Capture, no_image, saved_positions, vision_mask
from revisit.models.parts import Head, ModelParts, describe

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model


@dataclass(frozen=True)
class Forced:
    """The hidden states of one prompt and its text."""

    states: Tensor  # (tokens, d): final states; each predicts a token of the text
    vision: dict[int, Tensor]  # layer -> (vision tokens, d)
    head: Head  # as the model uses it


@torch.no_grad()
def force(model: Model, inputs: Inputs, texts: Sequence[Sequence[int]], layers: Sequence[int] = ()) -> list[Forced]:
    """Run each prompt followed by the tokens of its text, in one batch.

    Args:
        model: A loaded model.
        inputs: The prompts, as the processor prepared them.
        texts: The tokens of each text.
        layers: Hidden states of the vision tokens to keep.
    """
    parts = ModelParts.of(model)
    start = inputs["input_ids"].shape[1]
    longest = max(range(len(texts)), key=lambda row: len(texts[row]))
    length = start + len(texts[longest])
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and length > most:
        raise RevisitError(
            f"Prompt, image and text have {length} tokens, but the model's limit is {most}; split the text."
        )
    mask = torch.nn.functional.pad(vision_mask(inputs["input_ids"], parts.vision_ids), (0, len(texts[longest])))
    if layers and not bool(mask.any(-1).all()):
        raise no_image(model)
    with ExitStack() as stack:
        stack.enter_context(saved_positions(model, clear=True))
        seen = stack.enter_context(last_states(parts))
        capture = Capture(parts, mask, tuple(sorted(set(layers))), 1, stack) if layers else None
        outputs = model(**forced_inputs(dict(inputs), texts), use_cache=False, **last_logits(model))
    states = seen[0].to(parts.head.device)  # (rows, positions, d)
    parts.head.calibrate(states[longest, -1], outputs.logits[longest, -1], describe(model))
    return [
        Forced(
            states[row, start - 1 : start - 1 + len(tokens)],
            capture.items[row].by_layer if capture else {},
            parts.head,
        )
        for row, tokens in enumerate(texts)
    ]


def without_vision(inputs: Inputs, vision_ids: Sequence[int]) -> dict[str, Any]:
    """Return one prompt's per-position inputs without its vision positions and without all other image inputs."""
    ids = inputs["input_ids"]
    keep = ~vision_mask(ids, vision_ids)[0]  # (T,)
    return {
        name: value[:, keep] for name, value in inputs.items() if isinstance(value, Tensor) and value.shape == ids.shape
    }
