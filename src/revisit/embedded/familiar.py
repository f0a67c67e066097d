"""Whether a picture is like the scenes that the embedded model knows.

Every vision token is read through the head at the projector's output, where training had it name what its patch shows. The mean
probability of the best word over all patches must reach `MIN_CONFIDENCE`. Scenes do; most other pictures do not, because no
word fits their patches (measured in docs/model-card.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from revisit.models.parts import Head

MIN_CONFIDENCE = 0.009
NOTICE = (
    "The embedded model `tiny` is a demonstration: it knows only generated scenes of cartoon objects (like those of `revisit demo`), "
    "not photographs. The model `photo` does."
)
# Small models that know photographs: Hub id -> size of the download.
REAL_MODELS = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": "0.5 GB",
    "HuggingFaceTB/SmolVLM-500M-Instruct": "1 GB",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "1.8 GB",
}


@torch.no_grad()
def unlike_scenes(head: Head, states: Tensor, images: int) -> tuple[int, ...]:
    """The numbers of the images that are not like scenes, from the states (patches, d) at the projector's output.

    All images of a prompt have the same number of patches.
    """
    logits = head.all_logits(states.to(head.device))
    best = (logits.amax(-1) - logits.logsumexp(-1)).exp()  # (patches,) probability of each one's best word
    means = best.view(images, -1).mean(-1).tolist()
    return tuple(number for number, mean in enumerate(means) if mean < MIN_CONFIDENCE)


def advice(what: str = "This picture", flag: str = "") -> str:
    """What to say about a picture that is not like scenes; `flag` precedes the names of other models."""
    listed = ", ".join(f"{flag}{name} ({size})" for name, size in REAL_MODELS.items())
    return (
        f"{NOTICE} {what} is not like those scenes, so the answer will be about something else. For photographs try "
        f"{'' if flag else 'the model '}{listed}; `revisit models` lists the families that work."
    )
