"""Clients of other projects against `revisit serve`: the texts of `revisit.ask`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import revisit
from revisit.serve.decoder import Decoder
from servers import data_uri, serving

QUESTION = "Is there a dog in the image?"
KEY = "none"
ROOT = Path(__file__).parents[2]
SCHEMA = {
    "type": "object",
    "properties": {"dog": {"type": "boolean"}},
    "required": ["dog"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("fastapi")
    with serving(decoder=Decoder(*revisit.load("tiny"))) as running:
        yield running


@pytest.fixture(scope="module")
def expected(images: Any) -> str:
    pair = revisit.load("tiny")
    return str(revisit.ask(pair, images[1], QUESTION, "revisit", max_new_tokens=16))


@pytest.fixture(scope="module")
def uri(images: Any) -> str:
    return data_uri(images[1])


def chat(uri: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def openai(server: Any) -> Any:
    library = pytest.importorskip("openai")
    return library.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def test_openai(server: Any, uri: str, expected: str) -> None:
    client, fields = openai(server), {"model": "tiny", "max_tokens": 16}
    (choice,) = client.chat.completions.create(messages=chat(uri), **fields).choices
    assert choice.message.content == expected
    parts = client.chat.completions.create(messages=chat(uri), stream=True, **fields)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected
    turns = [*chat(uri), {"role": "assistant", "content": expected}, {"role": "user", "content": QUESTION}]
    assert client.chat.completions.create(messages=turns, **fields).choices[0].message.content


def test_openai_with_a_schema(server: Any, uri: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "seen", "strict": True, "schema": SCHEMA}}
    reply = openai(server).chat.completions.create(
        model="tiny", messages=chat(uri), max_tokens=16, response_format=form
    )
    assert set(json.loads(reply.choices[0].message.content)) == {"dog"}


def test_litellm(server: Any, uri: str, expected: str) -> None:
    library = pytest.importorskip("litellm")
    reply = library.completion(
        "openai/tiny", chat(uri), api_base=f"{server.url}/v1", api_key=KEY, max_tokens=16, num_retries=0
    )
    assert reply.choices[0].message.content == expected


def test_langchain(server: Any, uri: str, expected: str) -> None:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key=KEY, max_tokens=16, max_retries=0)
    assert model.invoke(chat(uri)).content == expected
    assert "".join(part.content for part in model.stream(chat(uri))) == expected
    assert [reply.content for reply in model.batch([chat(uri)] * 4)] == [expected] * 4


def test_instructor(server: Any, uri: str) -> None:
    library = pytest.importorskip("instructor")
    from pydantic import BaseModel, ConfigDict

    class Seen(BaseModel):
        model_config = ConfigDict(extra="forbid")
        dog: bool

    client = library.from_openai(openai(server), mode=library.Mode.JSON_SCHEMA)
    seen = client.chat.completions.create(
        model="tiny", messages=chat(uri), response_model=Seen, max_tokens=16, max_retries=0
    )
    assert isinstance(seen.dog, bool)


def test_inspect_ai(server: Any, uri: str, expected: str) -> None:
    library = pytest.importorskip("inspect_ai.model")
    config = library.GenerateConfig(max_tokens=16, max_retries=0)
    model = library.get_model(
        "openai/tiny", base_url=f"{server.url}/v1", api_key=KEY, config=config, responses_api=False
    )
    parts = [library.ContentImage(image=uri), library.ContentText(text=QUESTION)]
    reply = asyncio.run(model.generate([library.ChatMessageUser(content=parts)]))
    assert reply.completion == expected


def test_pydantic_ai(server: Any, images: Any, expected: str) -> None:
    library = pytest.importorskip("pydantic_ai")
    import io

    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    file = io.BytesIO()
    images[1].save(file, "PNG")
    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key=KEY))
    agent = library.Agent(model, model_settings={"max_tokens": 16})
    image = library.BinaryContent(file.getvalue(), media_type="image/png")
    assert agent.run_sync([image, QUESTION]).output == expected


@pytest.mark.skipif(find_spec("litellm") is None, reason="run by make test-strangers, because it starts another server")
def test_transformers_serve_with_the_folder_for_custom_generate(
    images: Any, uri: str, tmp_path: Path, answer: Any
) -> None:
    """A chat without an image is decoded plainly, and one with an image by ReVisiT."""
    httpx, pair = pytest.importorskip("httpx"), revisit.load("tiny")
    for part in pair:
        part.save_pretrained(tmp_path / "tiny")
    shutil.copytree(ROOT / "hub" / "custom_generate", tmp_path / "tiny" / "custom_generate")
    command = [Path(sys.executable).with_name("transformers"), "serve", tmp_path / "tiny", "--trust-remote-code"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"

    def ask(content: Any) -> str:
        fields = {"model": str(tmp_path / "tiny"), "max_tokens": 16, "messages": [{"role": "user", "content": content}]}
        reply = httpx.post(f"{address}/v1/chat/completions", json=fields, timeout=120)
        return str(reply.json()["choices"][0]["message"]["content"])

    with subprocess.Popen([*command, "--device", "cpu", "--port", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    httpx.get(f"{address}/health", timeout=5)
                    break
                assert server.poll() is None
                time.sleep(0.2)
            parts = [chat(uri)[0]["content"][0], {"type": "text", "text": "Please describe this image in detail."}]
            assert ask(parts) == answer(pair, "revisit", images[1:])[0]
            assert ask("Hello there!")
        finally:
            server.kill()
