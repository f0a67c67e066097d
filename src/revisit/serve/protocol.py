"""The OpenAI chat protocol as far as it is spoken here: requests in, completions and chunks out. No web framework.

Anything a client asks for that would not be done is refused with a sentence; nothing is ignored silently except fields
that change no answer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from revisit.decoding.plain import Plain
from revisit.errors import RevisitError, unknown
from revisit.models.images import image_from_data_uri
from revisit.serve.limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method

ROLES = ("system", "developer", "user", "assistant")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # no format whose decoder starts other programs
NO_EFFECT = {"user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"}
UNSUPPORTED = {  # field -> the only values that ask for nothing
    "n": (1, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "tools": ([], None),
    "tool_choice": ("none", None),
    "functions": ([], None),
    "function_call": ("none", None),
    "response_format": ({"type": "text"}, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "audio": (None,),
    "modalities": (["text"], None),
    "reasoning_effort": (None,),
}
FIELDS = {
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "decoding",
}


class Refusal(Exception):
    """A request that is not served: an HTTP status and one sentence."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": kind, "param": param, "code": self.code}}


def _printable(text: str) -> str:
    """Text that can be sent: halves of characters are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Sampling:
    """How one request draws its tokens; without a temperature it takes the best."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Ask:
    """One well-formed request."""

    messages: Sequence[Mapping[str, Any]]  # as chat templates want them: {"role", "content": [{"type", "text"?}]}
    images: Sequence[Image]
    method: Method
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_chunk: bool = False
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass
class Reply:
    """What came of an ask."""

    text: str
    finish: str  # "stop" or "length"
    prompt_tokens: int
    tokens: int
    counters: dict[str, Any] = field(default_factory=dict)


def read_body(body: bytes) -> dict[str, Any]:
    """The request as an object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "The request body is not valid JSON.") from None
    if b"\\ud" in body.lower() and _has_halves(value):
        raise Refusal(400, "The request holds halves of characters (lone surrogates), which are no text.")
    if not isinstance(value, dict):
        raise Refusal(400, "The request body must be a JSON object.")
    return value


def _has_halves(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def read_request(
    body: Mapping[str, Any],
    *,
    model: str,
    default: Method,
    limits: Limits,
    fetch: Callable[[str, int], Image] | None = None,
    make: Callable[..., Method] | None = None,
) -> Ask:
    """The request a body stands for; raises `Refusal`.

    `fetch` gets pictures behind URLs, None refuses them. `make` makes a method from its name and settings, None with the defaults.
    """
    _check_fields(body, model)
    messages, sources = read_messages(body.get("messages"))
    if len(sources) > limits.images:
        raise Refusal(
            400, f"The request has {len(sources)} images; at most {limits.images} are allowed.", param="messages"
        )
    method, explicit = _method(body.get("decoding"), default, make)
    if not sources and explicit and method.name != "greedy":
        raise Refusal(
            400,
            f"There is no image in this conversation for the method {method.name!r} to look at: send one, or leave out 'decoding'.",
            param="decoding",
        )
    max_tokens = _max_tokens(body, limits)
    sampling = _sampling(body)
    stop = _stop(body.get("stop"))
    stream = _flag(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise Refusal(400, "stream_options may hold include_usage only.", param="stream_options")
    images: list[Image] = []
    for source in sources:  # last: it is the only costly check
        left = limits.request_pixels - sum(image.width * image.height for image in images)
        images.append(read_picture(source, min(limits.image_pixels, left), fetch))
    if not sources:
        method = Plain()  # there is nothing to look at, whoever shares the batch
    return Ask(
        messages, images, method, max_tokens, sampling, stop, stream, stream and bool(options.get("include_usage"))
    )


def _check_fields(body: Mapping[str, Any], model: str) -> None:
    for name in body:
        if name in UNSUPPORTED:
            if body[name] not in UNSUPPORTED[name]:
                raise Refusal(400, f"{name}={_short(body[name])} is not supported here; leave it out.", param=name)
        elif name not in FIELDS and name not in NO_EFFECT:
            raise Refusal(400, str(unknown("request field", str(name), FIELDS)), param=str(name))
    wanted = body.get("model")
    if not isinstance(wanted, str):
        raise Refusal(400, f"model must be a string; this server has {model!r}.", param="model")
    if wanted != model:
        raise Refusal(
            404,
            f"There is no model {_short(wanted)} here; this server has {model!r}.",
            param="model",
            code="model_not_found",
        )


def read_messages(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as chat templates want them, and the image sources in order of appearance."""
    if not isinstance(value, list) or not value:
        raise Refusal(400, "messages must be a list with at least one message.", param="messages")
    messages: list[dict[str, Any]] = []
    sources: list[str] = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise Refusal(400, f"{where} must be an object with a role among {', '.join(ROLES)}.", param=where)
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list) or not parts:
            raise Refusal(400, f"{where}.content must be text or a list of parts.", param=where)
        converted = []
        for part in parts:
            converted.append(_part(part, where, sources))
        if sources and message["role"] in ("system", "developer") and any(p["type"] == "image" for p in converted):
            raise Refusal(400, f"{where}: images belong in user messages.", param=where)
        messages.append({"role": "system" if message["role"] == "developer" else message["role"], "content": converted})
    if messages[-1]["role"] != "user":
        raise Refusal(400, "The last message must be the user's.", param="messages")
    return messages, sources


