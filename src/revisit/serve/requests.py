"""Validate requests, cheap checks first, and decode their images."""

from __future__ import annotations

import gc
import json
import math
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from PIL import Image as pil
from pydantic import JsonValue, ValidationError

from revisit import methods
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, unknown
from revisit.io.images import SCALE, Scale, Size, data_uri_bytes, image_from_data_uri, original_size
from revisit.methods.greedy import Greedy
from revisit.serve.errors import ApiError, excerpt
from revisit.serve.limits import Limits
from revisit.serve.processors import grammar
from revisit.serve.schema import NEUTRAL, ChatBody, CheckBody, DecodingChoice, Group, ImagePart, VideoPart, is_frame
from revisit.video.clip import Video, Visual, pixel_count
from revisit.video.reading import open_video
from revisit.video.sampling import Bounds, Sampling

if TYPE_CHECKING:
    from PIL.Image import Image

    from revisit.decoding.method import Method
    from revisit.guard.rates import Rate
    from revisit.models.types import Model

DEFAULT_NEW_TOKENS = 256
VALUES = 200_000  # in a body
PARSING = threading.Lock()
LARGE = 4_000_000  # pixels
DECODING = threading.Lock()  # one large image at a time: decoding needs several times the memory of its pixels
SETTINGS_CHARACTERS = 2_000  # of a method's settings, written as JSON


@dataclass(frozen=True)
class ChatRequest:
    """A valid request with its images decoded."""

    chat: ChatBody
    images: Sequence[Visual]
    method: Method
    decoding: Decoding
    seed: int = 0
    text: str | None = None  # to check, instead of generating an answer
    grammar: str | None = None  # of the answer
    work: int = 1  # rows that it may run
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def record(self) -> bool:
        """Whether to return the data of the page with the answer."""
        return self.chat.decoding is not None and self.chat.decoding.record


def parse_body(body: bytes | bytearray, kind: type[ChatBody | CheckBody], model: str) -> ChatBody | CheckBody:
    """Validate the body of a request for this model, or raise ApiError; nothing is tokenized or decoded yet."""
    if sum(map(body.count, (b",", b"[", b"{"))) > VALUES:  # before each becomes an object
        raise ApiError(400, f"The request has more than {VALUES:,} values, or commas and brackets.")
    try:
        with PARSING:  # one body at a time, as Python's own lock allows
            gc.disable()  # it would visit the values again and again while their number grows
            try:
                parsed = kind.model_validate_json(body)
            finally:
                gc.enable()
    except ValidationError as error:
        raise _first_error(error, kind) from None
    if parsed.model != model:
        raise unknown_model(parsed.model, model)
    return parsed


