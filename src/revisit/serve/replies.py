"""Answers in the form of the OpenAI chat protocol, whole and streamed.

`decoding` and `check` are additions: what the method did (with `record`, at every step), and the words of the answer with
their support.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from revisit.serve.requests import ChatRequest

Json = dict[str, JsonValue]


@dataclass(frozen=True)
class Piece:
    """Text that later tokens cannot change, with the record and the log-probabilities of its step if requested."""

    text: str
    record: Json | None = None
    logprobs: Sequence[JsonValue] = ()
    thought: str = ""

    def delta(self) -> Json:
        """Return what a chunk adds to the message."""
        return {"reasoning_content": self.thought} if self.thought else {"content": self.text}


NOTHING = Piece("")


@dataclass(frozen=True)
class Reply:
    """A finished answer."""

    text: str
    finish: str  # "stop" or "length"
    prompt_tokens: int
    tokens: int
    method: str
    counters: Mapping[str, int] = field(default_factory=dict)
    record: Json = field(default_factory=dict)
    check: Json | None = None  # the words with their support, if requested
    logprobs: Sequence[JsonValue] = ()
    thought: str = ""
    thought_tokens: int = 0

    def details(self) -> Json:
        """Return the token counts, and what the method did."""
        usage: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }
        if self.thought_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.thought_tokens}
        return {"usage": usage, "decoding": {"method": self.method, **self.counters, **self.record}}


def completion(request: ChatRequest, reply: Reply, model: str) -> Json:
    """Return the whole answer as one object."""
    if request.text is not None:
        return {**(reply.check or {}), **_head(request, model, "check"), "usage": reply.details()["usage"]}
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    choice = _choice(reply.finish, reply.logprobs, message=message)
    return {**_head(request, model, "chat.completion"), "choices": [choice], **reply.details(), **_check(reply)}


def chunk(request: ChatRequest, model: str, delta: Json, last: Reply | None = None, piece: Piece = NOTHING) -> Json:
    """Return one piece of a streamed answer; the last one states why the answer ended."""
    choice = _choice(None if last is None else last.finish, piece.logprobs, delta=delta)
    more: Json = {} if piece.record is None else {"decoding": piece.record}
    return {**_head(request, model, "chat.completion.chunk"), "choices": [choice], **more, **_check(last)}


def last_chunk(request: ChatRequest, model: str, reply: Reply) -> Json:
    """Return the chunk with the token counts, which has no choices."""
    return {**_head(request, model, "chat.completion.chunk"), "choices": [], **reply.details()}


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
