"""A server that many tests share, and OpenAI's client for it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from revisit.methods.revisit import ReVisiT
from revisit.serve.limits import Limits
from servers import Running, serving


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    limits = Limits(body_bytes=200_000, prompt_tokens=150, new_tokens=40, batch=8)
    with serving(limits, ReVisiT(alpha=0.01)) as server:
        yield server


@pytest.fixture(scope="session")
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
