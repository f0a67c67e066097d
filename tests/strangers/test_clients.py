"""Clients of other projects against `revisit serve`: the texts of `revisit.ask`."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import revisit
from chat_clients import CLIENTS, FORM, QUESTION, Client, chat, turns
from revisit.serve.decoder import Decoder
from servers import data_uri, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    pytest.importorskip("fastapi")
    with serving(decoder=Decoder(*revisit.load("tiny"))) as running:
        yield running


@pytest.fixture(scope="module")
def uri(images: Any) -> str:
    return data_uri(images[1])


@pytest.fixture(params=CLIENTS, ids=lambda connect: connect.__name__)
def client(request: Any, server: Any, uri: str) -> Client:
    return request.param(f"{server.url}/v1", uri)


@pytest.fixture(scope="module")
def reply(server: Any) -> Callable[..., str]:
    """Return a function that sends messages without any client."""

    def reply(messages: list[Any], **fields: Any) -> str:
        return str(server.post(messages=messages, max_tokens=16, **fields).json()["choices"][0]["message"]["content"])

    return reply


def test_text(client: Client, uri: str, reply: Any, images: Any) -> None:
    assert client.answer() == reply(chat(uri, image_first=client.image_first))
    if client.image_first:
        asked = revisit.ask(revisit.load("tiny"), images[1], QUESTION, "revisit", max_new_tokens=16)
        assert client.answer() == str(asked)


def test_stream(client: Client, uri: str, reply: Any) -> None:
    if client.stream is None:
        pytest.skip("the client has no stream")
    parts = [*client.stream()]
    assert "".join(parts) == reply(chat(uri, image_first=client.image_first))
    assert len([part for part in parts if part]) > 1


def test_schema(client: Client, uri: str, reply: Any) -> None:
    assert client.schema is not None
    wanted = reply(chat(uri, image_first=client.image_first), response_format=FORM)
    assert client.schema().model_dump() == json.loads(wanted)


def test_history(client: Client, uri: str, reply: Any) -> None:
    if client.history is None:
        pytest.skip("the client's own conversations are not compared")
    assert client.history() == reply(turns(uri, client.turn))


def test_parallel(client: Client, uri: str, reply: Any) -> None:
    wanted = reply(chat(uri, image_first=client.image_first))
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: client.answer(), range(4))] == [wanted] * 4


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
