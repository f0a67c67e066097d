"""Chat templates, which transformers runs in jinja2's sandbox: without files or code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from revisit.errors import RevisitError
from revisit.models.checkpoint import brief
from revisit.models.types import Processor

MAX_TEXT = 4_000_000  # characters of what a template writes


def render(processor: Processor, messages: Sequence[Mapping[str, object]], **options: object) -> str:
    """What the processor's chat template writes for a conversation, as text."""
    try:
        written = processor.apply_chat_template(list(messages), tokenize=False, **options)
    except Exception as error:  # a template may raise anything
        raise RevisitError(f"The chat template of this model cannot write this conversation: {brief(error)}") from None
    if not isinstance(written, str) or len(written) > MAX_TEXT:
        raise RevisitError(f"The chat template of this model wrote more than {MAX_TEXT:,} characters.")
    return written
