"""Chat templates, which transformers runs in jinja2's sandbox: without files or code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from revisit.errors import RevisitError
from revisit.models import families
from revisit.models.checkpoint import brief
from revisit.models.types import Processor

MAX_TEXT = 4_000_000  # characters of what a template writes


class Message(TypedDict):
    """One turn of a conversation: {"type": "image"} and {"type": "text", "text": …} parts."""

    role: str
    content: list[dict[str, str]]


def render(processor: Processor, messages: Sequence[Message]) -> str:
    """A conversation, ready for the answer, as the processor's chat template writes it; plainly where it has none."""
    if getattr(processor, "chat_template", None) is None:
        return _plain(processor, messages)
    try:
        written = processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise RevisitError(f"The chat template of this model cannot format this conversation: {brief(error)}") from None
    if not isinstance(written, str) or len(written) > MAX_TEXT:
        raise RevisitError(f"The chat template of this model wrote more than {MAX_TEXT:,} characters.")
    return written


def _plain(processor: Processor, messages: Sequence[Message]) -> str:
    if families.prefixes_images(processor):
        return " ".join(part["text"] for message in messages for part in message["content"] if part["type"] == "text")
    image = f"{getattr(processor, 'image_token', '<image>')}\n"
    names = {"system": "", "user": "USER: ", "assistant": "ASSISTANT: "}
    turns = (names[m["role"]] + "".join(part.get("text", image) for part in m["content"]) for m in messages)
    return " ".join([*turns, "ASSISTANT:"])
