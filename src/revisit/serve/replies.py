"""Answers in the form of the OpenAI chat protocol, whole and streamed.

`decoding` and `check` are additions: what the method did (with `record`, the data of the page), and the words of the answer
with their support.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

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
    decoding: Json = field(default_factory=dict)  # what the method did
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


def completion(request: ChatRequest, reply: Reply, model: str) -> Json:
    """Return the whole answer as one object."""
    if request.text is not None:
        return {**(reply.check or {}), **_head(request, model, "check"), "usage": reply.usage}
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    choice, more = _choice(reply.finish, reply.logprobs, message=message), {"decoding": reply.decoding, **_check(reply)}
    return {**_head(request, model, "chat.completion"), "choices": [choice], "usage": reply.usage, **more}


def chunk(request: ChatRequest, model: str, delta: Json | Piece, last: Reply | None = None) -> Json:
    """Return one piece of a streamed answer; the last one states why the answer ended."""
    logprobs: Sequence[JsonValue] = ()
    if isinstance(delta, Piece):
        logprobs = delta.logprobs
        delta = {"reasoning_content": delta.thought} if delta.thought else {"content": delta.text}
    choice = _choice(None if last is None else last.finish, logprobs, delta=delta)
    return {**_head(request, model, "chat.completion.chunk"), "choices": [choice], **_check(last)}


def last_chunk(request: ChatRequest, model: str, reply: Reply) -> Json:
    """Return the chunk with the token counts, which has no choices."""
    more: Json = {"choices": [], "usage": reply.usage, "decoding": reply.decoding}
    return {**_head(request, model, "chat.completion.chunk"), **more}


def _choice(finish: str | None, logprobs: Sequence[JsonValue], **content: Json) -> Json:
    found: Json | None = {"content": [*logprobs], "refusal": None} if logprobs else None
    return {"index": 0, **content, "finish_reason": finish, "logprobs": found}


def _check(reply: Reply | None) -> Json:
    return {} if reply is None or reply.check is None else {"check": reply.check}


def _head(request: ChatRequest, model: str, kind: str) -> Json:
    return {"id": request.id, "object": kind, "created": request.created, "model": model}


def event(value: Mapping[str, object]) -> bytes:
    """Format a server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def finite(value: JsonValue) -> JsonValue:
    """Replace every number that JSON cannot hold by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
