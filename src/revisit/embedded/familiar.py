"""What the embedded model knows, and whether a picture is of that kind.

The rule: every vision token is read through the head at the projector's output, where the model was trained to have it say
what its patch shows; the mean probability of the best word over all patches must reach `LEAST`. Scenes lie above it, and other
pictures below, because no word fits their patches (measured in docs/model-card.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST = 0.009
KNOWS = (
    "The embedded model `tiny` is a demonstration: it knows only generated scenes of cartoon objects (like those of `revisit demo`), "
    "not photographs."
)
# Small models that know photographs: hub id -> size of the download.
REAL_MODELS = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": "0.5 GB",
    "HuggingFaceTB/SmolVLM-500M-Instruct": "1 GB",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "1.8 GB",
    "Qwen/Qwen2.5-VL-3B-Instruct": "7.5 GB",
    "llava-hf/llava-1.5-7b-hf": "14 GB",
}


def likeness(model: Any, processor: Any, image: Image) -> float:
    """How surely the patches of a picture say a word: the mean over patches of their best word's probability."""
    import torch

    pixels = processor.image_processor(images=[image.convert("RGB")], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pixels.to(model.device, model.dtype))
        states = torch.cat(list(getattr(found, "pooler_output", found)))  # (patches, d)
        best = model.get_output_embeddings()(states).float().softmax(-1).amax(-1)  # (patches,)
    return float(best.mean())


def advice(model: Any, processor: Any, image: Image, what: str = "this picture", flag: str = "--model ") -> str | None:
    """The sentence for a picture that is not like the embedded model's scenes; None for one that is.

    `flag` stands before the names of other models.
    """
    if likeness(model, processor, image) >= LEAST:
        return None
    return f"{what} is not like those scenes, so the answer will be about something else. {other_models(flag)}"


def other_models(flag: str, count: int = 3) -> str:
    """Which models to try instead."""
    listed = ", ".join(f"{flag}{name} ({size})" for name, size in list(REAL_MODELS.items())[:count])
    return f"For photographs try {'' if flag else 'the model '}{listed}; `revisit models` lists the families that work."
