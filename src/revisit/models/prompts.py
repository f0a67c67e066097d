"""From questions and pictures to model inputs, through each model's own chat template and processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.models import families, templates
from revisit.models.checkpoint import brief
from revisit.models.images import open_image
from revisit.models.loading import check_device

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor
    from transformers import BatchFeature, GenerationConfig

    from revisit.models.types import ImageLike, Inputs, Processor


def chat_text(processor: Processor, prompt: str, images: int = 1) -> str:
    """The prompt as the model's chat template writes it, pictures first, ready for the answer."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    content.append({"type": "text", "text": prompt})
    return templates.render(processor, [{"role": "user", "content": content}])


def prepare(
    processor: Processor,
    prompts: str | Sequence[str],
    images: ImageLike | Sequence[ImageLike | Sequence[ImageLike] | None] | None = None,
    device: torch.device | str | int | None = None,
) -> BatchFeature:
    """Turn prompts and images into left-padded model inputs, through the model's own chat template.

    Args:
        processor: The model's processor.
        prompts: One prompt, or a list of them for a batch.
        images: With one prompt, an image, a list of images, or None. With a list of prompts, a list with one of these for
            each prompt. An image is anything that `open_image` takes.
        device: Where the inputs go; the CPU by default.

    Returns:
        What the processor returns, for `generate(model, **inputs)`.

    Raises:
        RevisitError: An image cannot be read, a prompt contains the model's image token, or the lists do not match.
    """
    prompts, given = _paired(processor, prompts, images)
    if device is not None:
        check_device(device, "device", "cpu, cuda or model.device")
    for prompt in prompts:
        refuse_image_tokens(processor, "prompt", prompt)
    pictures = [[open_image(image) for image in own] for own in given]
    texts = [chat_text(processor, prompt, len(own)) for prompt, own in zip(prompts, pictures, strict=True)]
    return encode(processor, texts, pictures, device)


def _paired(processor: Processor, prompts: object, images: object) -> tuple[list[str], list[list[ImageLike]]]:
    """The prompts and, for each, its list of images; raises RevisitError for other arguments."""
    if not hasattr(processor, "image_processor"):
        raise RevisitError(
            f"The first argument must be the model's processor, not {type(processor).__name__}: model, processor = revisit.load(…)."
        )
    if isinstance(prompts, str):
        own: list[Any] = _images_of_one(images)
        if len(own) == 1 and isinstance(own[0], (list, tuple)):  # [[image]], as a batch of one would have it
            own = list(own[0])
        return [prompts], [own]
    if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
        raise RevisitError(
            "The prompt must be a text or a list of texts, followed by the images: prepare(processor, prompt, image)."
        )
    if not prompts:
        raise RevisitError("The list of prompts is empty.")
    batch = [None] * len(prompts) if images is None else images
    if not isinstance(batch, (list, tuple)) or len(batch) != len(prompts):
        count = len(batch) if isinstance(batch, (list, tuple)) else 1
        raise RevisitError(
            f"{len(prompts)} prompts came with images for {count}: pass a list with an image, or a list of images, for each prompt."
        )
    return list(prompts), [_images_of_one(own) for own in batch]


def _images_of_one(images: Any) -> list[ImageLike]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def encode(
    processor: Processor,
    texts: Sequence[str],
    images: Sequence[Sequence[Image]],
    device: torch.device | str | int | None = None,
) -> BatchFeature:
    """Model inputs for texts that already hold their image placeholders."""
    nested = [list(pictures) for pictures in images]
    special = any(text.startswith(str(bos)) for text in texts) if (bos := _bos(processor)) else False
    try:
        inputs = processor(
            text=list(texts),
            images=nested if any(nested) else None,
            padding=True,
            return_tensors="pt",
            **({"add_special_tokens": False} if special else {}),  # the template wrote them already
        )
    except RevisitError:
        raise
    except Exception as error:  # processors raise many kinds
        raise RevisitError(f"The model's processor cannot encode this prompt: {brief(error)}") from error
    return inputs if device is None else inputs.to(device)  # type: ignore[no-any-return]


def refuse_image_tokens(processor: Processor, what: str, text: str) -> None:
    """Raises RevisitError if a text contains what the processor would take for an image."""
    for token in vision_texts(processor):
        if token in text:
            raise RevisitError(f"The {what} contains {token!r}, which marks an image in this model; leave it out.")


def vision_texts(processor: Processor) -> tuple[str, ...]:
    """Texts that the processor would take for an image or a video."""
    found = {str(getattr(processor, name)) for name in families.VISION_TOKENS if getattr(processor, name, None)}
    return tuple(sorted(found - {""}))


def _bos(processor: Processor) -> str | None:
    return getattr(getattr(processor, "tokenizer", None), "bos_token", None)


def new_tokens(output: Any, inputs: Inputs) -> Tensor:
    """The generated part of what `generate` returned, (rows, new)."""
    sequences = output if not hasattr(output, "sequences") else output.sequences
    if not hasattr(sequences, "shape") or not hasattr(inputs, "keys") or "input_ids" not in inputs:
        raise RevisitError(
            "answers(processor, output, inputs) needs the output "
            f"of generate and its inputs, not {type(output).__name__} and {type(inputs).__name__}."
        )
    return sequences[:, inputs["input_ids"].shape[1] :]  # type: ignore[no-any-return]


def answers(processor: Processor, output: Any, inputs: Inputs) -> list[str]:
    """The generated texts, without special tokens or surrounding blanks."""
    if not hasattr(processor, "batch_decode"):
        raise RevisitError(f"The first argument must be the model's processor, not {type(processor).__name__}.")
    return [text.strip() for text in processor.batch_decode(new_tokens(output, inputs), skip_special_tokens=True)]


def end_tokens(generation_config: GenerationConfig) -> set[int]:
    """The ids that end an answer."""
    ids = generation_config.eos_token_id
    return set(ids) if isinstance(ids, (list, tuple)) else set() if ids is None else {ids}


def until_end(tokens: Sequence[int], end: set[int]) -> list[int]:
    """The tokens up to and with the first that ends the answer; what follows is the batch's padding."""
    for place, token in enumerate(tokens):
        if token in end:
            return list(tokens[: place + 1])
    return list(tokens)
