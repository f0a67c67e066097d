"""From the body of a request to what can be decoded, cheap checks first."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import JsonValue, ValidationError

from revisit import methods
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, unknown
from revisit.methods.greedy import Greedy
from revisit.models import templates
from revisit.models.images import image_from_data_uri
from revisit.registry import LIST_OF_METHODS, parse_entry, parse_links, parse_list
from revisit.serve.errors import ApiError, from_validation, printable
from revisit.serve.limits import Limits
from revisit.serve.schema import ChatBody, CheckBody, CheckChoice, DecodingChoice, Message

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.models.types import Model

DEFAULT_NEW_TOKENS = 256
SETTINGS_CHARACTERS = 2_000  # of a method's settings, written as JSON
CHAIN_LINKS = 4
B = TypeVar("B", ChatBody, CheckBody)


@dataclass(frozen=True)
class ChatRequest:
    """A valid request with its images decoded."""

    messages: Sequence[templates.Message]
    images: Sequence[Image]
    method: Method
    decoding: Decoding
    seed: int = 0
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_chunk: bool = False
    record: Literal["steps", "patches"] | None = None
    objects: tuple[str, ...] | None = None
    check: CheckChoice | None = None
    text: str | None = None  # the text to check in place of the model's answer
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def parse_body(body: bytes, kind: type[B], model: str) -> B:
    """Validate a body that asks for this model; nothing is tokenized or decoded yet.

    Raises:
        ApiError: The body is not valid.
    """
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        acting = [name for name, about in kind.model_fields.items() if about.annotation is not object]
        raise from_validation(error, acting) from None
    if parsed.model != model:
        raise unknown_model(parsed.model, model)
    return parsed


def unknown_model(name: str, served: str) -> ApiError:
    """Return the error for a request to a model that is not served."""
    return ApiError(
        404,
        f"There is no model {printable(name, 100)!r} here; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def read_request(
    chat: ChatBody,
    text: str | None = None,
    *,
    default: Method,
    limits: Limits,
    model: Model | str,
) -> ChatRequest:
    """Turn a valid body into a request that can be decoded.

    Args:
        chat: The body.
        text: A text to check in place of the model's answer.
        default: The method of requests that name none.
        limits: The server's limits.
        model: The model, for the settings recommended for it.

    Raises:
        ApiError: The method or an image cannot be used, or the request asks for too much.
    """
    sources, choice = chat.images, chat.decoding or DecodingChoice()
    length = min(chat.max_completion_tokens or chat.max_tokens or DEFAULT_NEW_TOKENS, limits.new_tokens)
    method = default
    if chat.decoding is not None:
        method = make_method(choice.method or default.name, choice.settings, model)
        if not sources and method.name != "greedy":
            raise ApiError(
                400,
                f"The method {method.name!r} needs an image and this conversation has none: send one, or leave out 'decoding'.",
                param="decoding",
            )
    check_work(method, length, limits)
    if chat.check is not None and not sources:
        raise ApiError(400, "A check needs an image and this conversation has none: send one.", param="check")
    if chat.check is not None and choice.record:
        raise ApiError(400, "A recorded answer cannot be checked: remove 'check' or 'record'.", param="check")
    if choice.record and not (chat.stream and sources):
        raise ApiError(400, "Steps can only be recorded in streamed answers about an image.", param="decoding")
    if choice.record and method.own_beams > 1:
        raise ApiError(
            400,
            f"{method.name} uses beam search, so its steps cannot be recorded: remove 'record'.",
            param="decoding",
        )
    images: list[Image] = []
    for source in sources:
        left = limits.image_pixels - sum(image.width * image.height for image in images)
        images.append(read_source(source, left))
    return ChatRequest(
        messages=[_for_template(message) for message in chat.messages],
        images=images,
        method=method if sources else Greedy(),  # without images every method is plain decoding
        decoding=_decoding(chat, length),
        seed=chat.seed if chat.seed is not None else secrets.randbits(62),
        stop=(chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ()),
        stream=bool(chat.stream),
        usage_chunk=bool(chat.stream and chat.stream_options and chat.stream_options.include_usage),
        record=choice.record,
        objects=None if choice.objects is None else tuple(choice.objects),
        check=chat.check,
        text=text,
    )


def _for_template(message: Message) -> templates.Message:
    content = [
        {"type": "image"} if part.image_url else {"type": "text", "text": part.text or ""} for part in message.parts
    ]
    return {"role": "system" if message.role == "developer" else message.role, "content": content}


def _decoding(chat: ChatBody, length: int) -> Decoding:
    if not chat.temperature:  # greedy: top_p and top_k change nothing
        return Decoding(max_new_tokens=length)
    top_p = None if chat.top_p is None else max(chat.top_p, 1e-6)
    temperature = max(chat.temperature, 1e-5)  # logits divided by less could overflow
    return Decoding(max_new_tokens=length, temperature=temperature, top_p=top_p, top_k=chat.top_k)


def make_method(name: str, settings: Mapping[str, JsonValue], model: Model | str) -> Method:
    """Create the method that a request names.

    Only registered names are accepted: `file.py:Class`, which runs a file, is for the command line.

    Raises:
        ApiError: The name or a setting is wrong.
    """
    if len(json.dumps(settings)) > SETTINGS_CHARACTERS:
        raise ApiError(400, f"The settings have more than {SETTINGS_CHARACTERS:,} characters.", param="decoding")
    try:
        chosen = dict(settings)
        if LIST_OF_METHODS in chosen:
            chosen[LIST_OF_METHODS] = _links(chosen[LIST_OF_METHODS])  # type: ignore[assignment]
        return methods.as_method(_registered(name), model, **chosen)
    except (RevisitError, TypeError, ValueError, OverflowError) as error:
        raise ApiError(400, str(error), param="decoding") from None


def check_work(method: Method, tokens: int, limits: Limits) -> None:
    """Reject a request whose beams do not fit a batch, or that would run more rows than allowed."""
    if method.own_beams > limits.batch:
        raise ApiError(400, f"{method.own_beams} beams; at most {limits.batch} are allowed.", param="decoding")
    links = (method, *getattr(method, LIST_OF_METHODS, ()))
    rows = tokens * method.own_beams * (1 + getattr(method, "candidates", 0))
    rows += sum(getattr(link, "description_tokens", 0) for link in links)
    if rows > limits.work:
        raise ApiError(
            400,
            f"The request could run {rows:,} rows (tokens × beams × (1 + candidates)); at most {limits.work:,} are allowed: "
            "ask for fewer tokens, beams or candidates.",
            param="decoding",
        )


def _links(given: object) -> list[dict[str, object]]:
    """Return the methods of a chain, each a registered name with its settings."""
    entries = parse_links(given) if isinstance(given, str) else parse_list(given)
    if len(entries) > CHAIN_LINKS:
        raise RevisitError(f"The chain has {len(entries):,} methods; at most {CHAIN_LINKS} are allowed.")
    links = []
    for entry in entries:
        name, settings = parse_entry(entry)
        if name == "chain" or LIST_OF_METHODS in settings:
            raise RevisitError("A chain cannot be a link of another; list its methods instead.")
        links.append({**settings, "name": _registered(name)})
    return links


def _registered(name: str) -> str:
    if name not in methods.names():
        raise unknown("method", printable(name, 60), methods.names())
    return name


def read_source(source: str, max_pixels: int) -> Image:
    """Decode the image in a data URI; paths and URLs are never opened."""
    if not source.startswith("data:"):
        raise ApiError(
            400,
            f"An image must be a data URI (data:image/png;base64,…), not {printable(source, 60)!r}; nothing is fetched.",
            param="messages",
        )
    try:
        return image_from_data_uri(source, max_pixels=max_pixels)
    except RevisitError as error:
        raise ApiError(400, str(error), param="messages") from None
