"""Answers in the form of the OpenAI chat protocol, whole and streamed.

The fields `decoding` (the method's counters and, with `record`, the data of the page) and `check` (the words of the answer with
their support) are additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue
from pydantic_core import to_json

from revisit.serve.requests import ChatRequest

Json = dict[str, JsonValue]


@dataclass(frozen=True)
class Piece:
    """Text that later tokens cannot change, with the log-probabilities of its tokens if requested."""

    text: str
    logprobs: Sequence[JsonValue] = ()
    thought: str = ""


@dataclass(frozen=True)
class Reply:
    """A finished answer."""

    text: str
    finish: str  # "stop" or "length"
    prompt_tokens: int
    tokens: int
    decoding: Json = field(default_factory=dict)  # counters of the method
    check: Json | None = None  # the words with their support, if requested
    logprobs: Sequence[JsonValue] = ()
    thought: str = ""
    thought_tokens: int = 0

    @property
    def usage(self) -> Json:
        """The token counts."""
        details: Json = {"completion_tokens_details": {"reasoning_tokens": self.thought_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
            **(details if self.thought_tokens else {}),
        }


def completion(request: ChatRequest, reply: Reply) -> Json:
    """Return the whole answer as one object."""
    if request.text is not None:
        return {**(reply.check or {}), **_head(request, "check"), "usage": reply.usage}
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    choices: list[JsonValue] = [_choice(reply.finish, reply.logprobs, message=message)]
    head = _head(request, "chat.completion")
    return {**head, "choices": choices, "usage": reply.usage, "decoding": reply.decoding, **_check(reply)}


def chunk(request: ChatRequest, piece: Piece | None = None) -> Json:
    """Return a piece of a streamed answer, or the chunk that begins it."""
    if piece is None:
        choice = _choice(delta={"role": "assistant", "content": ""})
    else:
        delta: Json = {"reasoning_content": piece.thought} if piece.thought else {"content": piece.text}
        choice = _choice(None, piece.logprobs, delta=delta)
    return {**_head(request, "chat.completion.chunk"), "choices": [choice]}


def last_chunks(request: ChatRequest, reply: Reply) -> list[Json]:
    """Return the chunk that states why the answer ended and, if requested, one with the token counts and no choices."""
    head, options = _head(request, "chat.completion.chunk"), request.chat.stream_options
    end: Json = {**head, "choices": [_choice(reply.finish, delta={})], **_check(reply)}
    usage: Json = {**head, "choices": [], "usage": reply.usage, "decoding": reply.decoding}
    return [end, usage] if options is not None and options.include_usage else [end]


def _choice(finish: str | None = None, logprobs: Sequence[JsonValue] = (), **content: Json) -> Json:
    listed: Json | None = {"content": [*logprobs], "refusal": None} if logprobs else None
    return {"index": 0, **content, "finish_reason": finish, "logprobs": listed}


def _check(reply: Reply) -> Json:
    return {} if reply.check is None else {"check": reply.check}


def _head(request: ChatRequest, kind: str) -> Json:
    return {"id": request.id, "object": kind, "created": request.created, "model": request.chat.model}


def encode(value: object) -> bytes:
    """Write JSON, with null for NaN and infinite numbers."""
    return to_json(value, inf_nan_mode="null")


def event(value: object) -> bytes:
    """Format a server-sent event."""
    return b"data: " + encode(value) + b"\n\n"
