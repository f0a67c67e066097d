"""Answers in the form of the OpenAI chat protocol, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from revisit.serve.requests import ChatRequest


@dataclass
class Reply:
    """What came of a request."""

    text: str
    finish: str  # "stop" or "length"
    prompt_tokens: int
    tokens: int
    counters: dict[str, Any] = field(default_factory=dict)


def usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.tokens,
        "total_tokens": reply.prompt_tokens + reply.tokens,
    }


def completion(request: ChatRequest, reply: Reply, model: str) -> dict[str, Any]:
    """The whole answer as one object; `decoding` says what the method did."""
    message = {"role": "assistant", "content": reply.text, "refusal": None}
    return {
        "id": request.id,
        "object": "chat.completion",
        "created": request.created,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}],
        "usage": usage(reply),
        "decoding": reply.counters,
    }


def chunk(request: ChatRequest, model: str, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    """One piece of a streamed answer."""
    return {
        "id": request.id,
        "object": "chat.completion.chunk",
        "created": request.created,
        "model": model,
        "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish, "logprobs": None}],
    }


def last_chunk(request: ChatRequest, model: str, reply: Reply) -> dict[str, Any]:
    """The chunk with the token counts, which has no choices."""
    return {**chunk(request, model, {}), "choices": [], "usage": usage(reply), "decoding": reply.counters}


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
