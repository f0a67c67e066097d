"""Detect images that are unlike the scenes that `tiny` was trained on.

The projector was trained so that its output, read through the head, names the object in each patch. The confidence in an image is
the probability of the likeliest word of a patch, averaged over all patches. Scenes reach `MIN_CONFIDENCE`; most other images do
not (measured in docs/research/model-card.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from revisit.errors import RevisitError
from revisit.explain.prefill import force
from revisit.models.prompts import prepare

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.models.types import Model, Processor

MIN_CONFIDENCE = 0.009


@torch.no_grad()
def confidence(model: Model, processor: Processor, image: Image) -> float:
    """Return the mean probability of the likeliest word of each patch, at the projector's output."""
    (states,) = force(model, prepare(processor, "?", image, device=model.device), layers=[0])
    logits = states.head.all_logits(states.vision[0].to(states.head.device))  # (patches, V)
    return float((logits.amax(-1) - logits.logsumexp(-1)).exp().mean())


def check_scene(model: Model, processor: Processor, image: Image, name: str) -> None:
    """Raise RevisitError if an image is unlike the scenes that `tiny` was trained on."""
    if confidence(model, processor, image) < MIN_CONFIDENCE:
        raise RevisitError(
            f"{name} is unlike the cartoon scenes that the demonstration model `tiny` was trained on. For photographs use --model photo, "
            "or a larger model such as --model HuggingFaceTB/SmolVLM-256M-Instruct (0.5 GB); --any-image runs `tiny` anyway."
        )