def _part(part: Any, where: str, sources: list[str]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, dict) else url
        if isinstance(url, str):
            sources.append(url)
            return {"type": "image"}
    raise Refusal(
        400,
        f'{where}: a part must be {{"type": "text", "text": …}} or {{"type": "image_url", "image_url": {{"url": …}}}}.',
        param=where,
    )


def read_picture(source: str, max_pixels: int, fetch: Callable[[str, int], Image] | None) -> Image:
    """The picture in a data URI, or behind a URL where that is allowed; never a file of the server."""
    try:
        if source.startswith("data:"):
            return image_from_data_uri(source, max_pixels=max_pixels, formats=FORMATS)
        if source.startswith(("http://", "https://")):
            if fetch is None:
                raise Refusal(
                    400,
                    "Images behind URLs are not fetched by this server; send the image itself as a data URI.",
                    param="messages",
                )
            return fetch(source, max_pixels)
    except RevisitError as error:
        raise Refusal(400, str(error), param="messages") from None
    raise Refusal(
        400, f"An image must be a data URI (data:image/png;base64,…), not {_short(source)}.", param="messages"
    )


def _method(value: Any, default: Method, make: Callable[..., Method] | None) -> tuple[Method, bool]:
    """The method of a request and whether it was asked for explicitly."""
    from revisit import methods
    from revisit.decoding.grammar import parse_entry

    if value is None:
        return default, False
    if (
        not isinstance(value, dict)
        or set(value) - {"method", "settings"}
        or not isinstance(value.get("settings", {}), dict)
    ):
        raise Refusal(400, 'decoding must be {"method": name, "settings": {…}}.', param="decoding")
    try:
        name, own = parse_entry(str(value.get("method", default.name)))
        return (make or methods.get)(name, **{**own, **value.get("settings", {})}), True
    except (RevisitError, TypeError) as error:
        raise Refusal(400, str(error), param="decoding") from None


def _number(body: Mapping[str, Any], name: str, low: float, high: float, whole: bool = False) -> Any:
    value = body.get(name)
    if value is None:
        return None
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise Refusal(
            400,
            f"{name} must be a {'whole ' if whole else ''}number from {low:g} to {high:g}, not {_short(value)}.",
            param=name,
        )
    return value


def _max_tokens(body: Mapping[str, Any], limits: Limits) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        value = _number(body, name, 1, limits.new_tokens, whole=True)
        if value is not None:
            return int(value)
    return limits.default_new_tokens


def _sampling(body: Mapping[str, Any]) -> Sampling:
    temperature = _number(body, "temperature", 0, 2)
    top_p = _number(body, "top_p", 0, 1)
    top_k = _number(body, "top_k", 1, 1 << 20, whole=True)
    seed = _number(body, "seed", -(1 << 63), (1 << 63) - 1, whole=True)
    if not temperature:  # greedy, where top_p and top_k change nothing
        return Sampling()
    return Sampling(
        float(temperature),
        max(float(top_p), 1e-6) if top_p is not None else 1.0,
        top_k,
        seed if seed is not None else secrets.randbits(62),
    )


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if (
        not isinstance(stops, list)
        or len(stops) > 4
        or not all(isinstance(s, str) and 0 < len(s) <= 256 for s in stops)
    ):
        raise Refusal(400, "stop must be one to four texts of at most 256 characters.", param="stop")
    return tuple(stops)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value not in (True, False, None):
        raise Refusal(400, f"{name} must be true or false, not {_short(value)}.", param=name)
    return bool(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# -- answers ------------------------------------------------------------------------------------------------------


def usage(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.tokens,
        "total_tokens": reply.prompt_tokens + reply.tokens,
    }


def completion(ask: Ask, reply: Reply, model: str) -> dict[str, Any]:
    """The whole answer as one object; `decoding` says what the method did."""
    message = {"role": "assistant", "content": reply.text, "refusal": None}
    return {
        "id": ask.id,
        "object": "chat.completion",
        "created": ask.created,
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.finish, "logprobs": None}],
        "usage": usage(reply),
        "decoding": reply.counters,
    }


def chunk(ask: Ask, model: str, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
    """One piece of a streamed answer."""
    return {
        "id": ask.id,
        "object": "chat.completion.chunk",
        "created": ask.created,
        "model": model,
        "choices": [{"index": 0, "delta": dict(delta), "finish_reason": finish, "logprobs": None}],
    }


def last_chunk(ask: Ask, model: str, reply: Reply) -> dict[str, Any]:
    """The chunk with the token counts, which has no choices."""
    return {**chunk(ask, model, {}), "choices": [], "usage": usage(reply), "decoding": reply.counters}


def event(value: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
