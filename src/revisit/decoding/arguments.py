"""Arguments of transformers' generate() that it does not pass on to a callable `custom_generate`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import GenerationMixin

from revisit.decoding.method import Method
from revisit.errors import RevisitError


@dataclass(frozen=True)
class Arguments:
    """What a call of generate() was given, before any preparation."""

    inputs: Mapping[str, Any]  # what describes the prompt, such as pixels, and settings; models may consume them
    streamer: Any = None
    assistant_model: Any = None
    synced_gpus: bool | None = None
    prefix_allowed_tokens_fn: object = None

    @classmethod
    def of(cls, given: Mapping[str, Any], inputs: Mapping[str, Any]) -> Arguments:
        """Select the arguments by name from `given`."""
        return cls(inputs, **{entry.name: given.get(entry.name) for entry in fields(cls)[1:]})


# Arguments of generate() that do not belong to the prompt.
_NAMED = {
    *inspect.signature(GenerationMixin.generate).parameters,
    *inspect.signature(Method.__call__).parameters,
    *("tokenizer", "assistant_tokenizer", "trust_remote_code"),
    *("adapter_names", "alora_offsets"),  # peft removes them
}
_GIVEN: ContextVar[Arguments | None] = ContextVar("arguments of revisit.generate", default=None)


@contextmanager
def passing(given: Mapping[str, Any]) -> Iterator[None]:
    """Pass the arguments of a call to the method that transformers calls first within the context."""
    token = _GIVEN.set(Arguments.of(given, {name: value for name, value in given.items() if name not in _NAMED}))
    try:
        yield
    finally:
        _GIVEN.reset(token)


def take() -> Arguments:
    """Return the arguments of the running call, once; without `passing`, from the frame of transformers' generate() on the stack."""
    if (given := _GIVEN.get()) is not None:
        _GIVEN.set(None)  # calls within this one have their own
        return given
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and Path(frame.f_code.co_filename).match(
            "transformers/generation/utils.py"
        ):
            return Arguments.of(frame.f_locals, dict(frame.f_locals.get("kwargs") or {}))
        frame = frame.f_back  # type: ignore[assignment]
    raise RevisitError(
        "Do not call a decoding method directly: use model.generate(..., custom_generate=method) or revisit.generate(model, ..., "
        "method=method)."
    )
