"""From questions and pictures to model inputs, through each model's own chat template and processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.models import families, templates
from revisit.models.images import open_image

if TYPE_CHECKING:
    from PIL.Image import Image


def chat_text(processor: Any, prompt: str, images: int = 1, system: str | None = None) -> str:
    """The prompt as the model's chat template writes it, pictures first, ready for the answer."""
    if getattr(processor, "chat_template", None) is None:
        token = getattr(processor, "image_token", "<image>")
        if families.prefixes_images(processor):
            return prompt
        return "USER: " + f"{token}\n" * images + f"{prompt} ASSISTANT:"
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    content.append({"type": "text", "text": prompt})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return templates.render(processor, messages, add_generation_prompt=True)


def prepare(processor: Any, prompts: str | Sequence[str], images: Any, device: Any = None) -> Any:
    """Left-padded model inputs for a prompt and its picture or pictures, or for a batch of prompts with a list of pictures each.

    A picture is whatever `open_image` takes; a prompt of a batch may have none.
    """
    if not callable(processor):
        raise RevisitError(
            f"The first argument must be the model's processor, as revisit.load makes it, not a {type(processor).__name__}."
        )
    if isinstance(prompts, str):
        prompts, images = (
            [prompts],
            [images if isinstance(images, (list, tuple)) else [] if images is None else [images]],
        )
    images = [list(entry) if isinstance(entry, (list, tuple)) else [] if entry is None else [entry] for entry in images]
    if len(prompts) != len(images):
        raise RevisitError(
            f"{len(prompts)} prompts came with {len(images)} lists of images; there must be one list each."
        )
    images = [[open_image(picture) for picture in pictures] for pictures in images]
    for token in vision_texts(processor):
        if any(token in prompt for prompt in prompts):
            raise RevisitError(f"The prompt contains {token!r}, which stands for an image in this model; leave it out.")
    texts = [chat_text(processor, prompt, len(pictures)) for prompt, pictures in zip(prompts, images, strict=True)]
    return encode(processor, texts, images, device)


def encode(processor: Any, texts: Sequence[str], images: Sequence[Sequence[Image]], device: Any = None) -> Any:
    """Model inputs for texts that already hold their image placeholders."""
    nested = [list(pictures) for pictures in images]
    special = any(text.startswith(str(bos)) for text in texts) if (bos := _bos(processor)) else False
    inputs = processor(
        text=list(texts),
        images=nested if any(nested) else None,
        padding=True,
        return_tensors="pt",
        **({"add_special_tokens": False} if special else {}),  # the template wrote them already
    )
    return inputs if device is None else inputs.to(device)


def vision_texts(processor: Any) -> tuple[str, ...]:
    """Texts that the processor would take for an image or a video."""
    found = {str(getattr(processor, name)) for name in families.VISION_TOKENS if getattr(processor, name, None)}
    return tuple(sorted(found - {""}))


def _bos(processor: Any) -> str | None:
    return getattr(getattr(processor, "tokenizer", None), "bos_token", None)


def new_tokens(output: Any, inputs: Any) -> Any:
    """The generated part of what `generate` returned, (rows, new)."""
    sequences = output if not hasattr(output, "sequences") else output.sequences
    return sequences[:, inputs["input_ids"].shape[1] :]


def answers(processor: Any, output: Any, inputs: Any) -> list[str]:
    """The generated texts, without special tokens or surrounding blanks."""
    return [text.strip() for text in processor.batch_decode(new_tokens(output, inputs), skip_special_tokens=True)]
