"""From the body of a request to what can be decoded, cheap checks first."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import JsonValue, ValidationError

from revisit import methods
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.methods.greedy import Greedy
from revisit.models import prompts
from revisit.models.images import image_from_data_uri
from revisit.serve.errors import ApiError, from_validation, printable
from revisit.serve.limits import Limits
from revisit.serve.processors import grammar
from revisit.serve.schema import ChatBody, CheckBody, CheckChoice, DecodingChoice, Message

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.models.types import Model

DEFAULT_NEW_TOKENS = 256
SETTINGS_CHARACTERS = 2_000  # of a method's settings, written as JSON


@dataclass(frozen=True)
class ChatRequest:
    """A valid request with its images decoded."""

    messages: Sequence[prompts.Message]
    images: Sequence[Image]
    method: Method
    decoding: Decoding
    seed: int = 0
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_chunk: bool = False
    record: bool = False
    objects: tuple[str, ...] | None = None
    check: CheckChoice | None = None
    text: str | None = None  # the text to check in place of the model's answer
    logprobs: int | None = None  # how many alternatives to list with each token's log-probability
    grammar: str | None = None  # of the answer
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))


def parse_body(body: bytes, kind: type[ChatBody | CheckBody], model: str) -> ChatBody | CheckBody:
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
    """Turn a valid body into a request that can be decoded, or into a check of `text`.

    Raises:
        ApiError: The method or an image cannot be used, or the request asks for too much.
    """
    sources, choice = chat.images, chat.decoding or DecodingChoice()
    length = min(chat.max_completion_tokens or chat.max_tokens or DEFAULT_NEW_TOKENS, limits.new_tokens)
    method = default
    if chat.decoding is not None:
        method = make_method(choice.method or default.name, choice.settings, model)
    named = chat.decoding is not None and method.name != "greedy"
    beams = method.own_beams > 1
    for wrong, param, sentence in (
        (
            named and not sources,
            "decoding",
            f"The method {method.name!r} needs an image; send one, or leave out 'decoding'.",
        ),
        (chat.check and not sources, "check", "A check needs an image; send one."),
        (
            choice.record and not (chat.stream and sources),
            "decoding",
            "Steps can only be recorded in streamed answers about an image.",
        ),
        (
            beams and (chat.logprobs or chat.schema_of_answer is not None),
            "decoding",
            f"{method.name} uses beam search, without 'logprobs' and 'response_format': use another method.",
        ),
        (choice.record and beams, "decoding", f"{method.name} uses beam search, so its steps cannot be recorded."),
    ):
        if wrong:
            raise ApiError(400, sentence, param=param)
    check_work(method, length, limits)
    images: list[Image] = []
    for source in sources:
        left = limits.image_pixels - sum(image.width * image.height for image in images)
        images.append(read_image(source, left))
    return ChatRequest(
        messages=[_for_template(message) for message in chat.messages],
        images=images,
        method=method if sources else Greedy(),  # without images every method is plain decoding
        decoding=_decoding(chat, length),
        seed=chat.seed if chat.seed is not None else secrets.randbits(62),
        stop=tuple(chat.stop or ()),
        stream=bool(chat.stream),
        usage_chunk=bool(chat.stream and chat.stream_options and chat.stream_options.include_usage),
        record=choice.record,
        objects=None if choice.objects is None else tuple(choice.objects),
        check=chat.check,
        text=text,
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        grammar=_grammar(chat.schema_of_answer),
        reasoning_effort=chat.reasoning_effort,
        thinking_budget=chat.thinking_budget,
    )


def reasoning_options(request: ChatRequest, template: str) -> dict[str, object]:
    """Return the variables of a chat template for a request's reasoning; raise RevisitError for a template without them."""
    options: dict[str, object] = {}
    if request.reasoning_effort is not None and "reasoning_effort" in template:
        options["reasoning_effort"] = request.reasoning_effort
    elif request.reasoning_effort is not None and "enable_thinking" in template:
        options["enable_thinking"] = request.reasoning_effort not in ("none", "minimal")
    elif request.reasoning_effort is not None:
        raise RevisitError("This model's chat template has no setting for reasoning: leave out 'reasoning_effort'.")
    if request.thinking_budget is not None and "thinking_budget" not in template:
        raise RevisitError("This model's chat template has no budget for thoughts: leave out 'thinking_budget'.")
    return options if request.thinking_budget is None else {**options, "thinking_budget": request.thinking_budget}


def _grammar(schema: Mapping[str, JsonValue] | None) -> str | None:
    try:
        return None if schema is None else grammar(schema)
    except (RevisitError, ValueError) as error:
        raise ApiError(400, str(error), param="response_format") from None


def _for_template(message: Message) -> prompts.Message:
    content = [
        {"type": "image"} if part.image_url else {"type": "text", "text": part.text or ""} for part in message.content
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

    Raises:
        ApiError: The name or a setting is wrong.
    """
    text = json.dumps([name, settings])
    if len(text) > SETTINGS_CHARACTERS:
        raise ApiError(400, f"The settings have more than {SETTINGS_CHARACTERS:,} characters.", param="decoding")
    if ".py" in text:  # on the command line, `file.py:Class` runs a file
        raise ApiError(400, "A request can only name methods that are registered on the server.", param="decoding")
    try:
        return methods.as_method(name, model, **settings)
    except (RevisitError, TypeError, ValueError, OverflowError) as error:
        raise ApiError(400, str(error), param="decoding") from None


def check_work(method: Method, tokens: int, limits: Limits) -> None:
    """Reject a request whose beams do not fit a batch, or that would run more rows than allowed."""
    if method.own_beams > limits.batch:
        raise ApiError(400, f"{method.own_beams} beams; at most {limits.batch} are allowed.", param="decoding")
    links = getattr(method, "methods", (method,))  # of a chain
    rows = tokens * method.own_beams * (1 + getattr(method, "candidates", 0))
    rows += sum(getattr(link, "description_tokens", 0) for link in links)
    if rows > limits.work:
        raise ApiError(
            400,
            f"The request could run {rows:,} rows (tokens × beams × (1 + candidates)); at most {limits.work:,} are allowed: "
            "ask for fewer tokens, beams or candidates.",
            param="decoding",
        )


def read_image(source: str, max_pixels: int) -> Image:
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
