"""Chat clients of other projects: how each of them sends a question about an image, and what it returns.

A function takes the address of an API and the URI of an image, and returns the client's own ways to ask. A client without
streams or schemas has no such way.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import PIL.Image
import pydantic
import pytest

QUESTION = "Is there a dog in the image?"
AGAIN = "Is there a cat in the image?"
KEY = "none"
FIELDS: dict[str, Any] = {"model": "tiny", "max_tokens": 16}


class Seen(pydantic.BaseModel):
    """The form of an answer, without a word about other keys."""

    dog: bool


FORM = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": Seen.model_json_schema()}}


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        answer: Ask `QUESTION` about the image, and return the text.
        stream: The same as a stream of texts.
        schema: The same with `Seen` as the form of the answer.
        history: Ask `AGAIN` after `QUESTION` and an answer.
        turn: The content of that answer; null is what an assistant has that only called tools.
        image_first: Whether it sends the image before the question.
    """

    answer: Callable[[], str]
    stream: Callable[[], Iterable[str]] | None = None
    schema: Callable[[], Seen] | None = None
    history: Callable[[], str] | None = None
    turn: str | None = "Yes."
    image_first: bool = True


def chat(uri: str, *, image_first: bool = True) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts if image_first else parts[::-1]}]


def turns(uri: str, turn: str | None) -> list[Any]:
    return [*chat(uri), {"role": "assistant", "content": turn}, {"role": "user", "content": AGAIN}]


def picture(uri: str) -> bytes:
    return base64.b64decode(uri.partition(",")[2])


def _openai(url: str) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=url, api_key=KEY, max_retries=0)


def openai(url: str, uri: str) -> Client:
    client = _openai(url)

    def create(messages: list[Any], **more: Any) -> Any:
        return client.chat.completions.create(messages=messages, **FIELDS, **more)

    def stream() -> Iterator[str]:
        for part in create(chat(uri), stream=True, stream_options={"include_usage": True}):
            yield from (choice.delta.content or "" for choice in part.choices)

    return Client(
        lambda: create(chat(uri)).choices[0].message.content,
        stream,
        lambda: (
            client.chat.completions.parse(messages=chat(uri), response_format=Seen, **FIELDS).choices[0].message.parsed
        ),
        lambda: create(turns(uri, None)).choices[0].message.content,
        turn=None,
    )


def litellm(url: str, uri: str) -> Client:
    library = pytest.importorskip("litellm")

    def complete(messages: list[Any], **more: Any) -> Any:
        options = {"api_base": url, "api_key": KEY, "max_tokens": 16, "num_retries": 0}
        return library.completion("openai/tiny", messages, **options, **more)

    return Client(
        lambda: complete(chat(uri)).choices[0].message.content,
        lambda: (part.choices[0].delta.content or "" for part in complete(chat(uri), stream=True)),
        lambda: Seen.model_validate_json(complete(chat(uri), response_format=Seen).choices[0].message.content),
        lambda: complete(turns(uri, None)).choices[0].message.content,
        turn=None,
    )


def langchain(url: str, uri: str) -> Client:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="tiny", base_url=url, api_key=KEY, max_tokens=16, max_retries=0)
    return Client(
        lambda: model.invoke(chat(uri)).content,
        lambda: (part.content for part in model.stream(chat(uri))),
        lambda: model.with_structured_output(Seen, method="json_schema").invoke(chat(uri)),
        lambda: model.invoke(turns(uri, "Yes.")).content,
    )


def llama_index(url: str, uri: str) -> Client:
    library = pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock

    model = library.OpenAILike(
        model="tiny", api_base=url, api_key=KEY, max_tokens=16, max_retries=0, is_chat_model=True
    )
    first = ChatMessage(role="user", blocks=[ImageBlock(image=picture(uri)), TextBlock(text=QUESTION)])
    rest = [ChatMessage(role="assistant", content="Yes."), ChatMessage(role="user", content=AGAIN)]
    return Client(
        lambda: model.chat([first]).message.content,
        lambda: (part.delta for part in model.stream_chat([first])),
        lambda: Seen.model_validate_json(str(model.chat([first], response_format=FORM).message.content)),
        lambda: model.chat([first, *rest]).message.content,
    )


def inspect_ai(url: str, uri: str) -> Client:
    library = pytest.importorskip("inspect_ai.model")
    import asyncio

    from inspect_ai.util import json_schema

    def generate(*later: Any, **more: Any) -> str:
        config = library.GenerateConfig(max_tokens=16, max_retries=0, **more)
        model = library.get_model("openai/tiny", base_url=url, api_key=KEY, config=config, responses_api=False)
        first = library.ChatMessageUser(content=[library.ContentImage(image=uri), library.ContentText(text=QUESTION)])
        return str(asyncio.run(model.generate([first, *later])).completion)

    form = library.ResponseSchema(name="seen", json_schema=json_schema(Seen))
    rest = library.ChatMessageAssistant(content="Yes."), library.ChatMessageUser(content=AGAIN)
    return Client(
        generate,
        schema=lambda: Seen.model_validate_json(generate(response_schema=form)),
        history=lambda: generate(*rest),
    )


