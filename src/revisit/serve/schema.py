"""The OpenAI chat protocol as far as it is supported: the fields of a request.

`GET /v1/schema` returns its JSON schema. Requests for unsupported features are rejected; only fields that change no answer
are ignored.
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

from revisit.explain.checkable import Words, need_words, word_test
from revisit.models import DESCRIBE

FIELDS = 64  # of an object, far more than any has
IMAGES = 8
CHARACTERS = 65_536  # in all texts of a request


def _unless(neutral: object) -> AfterValidator:
    """Accept only the value that has no effect."""

    def check(value: object) -> object:
        if value is not None and value != neutral:
            raise ValueError("this is not supported here; leave it out")
        return value

    return AfterValidator(check)


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


class ImageUrl(Body):
    """An image."""

    url: str = Field(description="A data URI (data:image/png;base64,…).")
    detail: Literal["auto", "low", "high"] | None = Field(None, description="Ignored.")


class Part(Body):
    """A text or an image."""

    type: Literal["text", "image_url"]
    text: str | None = Field(None, description="With type text.")
    image_url: ImageUrl | None = Field(None, description="With type image_url; a string is taken as its url.")

    @field_validator("image_url", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> Part:
        if (self.text is None) == (self.type == "text") or (self.image_url is None) == (self.type == "image_url"):
            raise ValueError(
                'a part must be {"type": "text", "text": …} or {"type": "image_url", "image_url": {"url": …}}'
            )
        return self


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _words(value: object) -> object:
    word_test(value)  # type: ignore[arg-type]
    return _listed(value)


def _checkable(text: str) -> str:
    need_words(text)
    return text


OneOrMore = BeforeValidator(_listed)  # a text alone means a list of one
Name = Annotated[str, Field(max_length=64)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class Message(Body):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant"] = Field(description="developer means system.")
    content: Annotated[list[Part], Field(min_length=1, max_length=64), BeforeValidator(_as_parts)] = Field(
        description="A list of parts, or a text."
    )
    name: object = Field(None, description="Ignored.")
    refusal: None = Field(None, description="As in answers.")
    reasoning_content: object = Field(None, description="Ignored: templates leave out earlier thoughts.")

    @model_validator(mode="after")
    def _only_users_send_images(self) -> Message:
        if self.role in ("system", "developer") and any(part.image_url for part in self.content):
            raise ValueError("images belong in user messages")
        return self


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk of token counts.")
    include_obfuscation: bool | None = Field(None, description="Ignored.")


class DecodingChoice(Body):
    """The decoding method of this request."""

    method: Name | None = Field(default=None, description="A name of `revisit methods`; by default the server's.")
    settings: Annotated[dict[Name, JsonValue], Field(max_length=FIELDS)] = Field(
        default_factory=dict, description="The method's settings, as on the command line or as JSON values."
    )
    record: bool = Field(
        default=False,
        description="Add to every streamed chunk what the method did at that step, where the image's patches are and "
        "which words they encode. On `revisit ui` only.",
    )
    objects: list[Name] | None = Field(
        default=None,
        max_length=64,
        description="With record: the objects in the image, so that words for others are marked.",
    )


class CheckChoice(Body):
    """The words to check, and the support below which they are flagged."""

    words: Annotated[list[Name], Field(max_length=64), BeforeValidator(_words)] = Field(
        default=["objects"], description="objects (CHAIR's words for things), content, or a list of words."
    )
    threshold: float | None = Field(
        default=None, ge=0, le=1, description="Words with less support are flagged; by default the model's own."
    )

    @property
    def chosen(self) -> Words:
        """The words as `revisit.check` takes them."""
        return self.words[0] if self.words in (["objects"], ["content"]) else self.words  # type: ignore[return-value]


class JsonSchema(Body):
    """A JSON schema with its name."""

    name: Name | None = None
    description: str | None = Field(None, description="Ignored.")
    schema_: dict[str, JsonValue] = Field(alias="schema", default_factory=dict)
    strict: bool | None = Field(None, description="Ignored: the answer always follows the schema.")


class ResponseFormat(Body):
    """The form of the answer; all but text need the extra `json` on the server."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise ValueError('the type json_schema, and no other, takes {"json_schema": {"name": …, "schema": {…}}}')
        return self


