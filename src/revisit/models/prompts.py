"""Turn prompts and images into model inputs with the model's own chat template and processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from revisit.errors import RevisitError, brief
from revisit.models import families
from revisit.models.images import open_image
from revisit.models.reader import scale_for

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import BatchFeature

    from revisit.models.types import ImageLike, Processor


MAX_TEXT = 4_000_000  # characters that a template may produce


class Message(TypedDict):
    """One turn of a conversation: {"type": "image"} and {"type": "text", "text": …} parts."""

    role: str
    content: list[dict[str, str]]


def render(processor: Processor, messages: Sequence[Message], **variables: object) -> str:
    """Format a conversation, up to where the answer begins, with the processor's chat template or else in a plain format."""
    if getattr(processor, "chat_template", None) is None:
        return _plain(processor, messages)
    try:
        text = processor.apply_chat_template(
            list(messages),  # type: ignore[arg-type]
            tokenize=False,
            add_generation_prompt=True,
            **variables,  # type: ignore[arg-type]
        )
    except Exception as error:  # a template may raise anything
        raise RevisitError(f"The chat template of this model cannot format this conversation: {brief(error)}") from None
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise RevisitError(f"The chat template of this model produced more than {MAX_TEXT:,} characters.")
    return text


def _plain(processor: Processor, messages: Sequence[Message]) -> str:
    if families.prefixes_images(processor):
        return " ".join(part["text"] for message in messages for part in message["content"] if part["type"] == "text")
    image = f"{getattr(processor, 'image_token', '<image>')}\n"
    names = {"system": "", "user": "USER: ", "assistant": "ASSISTANT: "}
    turns = (names[m["role"]] + "".join(part.get("text", image) for part in m["content"]) for m in messages)
    return " ".join([*turns, "ASSISTANT:"])


def chat_text(processor: Processor, prompt: str, images: int = 1) -> str:
    """Format one prompt after its images, up to where the answer begins."""
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(images)]
    content.append({"type": "text", "text": prompt})
    return render(processor, [{"role": "user", "content": content}])


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
        device: Device of the inputs; the CPU by default.

    Returns:
        The processor's output, for `generate(model, **inputs)`.

    Raises:
        RevisitError: An image cannot be read, a prompt contains the model's image token, or the lists do not match.
    """
    prompts, image_lists = _as_batch(processor, prompts, images)
    for prompt in prompts:
        check_no_image_tokens(processor, "prompt", prompt)
    scale = scale_for(processor)
    opened = [[open_image(image, scale=scale) for image in image_list] for image_list in image_lists]
    texts = [chat_text(processor, prompt, len(row)) for prompt, row in zip(prompts, opened, strict=True)]
    return encode(processor, texts, opened, device)


def _as_batch(processor: Processor, prompts: object, images: object) -> tuple[list[str], list[list[ImageLike]]]:
    """Return a list of prompts and a list of images for each; raise RevisitError for other arguments."""
    if not hasattr(processor, "image_processor"):
        raise RevisitError(
            f"The first argument must be the model's processor, not {type(processor).__name__}: model, processor = revisit.load(…)."
        )
    if isinstance(prompts, str):
        image_list: list[Any] = _as_list(images)
        if len(image_list) == 1 and isinstance(image_list[0], (list, tuple)):  # [[image]], as for a batch of one
            image_list = list(image_list[0])
        return [prompts], [image_list]
    if not isinstance(prompts, (list, tuple)) or not all(isinstance(prompt, str) for prompt in prompts):
        raise RevisitError(
            "The prompt must be a string or a list of strings, followed by the images: prepare(processor, prompt, image)."
        )
    if not prompts:
        raise RevisitError("The list of prompts is empty.")
    batch = [None] * len(prompts) if images is None else images
    if not isinstance(batch, (list, tuple)) or len(batch) != len(prompts):
        count = len(batch) if isinstance(batch, (list, tuple)) else 1
        raise RevisitError(
            f"There are {len(prompts)} prompts but images for {count}: pass a list with an image, or a list of images, for each prompt."
        )
    return list(prompts), [_as_list(entry) for entry in batch]


def _as_list(images: Any) -> list[ImageLike]:
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


def encode(
    processor: Processor,
    texts: Sequence[str],
    images: Sequence[Sequence[Image]],
    device: torch.device | str | int | None = None,
) -> BatchFeature:
    """Encode texts that already contain their image placeholders."""
    nested = [list(row) for row in images]
    bos = processor.tokenizer.bos_token
    has_bos = bool(bos) and any(text.startswith(bos) for text in texts)
    try:
        inputs = processor(
            text=list(texts),
            images=nested if any(nested) else None,
            padding=True,
            return_tensors="pt",
            **({"add_special_tokens": False} if has_bos else {}),  # the template has added them
        )
    except Exception as error:  # processors raise many kinds
        raise RevisitError(f"The model's processor cannot encode this prompt: {brief(error)}") from error
    return inputs if device is None else inputs.to(device)  # type: ignore[no-any-return]


def need_question(prompt: str) -> str:
    """Return the prompt; raise RevisitError if it is blank."""
    if not prompt.strip():
        raise RevisitError(f"The prompt must be a question or a request, not {prompt!r}.")
    return prompt


def check_no_image_tokens(processor: Processor, what: str, text: str) -> None:
    """Raise RevisitError if a text contains an image token; the message calls the text `what`."""
    for token in vision_texts(processor):
        if token in text:
            raise RevisitError(f"The {what} contains {token!r}, which marks an image in this model; leave it out.")


def vision_texts(processor: Processor) -> tuple[str, ...]:
    """Return the tokens that stand for an image or a video in prompts."""
    texts = {str(getattr(processor, name, None) or "") for name in families.VISION_TOKENS}
    return tuple(sorted(texts - {""}))
