"""Chat templates: programs that came with a checkpoint.

transformers runs them in jinja2's sandbox, which keeps them from files and code. A single operation that makes a huge string
would still end the process, so templates with such operations are refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from revisit.errors import RevisitError
from revisit.models.checkpoint import brief
from revisit.models.types import Processor

MAX_TEMPLATE = 200_000  # characters of the template
MAX_TEXT = 4_000_000  # characters of what it writes
MAX_NUMBER = 1_000_000  # an integer in the template
MAX_PRODUCTS = 4  # multiplications in the template, each by a number of at most MAX_FACTOR
MAX_FACTOR = 16
PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs"}  # methods and filters that fill up to any width


def render(processor: Processor, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """What the processor's chat template writes for a conversation, as text."""
    for text in _templates(processor):
        _check(text)
    try:
        written = processor.apply_chat_template(list(messages), tokenize=False, **options)
    except RevisitError:
        raise
    except Exception as error:  # a template may raise anything
        raise RevisitError(f"The chat template of this model cannot write this conversation: {brief(error)}") from None
    if not isinstance(written, str) or len(written) > MAX_TEXT:
        raise RevisitError(f"The chat template of this model wrote more than {MAX_TEXT:,} characters.")
    return written


def _templates(processor: Processor) -> Iterator[str]:
    """Every template that the processor may use."""
    for owner in (processor, getattr(processor, "tokenizer", None)):
        found = getattr(owner, "chat_template", None)
        for text in found.values() if isinstance(found, dict) else [found]:
            if text is not None:
                yield str(text)


@functools.lru_cache(maxsize=32)
def _check(text: str) -> None:
    """Refuses a template that is too long or that could make huge strings in one operation."""
    if len(text) > MAX_TEMPLATE:
        raise RevisitError(f"The chat template of this model has more than {MAX_TEMPLATE:,} characters.")
    try:
        tokens = [(kind, value) for _, kind, value in Environment().lex(text) if kind not in ("whitespace", "data")]
    except TemplateSyntaxError as error:
        raise RevisitError(f"The chat template of this model is not a template: {error.message}") from None
    for at, (kind, value) in enumerate(tokens):
        near = [number for kind, number in tokens[max(at - 1, 0) : at + 2] if kind == "integer"]
        if (
            (kind == "operator" and value == "**")
            or (kind == "operator" and value == "*" and not any(_number(n) <= MAX_FACTOR for n in near))
            or (kind == "integer" and _number(value) > MAX_NUMBER)
            or (kind == "name" and value in PADDING)
            or (kind == "string" and re.search(r"[%{:][^%{}]*\d{5}", value))
        ):
            raise RevisitError(
                f"The chat template of this model is refused: {value[:40]!r} could make a text of any size at once."
            )
    if sum(token == ("operator", "*") for token in tokens) > MAX_PRODUCTS:
        raise RevisitError("The chat template of this model is refused: it multiplies too often to be bounded.")


def _number(text: str) -> float:
    digits = text.replace("_", "").lower()
    try:
        return int(digits, 0)
    except ValueError:  # 007, or more digits than Python reads
        return int(digits) if len(digits) < 20 and digits.isdecimal() else float("inf")