class ChatBody(Body):
    """The body of POST /v1/chat/completions."""

    model: str = Field(description="The name of the served model.")
    messages: list[Message] = Field(
        min_length=1, max_length=256, description="The conversation; the last message is the user's."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Longest answer, in tokens; the server's limit if it is lower."
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="The same; overrides max_tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 or unset: greedy decoding.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=1, le=1 << 20)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1, description="Makes a sampled answer reproducible.")
    stop: Annotated[list[StopText] | None, Field(max_length=4), OneOrMore] = Field(
        None, description="The answer ends before any of these texts; at most four."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    decoding: DecodingChoice | None = Field(None, description="The decoding method; by default the server's.")
    check: CheckChoice | None = Field(
        None, description="true: add the words of the answer with their support by the image (docs/check.md)."
    )

    logprobs: bool | None = Field(
        None, description="Add each token's log-probability in the method's distribution, before temperature and top_p."
    )
    top_logprobs: int | None = Field(None, ge=0, le=20, description="With logprobs: list this many likeliest tokens.")
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="For models whose chat template has a setting for it; none and minimal turn thoughts off."
    )
    thinking_budget: int | None = Field(
        None, ge=0, le=1 << 20, description="For models whose chat template has a setting for it."
    )

    n: Annotated[object, _unless(1)] = None
    tools: Annotated[object, _unless([])] = None
    tool_choice: Annotated[object, _unless("none")] = None
    frequency_penalty: Annotated[object, _unless(0)] = None
    presence_penalty: Annotated[object, _unless(0)] = None
    logit_bias: Annotated[object, _unless({})] = None
    repetition_penalty: Annotated[object, _unless(1)] = None
    min_p: Annotated[object, _unless(0)] = None

    user: object = Field(None, description="Ignored, like the following.")
    metadata: object = None
    store: object = None

    @field_validator("check", mode="before")
    @classmethod
    def _true_or_false(cls, value: object) -> object:
        return ({} if value else None) if isinstance(value, bool) else value

    @field_validator("messages")
    @classmethod
    def _bounded(cls, messages: list[Message]) -> list[Message]:
        if messages[-1].role != "user":
            raise ValueError("the last message must be the user's")
        parts = [part for message in messages for part in message.content]
        characters, images = sum(len(part.text or "") for part in parts), sum(part.text is None for part in parts)
        if characters > CHARACTERS:
            raise ValueError(f"{characters:,} characters of text; at most {CHARACTERS:,} are allowed")
        if images > IMAGES:
            raise ValueError(f"{images} images; at most {IMAGES} are allowed")
        return messages

    @model_validator(mode="after")
    def _together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError('top_logprobs needs "logprobs": true')
        return self

    @property
    def schema_of_answer(self) -> dict[str, JsonValue] | None:
        """The JSON schema that the answer must follow."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        chosen = self.response_format.json_schema
        return {"type": "object"} if chosen is None else chosen.schema_

    @property
    def images(self) -> list[str]:
        """The URIs of the images, in order of appearance."""
        return [part.image_url.url for message in self.messages for part in message.content if part.image_url]


class CheckBody(CheckChoice):
    """The body of POST /v1/check."""

    model: str = Field(description="The name of the served model.")
    image: Annotated[list[str], Field(min_length=1, max_length=IMAGES), OneOrMore] = Field(
        description="A data URI, or a list of them."
    )
    text: Annotated[str, Field(max_length=CHARACTERS), AfterValidator(_checkable)] = Field(
        description="The text to check."
    )
    prompt: str = Field(
        DESCRIBE, min_length=1, max_length=CHARACTERS, description="The question that the text answers."
    )

    def question(self) -> ChatBody:
        """Return the chat request that the text would answer."""
        images = [{"type": "image_url", "image_url": url} for url in self.image]
        message = {"role": "user", "content": [*images, {"type": "text", "text": self.prompt}]}
        choice = {"words": self.words, "threshold": self.threshold}
        return ChatBody.model_validate({"model": self.model, "messages": [message], "check": choice})