def pydantic_ai(url: str, uri: str) -> Client:
    library = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key=KEY))
    prompt = [library.BinaryContent(picture(uri), media_type="image/png"), QUESTION]
    agent = library.Agent(model, model_settings={"max_tokens": 16})

    return Client(
        lambda: agent.run_sync(prompt).output,
        lambda: agent.run_stream_sync(prompt).stream_text(delta=True, debounce_by=None),
        lambda: agent.run_sync(prompt, output_type=library.NativeOutput(Seen)).output,
    )


def instructor(url: str, uri: str) -> Client:
    library = pytest.importorskip("instructor")
    client = library.from_openai(_openai(url), mode=library.Mode.JSON_SCHEMA)

    def create(messages: list[Any], form: Any = None) -> Any:
        return client.chat.completions.create(messages=messages, response_model=form, max_retries=0, **FIELDS)

    return Client(
        lambda: create(chat(uri)).choices[0].message.content,
        schema=lambda: create(chat(uri), Seen),
        history=lambda: create(turns(uri, None)).choices[0].message.content,
        turn=None,
    )


def llm(url: str, uri: str) -> Client:
    library = pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat

    model = Chat("tiny", key=KEY, model_name="tiny", api_base=url, vision=True, supports_schema=True)
    options = {"attachments": [library.Attachment(type="image/png", content=picture(uri))], "max_tokens": 16}
    return Client(
        lambda: model.prompt(QUESTION, stream=False, **options).text(),
        lambda: model.prompt(QUESTION, **options),
        lambda: Seen.model_validate_json(model.prompt(QUESTION, stream=False, schema=Seen, **options).text()),
        image_first=False,
    )


def dspy(url: str, uri: str) -> Client:
    library = pytest.importorskip("dspy")
    model = library.LM("openai/tiny", api_base=url, api_key=KEY, max_tokens=16, num_retries=0, cache=False)

    def ask(messages: list[Any], **more: Any) -> str:
        (reply,) = model(messages=messages, **more)
        return str(reply["text"] if isinstance(reply, dict) else reply)

    return Client(
        lambda: ask(chat(uri)),
        schema=lambda: Seen.model_validate_json(ask(chat(uri), response_format=Seen)),
        history=lambda: ask(turns(uri, "Yes.")),
    )


def smolagents(url: str, uri: str) -> Client:
    library = pytest.importorskip("smolagents")
    model = library.OpenAIServerModel("tiny", api_base=url, api_key=KEY, max_tokens=16)
    image = PIL.Image.open(io.BytesIO(picture(uri)))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": parts}]
    rest = [
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        {"role": "user", "content": [{"type": "text", "text": AGAIN}]},
    ]
    return Client(
        lambda: model.generate(messages).content,
        lambda: (part.content or "" for part in model.generate_stream(messages)),
        lambda: Seen.model_validate_json(model.generate(messages, response_format=FORM).content),
        lambda: model.generate([*messages, *rest]).content,
    )


def haystack(url: str, uri: str) -> Client:
    library = pytest.importorskip("haystack.components.generators.chat")
    from haystack.dataclasses import ChatMessage, ImageContent
    from haystack.utils import Secret

    first = ChatMessage.from_user(content_parts=[ImageContent(uri.partition(",")[2], mime_type="image/png"), QUESTION])
    rest = [ChatMessage.from_assistant("Yes."), ChatMessage.from_user(AGAIN)]

    def run(*messages: Any, callback: Any = None, **more: Any) -> str:
        generator = library.OpenAIChatGenerator(
            api_key=Secret.from_token(KEY),
            model="tiny",
            api_base_url=url,
            max_retries=0,
            streaming_callback=callback,
            generation_kwargs={"max_tokens": 16, **more},
        )
        return str(generator.run([*messages])["replies"][0].text)

    def stream() -> list[str]:
        parts: list[str] = []
        run(first, callback=lambda part: parts.append(part.content))
        return parts

    return Client(
        lambda: run(first),
        stream,
        lambda: Seen.model_validate_json(run(first, response_format=Seen)),
        lambda: run(first, *rest),
    )


def outlines(url: str, uri: str) -> Client:
    library = pytest.importorskip("outlines")
    model = library.from_openai(_openai(url), "tiny")
    image = PIL.Image.open(io.BytesIO(picture(uri)))
    prompt = [QUESTION, library.Image(image)]
    return Client(
        lambda: model(prompt, max_tokens=16),
        lambda: model.stream(prompt, max_tokens=16),
        lambda: Seen.model_validate_json(model(prompt, Seen, max_tokens=16)),
        image_first=False,
    )


CLIENTS = (
    openai,
    litellm,
    langchain,
    llama_index,
    inspect_ai,
    pydantic_ai,
    instructor,
    llm,
    dspy,
    smolagents,
    haystack,
    outlines,
)