def _first_error(error: ValidationError, kind: type[ChatBody | CheckBody]) -> ApiError:
    """Return the first error in a body as a sentence, with a suggestion for an unknown field."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    message = first["msg"].removeprefix("Value error, ").rstrip(".")
    sentence = f"{excerpt(where, 100)}: {message}." if where else f"{message}."
    if first["type"] == "extra_forbidden" and where in NEUTRAL:
        sentence = f"Only {where}={json.dumps(NEUTRAL[where])} is supported; leave out {where!r}."
    elif first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        sentence = str(unknown("request field", excerpt(where, 60), kind.model_fields))
    return ApiError(400, sentence, param=where or None)


def unknown_model(name: str, served: str) -> ApiError:
    """Return the error for a request to a model that is not served."""
    return ApiError(
        404,
        f"There is no model {excerpt(name, 100)!r} here; this server has {served!r}.",
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
    scale: Scale | None = None,
    promised: PromisedServer | None = None,
) -> ChatRequest:
    """Turn a valid body into a request for an answer, or for a check of `text`; raise ApiError if it cannot be fulfilled.

    `scale` is the rule by which images are read smaller.
    """
    sources, choice = chat.visuals, chat.decoding or DecodingChoice()
    usual = DEFAULT_NEW_TOKENS if promised is None else promised.rate.max_new_tokens
    length = min(chat.max_completion_tokens or chat.max_tokens or usual, limits.new_tokens)
    method = default
    if chat.decoding is not None:
        method = make_method(choice.method or default.name, choice.settings, model)
        if not sources and (choice.record or method.name != "greedy"):
            sentence = f"The method {method.name!r} needs an image; send one, or leave out 'decoding'."
            raise ApiError(400, sentence, param="decoding")
    if promised is not None and sources and text is None:
        method = promised.check(chat, method, length)
    if chat.check and not sources:
        raise ApiError(400, "A check needs an image; send one.", param="check")
    if method.own_beams > 1 and (chat.logprobs or chat.answer_schema is not None or chat.check or choice.record):
        unsupported = "'logprobs', 'response_format', 'check' or 'record'"
        sentence = f"{method.name} uses beam search, which does not support {unsupported}; use another method."
        raise ApiError(400, sentence, param="decoding")
    if chat.n > 1 and (chat.check or choice.record or text is not None):
        raise ApiError(400, "'check' and 'record' are for one answer; leave out 'n'.", param="n")
    work = check_work(method, length, chat.n, limits)
    images: list[Visual] = []
    left = limits.image_pixels
    try:
        for parts in sources:  # paths and URLs are never opened
            with ExitStack() as stack:
                images.append(_open(parts, left, limits, partial(_wait_for_turn, stack, scale)))
            opened = images[-1]
            left -= pixel_count(opened) if isinstance(opened, Video) else math.prod(original_size(opened))
    except RevisitError as error:
        raise ApiError(400, str(error), param="messages" if text is None else "image") from None
    return ChatRequest(
        chat,
        images,
        method=method if sources else Greedy(),  # without images, all methods are plain decoding
        decoding=_decoding(chat, length),
        seed=chat.seed if chat.seed is not None else secrets.randbits(62),
        text=text,
        grammar=_grammar(chat.answer_schema),
        work=work if text is None else 1,
    )


def _open(parts: Group, left: int, limits: Limits, scale: Scale) -> Visual:
    """Decode an image, a video, or the frames of a video, with at most `left` pixels."""
    first = parts[0]
    if isinstance(first, VideoPart):
        sampling = Sampling(first.video_url.frames, first.video_url.fps)
        bounds = Bounds(limits.video_seconds, limits.video_frames, left)
        with DECODING:
            return open_video(data_uri_bytes(first.video_url.url, "video", "mp4"), sampling, bounds)
    frames = [part for part in parts if isinstance(part, ImagePart)]
    if not is_frame(first):
        return _pixels(image_from_data_uri(frames[0].image_url.url, max_pixels=left, scale=scale))
    if len(frames) > limits.video_frames:
        raise RevisitError(f"A video has {len(frames)} frames; at most {limits.video_frames} are allowed.")
    each = left // len(frames)
    with DECODING:
        opened = [image_from_data_uri(part.image_url.url, max_pixels=each) for part in frames]
    return Video.of(opened, [part.time or 0.0 for part in frames])


def _wait_for_turn(stack: ExitStack, scale: Scale | None, size: Size) -> int:
    """Return how many times smaller to read an image; a large one waits until no other one is decoded."""
    if math.prod(size) > LARGE:
        stack.enter_context(DECODING)
    return 1 if scale is None else scale(size)


def _pixels(image: Image) -> Image:
    """Return a copy without the file and its metadata, which can be larger than the pixels."""
    copy = pil.new("RGB", image.size)
    copy.paste(image)
    copy.info[SCALE] = image.info[SCALE]
    return copy


def reasoning_options(chat: ChatBody, template: str) -> dict[str, object]:
    """Return the chat template's variables for a request's reasoning; raise ApiError if the template does not use them."""
    options: dict[str, object] = {}
    if (effort := chat.reasoning_effort) is not None:
        if "reasoning_effort" in template:
            options["reasoning_effort"] = effort
        elif "enable_thinking" in template:
            options["enable_thinking"] = effort not in ("none", "minimal")
        else:
            sentence = "This model's chat template has no setting for reasoning; leave out 'reasoning_effort'."
            raise ApiError(400, sentence, param="reasoning_effort")
    if chat.thinking_budget is not None:
        if "thinking_budget" not in template:
            sentence = "This model's chat template has no budget for thoughts; leave out 'thinking_budget'."
            raise ApiError(400, sentence, param="thinking_budget")
        options["thinking_budget"] = chat.thinking_budget
    return options


def _grammar(schema: Mapping[str, JsonValue] | None) -> str | None:
    try:
        return None if schema is None else grammar(schema)
    except (RevisitError, ValueError) as error:
        raise ApiError(400, str(error), param="response_format") from None


def _decoding(chat: ChatBody, length: int) -> Decoding:
    if not chat.temperature:  # greedy: top_p and top_k change nothing
        return Decoding(max_new_tokens=length)
    top_p = None if chat.top_p is None else max(chat.top_p, 1e-6)
    temperature = max(chat.temperature, 1e-5)  # logits divided by less could overflow
    return Decoding(max_new_tokens=length, temperature=temperature, top_p=top_p, top_k=chat.top_k)


@dataclass(frozen=True)
class PromisedServer:
    """A server with `--risk`: requests must agree with what was calibrated."""

    rate: Rate
    any_calibration: bool = False

    def check(self, chat: ChatBody, method: Method, length: int) -> Method:
        """Return the method with its floor; raise ApiError for a request that differs from what was calibrated."""
        plain = not chat.temperature and chat.answer_schema is None
        try:
            chosen = self.rate.settle(method, None, None)[0]
            found = self.rate.call_differences(chosen, chat.question or "several messages", length, plain=plain)
        except RevisitError as error:
            raise ApiError(400, str(error), param="decoding") from None
        if found and not self.any_calibration:
            sentence = (
                f"This server promises a rate of mistakes, and its calibration does not hold here: {'; '.join(found)}."
            )
            raise ApiError(400, sentence, param="decoding")
        return chosen


def make_method(name: str, settings: Mapping[str, JsonValue], model: Model | str) -> Method:
    """Create the method that a request names, or raise ApiError."""
    text = json.dumps([name, settings])
    if len(text) > SETTINGS_CHARACTERS:
        raise ApiError(400, f"The settings have more than {SETTINGS_CHARACTERS:,} characters.", param="decoding")
    if ".py" in text:  # on the command line, `file.py:Class` runs a file
        raise ApiError(400, "A request can only name methods that are registered on the server.", param="decoding")
    names = settings.get("names", [])
    inner = json.dumps({key: value for key, value in settings.items() if key != "names"})
    if "names" in inner or not isinstance(names, list) or not all(isinstance(part, list) for part in names):
        sentence = (
            'The setting names must be a list of lists of words, such as [["dog", "puppy"], ["cat"]].'  # not a file
        )
        raise ApiError(400, sentence, param="decoding")
    try:
        return methods.as_method(name, model, **settings)
    except (RevisitError, TypeError, ValueError, OverflowError) as error:
        raise ApiError(400, str(error), param="decoding") from None


def check_work(method: Method, tokens: int, choices: int, limits: Limits) -> int:
    """Return the rows that a request may run; reject one whose beams or choices do not fit a batch, or with too many rows."""
    for name, rows, param in (("beams", method.own_beams, "decoding"), ("choices", choices, "n")):
        if rows > limits.batch:
            raise ApiError(400, f"{rows} {name}; at most {limits.batch} are allowed.", param=param)
    links = getattr(method, "methods", (method,))  # of a chain
    rows = tokens * choices * method.own_beams * (1 + getattr(method, "candidates", 0))
    rows += sum(getattr(link, "description_tokens", 0) for link in links)
    if rows > limits.work:
        raise ApiError(
            400,
            f"The request could run {rows:,} rows (tokens × choices × beams × (1 + candidates)); at most {limits.work:,} are allowed: "
            "request fewer tokens, choices, beams or candidates.",
            param="decoding",
        )
    return rows
