"""Chat templates, which transformers renders in jinja2's sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.checkpoint import brief
from revisit.models.types import Processor

MAX_TEXT = 4_000_000  # characters that a template may produce


class Message(TypedDict):
    """One turn of a conversation: {"type": "image"} and {"type": "text", "text": …} parts."""

    role: str
    content: list[dict[str, str]]


def render(processor: Processor, messages: Sequence[Message], **variables: object) -> str:
    """Format a conversation with the processor's chat template, or in a plain format if it has none, ready for the answer."""
    if getattr(processor, "chat_template", None) is None:
        return _plain(processor, messages)
    try:
        text = processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **variables)
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
