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
    row: int = 0  # of the request


@dataclass(frozen=True)
class Choice:
    """One finished answer."""

    text: str
    finish: str  # "stop" or "length"
    tokens: int
    logprobs: Sequence[JsonValue] = ()
    thought: str = ""
    thought_tokens: int = 0


@dataclass(frozen=True)
class Reply:
    """The finished answers to a request."""

    choices: Sequence[Choice]
    prompt_tokens: int
    decoding: Json = field(default_factory=dict)  # counters of the method
    check: Json | None = None  # the words with their support, if requested

    @property
    def usage(self) -> Json:
        """The token counts of all choices."""
        tokens = sum(choice.tokens for choice in self.choices)
        thought_tokens = sum(choice.thought_tokens for choice in self.choices)
        details: Json = {"completion_tokens_details": {"reasoning_tokens": thought_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            **(details if thought_tokens else {}),
        }


def completion(request: ChatRequest, reply: Reply) -> Json:
    """Return the whole answer as one object."""
    if request.text is not None:
        return {**(reply.check or {}), **_head(request, "check"), "usage": reply.usage}
    choices: list[JsonValue] = []
    for index, choice in enumerate(reply.choices):
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = choice.thought
        choices.append(_choice(index, choice.finish, choice.logprobs, message=message))
    head = _head(request, "chat.completion")
    return {**head, "choices": choices, "usage": reply.usage, "decoding": reply.decoding, **_check(reply)}


def first_chunks(request: ChatRequest) -> list[Json]:
    """Return the chunks that begin the streamed answers."""
    first: Json = {"role": "assistant", "content": ""}
    return [_chunk(request, _choice(index, delta=first)) for index in range(request.chat.n)]


def chunk(request: ChatRequest, piece: Piece) -> Json:
    """Return a piece of a streamed answer."""
    delta: Json = {"reasoning_content": piece.thought} if piece.thought else {"content": piece.text}
    return _chunk(request, _choice(piece.row, None, piece.logprobs, delta=delta))


def last_chunks(request: ChatRequest, reply: Reply) -> list[Json]:
    """Return the chunks that state why the answers ended and, if requested, one with the token counts and no choices."""
    options = request.chat.stream_options
    ends = [_choice(index, choice.finish, delta={}) for index, choice in enumerate(reply.choices)]
    last = [{**_chunk(request, end), **_check(reply)} for end in ends]
    usage: Json = {**_chunk(request), "usage": reply.usage, "decoding": reply.decoding}
    return [*last, usage] if options is not None and options.include_usage else last


def _chunk(request: ChatRequest, *choices: Json) -> Json:
    return {**_head(request, "chat.completion.chunk"), "choices": [*choices]}


def _choice(index: int, finish: str | None = None, logprobs: Sequence[JsonValue] = (), **content: Json) -> Json:
    listed: Json | None = {"content": [*logprobs], "refusal": None} if logprobs else None
    return {"index": index, **content, "finish_reason": finish, "logprobs": listed}


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
