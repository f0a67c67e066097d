"""From the body of a chat request to a request that can be decoded, cheap checks first."""

from __future__ import annotations

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
from revisit.registry import LIST_OF_METHODS, parse_entry, parse_list, without_brackets
from revisit.serve.errors import ApiError, from_validation, quoted, shorten
from revisit.serve.limits import Limits
from revisit.serve.schema import ChatBody, CheckBody, CheckChoice, DecodingChoice, Message

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.models.types import Model

Settings = Mapping[str, JsonValue]
B = TypeVar("B", ChatBody, CheckBody)


@dataclass(frozen=True)
class ChatRequest:
    """A request that passed every check, with its images decoded."""

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
    text: str | None = None  # what is to be checked; None: what the model answers
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def parse_chat(body: bytes, model: str, limits: Limits) -> ChatBody:
    """The body as a chat request for this model, within the limits; nothing is tokenized or decoded yet.

    Raises:
        ApiError: The request is refused.
    """
    chat = _validated(body, ChatBody, model, limits)
    check_sizes(chat, limits)
    return chat


def parse_check(body: bytes, model: str, limits: Limits) -> tuple[ChatBody, str]:
    """The body of a check as the chat request that the text would answer, and the text; refused like `parse_chat`."""
    asked = _validated(body, CheckBody, model, limits)
    chat = asked.question()
    check_sizes(chat, limits, asked.text)
    return chat, asked.text


def _validated(body: bytes, kind: type[B], model: str, limits: Limits) -> B:
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > limits.json_values:
        raise ApiError(400, f"The request has more than the {limits.json_values:,} commas and brackets allowed.")
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        fields = kind.model_fields.items()  # of type object: not supported, or of no effect
        raise from_validation(error, [name for name, field in fields if field.annotation is not object]) from None
    if asked.model != model:
        raise unknown_model(asked.model, model)
    return asked


def unknown_model(name: str, served: str) -> ApiError:
    """The error for a request to another model than the served one."""
    return ApiError(
        404,
        f"There is no model {quoted(name)} here; this server has {served!r}.",
        param="model",
        code="model_not_found",
    )


def check_sizes(chat: ChatBody, limits: Limits, text: str = "") -> None:
    """Counts and lengths within the limits, or `ApiError`."""
    parts = [part for message in chat.messages for part in message.parts]
    sources = image_sources(chat)
    longest = max((len(message.parts) for message in chat.messages), default=0)
    for count, most, what in (
        (len(chat.messages), limits.messages, "messages"),
        (longest, limits.parts, "parts in one message"),
        (sum(len(part.text or "") for part in parts) + len(text), limits.characters, "characters of text"),
        (len(sources), limits.images, "images"),
    ):
        if count > most:
            raise ApiError(400, f"The request has {count:,} {what}; at most {most:,} are allowed.", param="messages")


def check_settings(settings: Settings, limits: Limits) -> None:
    """Settings of bounded number, length and depth."""
    values, waiting = 0, [(value, 0) for value in settings.values()]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        if values + len(inner) > limits.settings or depth > 4:
            raise ApiError(
                400,
                f"The method's settings hold more than {limits.settings} values or are nested too deeply.",
                param="decoding",
            )
        if isinstance(value, str) and len(value) > limits.setting_characters:
            raise ApiError(
                400,
                f"A setting has {len(value):,} characters; at most {limits.setting_characters:,} are allowed.",
                param="decoding",
            )
        waiting += [(item, depth + 1) for item in inner]


def image_sources(chat: ChatBody) -> list[str]:
    """The images' URIs in order of appearance."""
    return [part.image_url.url for message in chat.messages for part in message.parts if part.image_url]


def read_request(
    chat: ChatBody,
    text: str | None = None,
    *,
    default: Method,
    limits: Limits,
    model: Model | str,
) -> ChatRequest:
    """A checked body as a request that can be decoded.

    Args:
        chat: The body.
        text: What is to be checked in place of the model's answer, if anything.
        default: The method of requests that name none.
        limits: The server's limits.
        model: The model, for the settings recommended for it.
    """
    sources, choice = image_sources(chat), chat.decoding or DecodingChoice()
    method = default
    if chat.decoding is not None:
        method = make_method(choice.method or default.name, choice.settings, limits, model)
        if not sources and method.name != "greedy":
            raise ApiError(
                400,
                f"The method {method.name!r} needs an image and this conversation has none: send one, or leave out 'decoding'.",
                param="decoding",
            )
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
        left = limits.request_pixels - sum(image.width * image.height for image in images)
        images.append(read_source(source, min(limits.image_pixels, left)))
    length = min(chat.max_completion_tokens or chat.max_tokens or limits.default_new_tokens, limits.new_tokens)
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


def make_method(name: str, settings: Settings, limits: Limits, model: Model | str) -> Method:
    """The method that a request asks for.

    Only methods that this process knows by name: `file.py:Class`, which runs a file, is for the command line.

    Raises:
        ApiError: The name or a setting is wrong.
    """
    check_settings(settings, limits)
    try:
        name, own = parse_entry(name)
        chosen = {**own, **settings}
        if LIST_OF_METHODS in chosen:
            chosen[LIST_OF_METHODS] = _links(chosen[LIST_OF_METHODS], limits)
        method = methods.as_method(_known(name), model, **chosen)
        for link in (method, *getattr(method, LIST_OF_METHODS, ())):
            _check_work(link, limits)
        return method
    except (RevisitError, TypeError, ValueError, OverflowError) as error:
        raise ApiError(400, _without_long_values(str(error), settings), param="decoding") from None


def _check_work(method: Method, limits: Limits) -> None:
    """Refuse methods that would write more tokens of their own than an answer may have."""
    field = type(method).model_fields.get("description_tokens")
    own, usual = (0, 0) if field is None else (getattr(method, "description_tokens", 0), field.default)
    if own > max(limits.new_tokens, usual):
        raise RevisitError(f"description_tokens must be at most {max(limits.new_tokens, usual)}, not {own}.")


def _links(given: object, limits: Limits) -> list[dict[str, object]]:
    """The methods of a chain, each a known name and its settings."""
    entries = parse_list(
        without_brackets(given) if isinstance(given, str) else given, lambda name: name in methods.names()
    )
    if len(entries) > limits.chain_links:
        raise RevisitError(f"The chain has {len(entries):,} methods; at most {limits.chain_links} are allowed.")
    links = []
    for entry in entries:
        name, settings = parse_entry(entry)
        if name == "chain" or LIST_OF_METHODS in settings:
            raise RevisitError("A chain cannot be a link of another; list its methods instead.")
        links.append({**settings, "name": _known(name)})
    return links


def _known(name: str) -> str:
    if name not in methods.names():
        raise unknown("method", shorten(name, 100), methods.names())
    return name


def _without_long_values(message: str, settings: Settings) -> str:
    for value in settings.values():
        if len(text := repr(value)) > 100:
            message = message.replace(text, quoted(value))
    return shorten(message, 600)


def read_source(source: str, max_pixels: int) -> Image:
    """The image in a data URI; never a file of the server, and nothing is fetched."""
    if not source.startswith("data:"):
        raise ApiError(
            400,
            f"An image must be a data URI (data:image/png;base64,…), not {quoted(source)}; nothing is fetched.",
            param="messages",
        )
    try:
        return image_from_data_uri(source, max_pixels=max_pixels)
    except RevisitError as error:
        raise ApiError(400, shorten(str(error), 400), param="messages") from None
