"""The fields of the OpenAI chat protocol that the server supports.

Requests for unsupported features are rejected; only fields that change no answer are ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from revisit.explain.checkable import need_words
from revisit.models import DESCRIBE, prompts
from revisit.serve.errors import ApiError

FIELDS = 64  # in one object; valid ones have far fewer
IMAGES = 8
CHARACTERS = 65_536  # in all texts of a request
CHOICES = 16
IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
}
# Clients send these although they change nothing; any other value is rejected.
NEUTRAL: dict[str, object] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "chat_template_kwargs": {},
    "skip_special_tokens": True,
    "stop_token_ids": [],
    "ignore_eos": False,
}
# Of tool calls: what each field may be without asking for one; None for any value.
WITHOUT_TOOLS: dict[str, tuple[object, ...] | None] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": None,
}
NO_TOOLS = (
    "This server does not support tools; for an answer in a fixed form, use 'response_format' with a JSON schema."
)


class Body(BaseModel):
    """Strict JSON: no unknown fields, no numbers in strings, no infinite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: object) -> object:
        """Reject large objects before pydantic collects an error for each of their fields."""
        if isinstance(value, dict) and len(value) > FIELDS:
            raise ValueError(f"an object has {len(value):,} fields; at most {FIELDS} are allowed")
        return value


def _words(value: object) -> object:
    if value not in ("objects", "content") and not (isinstance(value, list) and value):
        raise ValueError("words must be 'objects', 'content' or a list of words")
    return value


OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)  # a string is a list of one
Name = Annotated[str, Field(max_length=64)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class ImageUrl(Body, extra="ignore"):
    """An image; `detail` is ignored."""

    url: str  # a data URI


class VideoUrl(Body, extra="ignore"):
    """A video, and which of its frames to take."""

    url: str  # a data URI
    frames: int | None = None
    fps: float | None = None


class TextPart(Body, extra="ignore"):
    """A text; other fields, such as `cache_control`, are ignored."""

    type: Literal["text"]
    text: str


class ImagePart(Body, extra="ignore"):
    """An image, or with a time in seconds, a frame of a video; other fields are ignored."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]
    time: Annotated[float, Field(ge=0)] | None = None


class VideoPart(Body, extra="ignore"):
    """A video; other fields are ignored."""

    type: Literal["video_url"]
    video_url: Annotated[VideoUrl, BeforeValidator(lambda value: {"url": value} if isinstance(value, str) else value)]


Part = Annotated[TextPart | ImagePart | VideoPart, Field(discriminator="type")]
# The parts of one text, image or video: consecutive images with times are the frames of one video.
Group = list[TextPart | ImagePart | VideoPart]


def is_frame(part: object) -> bool:
    """Return whether a part is a frame of a video."""
    return isinstance(part, ImagePart) and part.time is not None


class ChatMessage(Body, extra="ignore"):
    """One turn of the conversation; `name`, and the other fields of an assistant's message, are ignored."""

    role: Literal["system", "developer", "user", "assistant"]  # developer means system
    content: Annotated[
        list[Part],
        Field(min_length=1, max_length=64),
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ]

    @model_validator(mode="before")
    @classmethod
    def _without_tools(cls, value: object) -> object:
        role = value.get("role") if isinstance(value, dict) else None
        if role in ("tool", "function"):
            raise ApiError(400, NO_TOOLS, param="messages")
        if (
            isinstance(value, dict) and role == "assistant" and value.get("content") in (None, [])
        ):  # it only called tools
            return {**value, "content": ""}
        return value

    @property
    def groups(self) -> list[Group]:
        """The parts of each text, image and video, in order."""
        groups: list[Group] = []
        for part in self.content:
            if is_frame(part) and groups and is_frame(groups[-1][-1]):
                groups[-1].append(part)
            else:
                groups.append([part])
        return groups

    def for_template(self) -> prompts.Message:
        """Return the message in the form that chat templates expect."""
        content = []
        for part, *_ in self.groups:
            video = isinstance(part, VideoPart) or is_frame(part)
            shown = {"type": "video" if video else "image"}
            content.append({"type": "text", "text": part.text} if isinstance(part, TextPart) else shown)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(Body, extra="ignore"):
    """Options of a streamed answer."""

    include_usage: bool | None = None  # end the stream with a chunk of token counts


class DecodingChoice(Body):
    """The decoding method of a request."""

    method: Name | None = None
    settings: Annotated[dict[Name, JsonValue], Field(max_length=FIELDS)] = Field(default_factory=dict)
    record: bool = False  # return the data of the page in `decoding`; only `revisit ui` allows it
    objects: list[Name] | None = Field(default=None, max_length=64)  # in the image; the page marks other objects


def _choice(value: object) -> object:
    """Take the name of a method for the method alone."""
    return {"method": value} if isinstance(value, str) else value


class CheckChoice(Body):
    """The words to check, and the support below which they are flagged."""

    words: Annotated[
        Annotated[list[Name], Field(max_length=64)] | Literal["objects", "content"], BeforeValidator(_words)
    ] = "objects"
    threshold: float | None = Field(default=None, ge=0, le=1)


class JsonSchema(Body, extra="ignore"):
    """A JSON schema; the answer always follows it, so `strict` is ignored."""

    schema_: dict[str, JsonValue] = Field(alias="schema", default_factory=dict)


class ResponseFormat(Body):
    """The form of the answer; all but text need the extra `json` on the server."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError('"json_schema" is needed with type "json_schema", and only then')
        return self


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, max_length=256)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)  # overrides max_tokens
    temperature: float | None = Field(None, ge=0, le=2)  # 0 or unset: greedy decoding
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Annotated[
        int | None, Field(ge=1, le=1 << 20), BeforeValidator(lambda value: None if value in (0, -1) else value)
    ] = None
    n: int = Field(1, ge=1, le=CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    stop: Annotated[
        list[StopText] | None, Field(max_length=4), OneOrMore, BeforeValidator(lambda value: value or None)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    decoding: Annotated[DecodingChoice | None, BeforeValidator(_choice)] = None
    check: CheckChoice | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_budget: int | None = Field(None, ge=0, le=1 << 20)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        given = {name: field for name, field in value.items() if field is not None and name not in IGNORED}
        for name, allowed in WITHOUT_TOOLS.items():
            if given.pop(name, None) not in (None, *(allowed or ())) and allowed:
                raise ApiError(400, NO_TOOLS, param=name)
        return {name: field for name, field in given.items() if name not in NEUTRAL or field != NEUTRAL[name]}

    @field_validator("check", mode="before")
    @classmethod
    def _true_or_false(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value

    @field_validator("messages")
    @classmethod
    def _bounded(cls, messages: list[ChatMessage]) -> list[ChatMessage]:
        if messages[-1].role != "user":
            raise ValueError("the last message must be the user's")
        texts = [part.text for message in messages for part in message.content if isinstance(part, TextPart)]
        characters, images = sum(map(len, texts)), sum(len(message.content) for message in messages) - len(texts)
        if characters > CHARACTERS:
            raise ValueError(f"{characters:,} characters of text; at most {CHARACTERS:,} are allowed")
        if images > IMAGES:
            raise ValueError(f"{images} images; at most {IMAGES} are allowed")
        return messages

    @model_validator(mode="after")
    def _complete_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError('top_logprobs needs "logprobs": true')
        return self

    @property
    def answer_schema(self) -> dict[str, JsonValue] | None:
        """The JSON schema that the answer must follow."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        chosen = self.response_format.json_schema
        return {"type": "object"} if chosen is None else chosen.schema_

    @property
    def question(self) -> str | None:
        """The text of the only message; None if there are several."""
        if len(self.messages) > 1:
            return None
        return "".join(part.text for part in self.messages[0].content if isinstance(part, TextPart)).strip()

    def without_messages(self) -> ChatBody:
        """Return a copy for the queue, which need not hold texts and encoded images."""
        return self.model_copy(update={"messages": []})

    @property
    def visuals(self) -> list[Group]:
        """The parts of each image and video, in order of appearance."""
        groups = [group for message in self.messages for group in message.groups]
        return [group for group in groups if not isinstance(group[0], TextPart)]


class CheckBody(CheckChoice):
    """The body of POST /v1/check."""

    model: str
    image: Annotated[list[str], Field(min_length=1, max_length=IMAGES), OneOrMore]
    text: Annotated[str, Field(max_length=CHARACTERS), AfterValidator(need_words)]
    prompt: str = Field(DESCRIBE, min_length=1, max_length=CHARACTERS)

    def question(self) -> ChatBody:
        """Return the chat request that the text would answer."""
        images = [{"type": "image_url", "image_url": url} for url in self.image]
        message = {"role": "user", "content": [*images, {"type": "text", "text": self.prompt}]}
        choice = {"words": self.words, "threshold": self.threshold}
        return ChatBody.model_validate({"model": self.model, "messages": [message], "check": choice})
