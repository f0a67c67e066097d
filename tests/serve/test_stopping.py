"""Abandoned work ends in every decoding loop and frees the model for the next request."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from revisit.serve.batcher import Abandoned
from revisit.serve.decoder import stoppable
from revisit.serve.limits import Limits
from servers import Running, messages, serving, started

LIMITS = Limits(seconds=4, new_tokens=200)
OPERA = {"method": "opera", "settings": {"beams": 4, "candidates": 8}}
LONG = [
    pytest.param({"max_tokens": 100, "decoding": OPERA}, id="beams"),
    pytest.param(
        {"max_tokens": 1, "decoding": {"method": "code", "settings": {"description_tokens": 200}}}, id="description"
    ),
    pytest.param({"max_tokens": 200, "decoding": {"method": "greedy"}}, id="tokens"),
]


@pytest.fixture(scope="module")
def slow_server() -> Iterator[Running]:
    """Serve a model that takes at least 50 ms for each forward pass, as a large model does."""
    with serving(LIMITS) as server:
        hook = server.service.decoder.model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        yield server
        hook.remove()


def seconds_until_idle(server: Running) -> float:
    began = time.monotonic()
    while server.service.batcher.running and time.monotonic() - began < 60:
        time.sleep(0.02)
    return time.monotonic() - began


@pytest.mark.parametrize("fields", LONG)
def test_client_that_leaves_frees_the_model(slow_server: Running, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": messages(1), **fields}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow_server.url}/v1/chat/completions", json=body, timeout=httpx.Timeout(1.0, connect=5))
    assert slow_server.post(messages=messages(2), max_tokens=1).status_code == 200
    assert seconds_until_idle(slow_server) < 1


def test_client_that_leaves_a_stream_frees_the_model(slow_server: Running) -> None:
    body = {"model": "tiny", "messages": messages(1), "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{slow_server.url}/v1/chat/completions", json=body, timeout=30) as reply:
        next(reply.iter_lines())
        assert slow_server.service.batcher.running
    assert seconds_until_idle(slow_server) < 1


@pytest.mark.parametrize("fields", LONG)
def test_time_limit_ends_the_work(slow_server: Running, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    assert slow_server.post(messages=messages(1), **fields).status_code == 504
    assert time.monotonic() - began < LIMITS.seconds + 3
    assert seconds_until_idle(slow_server) < 1


def test_abandoned_work_does_not_stop_other_users_of_the_model() -> None:
    model, left = torch.nn.Identity(), SimpleNamespace(abandoned=True)
    with stoppable(model, [left]), ThreadPoolExecutor(1) as other:  # type: ignore[arg-type, list-item]
        assert other.submit(model, 1).result() == 1
        with pytest.raises(Abandoned):
            model(1)


def test_the_tokenizer_is_used_by_the_model_thread_alone(slow_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching padding in one thread makes a fast tokenizer raise "Already borrowed" in another."""
    threads: set[str] = set()
    tokenizer = type(slow_server.service.decoder.processor.tokenizer)
    encode = tokenizer._encode_plus

    def watched(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "_encode_plus", watched)
    assert slow_server.post(messages=messages(1), max_tokens=1).status_code == 200
    assert threads == {"model"}


def test_signals_end_the_process_during_a_beam_search(tmp_path: Path) -> None:
    with started(tmp_path, "--limits", "seconds=60", "--limits", "new_tokens=1000") as (process, url):
        body = {"model": "tiny", "messages": messages(1), "max_tokens": 1000, "decoding": OPERA}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/chat/completions", json=body, timeout=httpx.Timeout(1.5, connect=20))
        process.send_signal(signal.SIGTERM)
        process.wait(15)
