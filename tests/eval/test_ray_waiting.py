"""How long the Ray engine waits, with a stand-in for Ray whose calls end after some calls of `wait`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines import ray as engine_module
from revisit.eval.engines.ray import RayEngine
from revisit.methods.greedy import Greedy


class Worker:
    """A worker whose calls take a number of waits each."""

    def __init__(self, waits: dict[str, int]) -> None:
        for name, result in {"started": None, "ready": True, "answer": ["an answer"]}.items():
            call = SimpleNamespace(remote=lambda *_, name=name, result=result: Handle(waits[name], result))
            setattr(self, name, call)


class Handle:
    """A call that ends when it has been waited for `left` times."""

    def __init__(self, left: int, result: Any) -> None:
        self.left, self.result = left, result


def wait(handles: Sequence[Handle], num_returns: int, timeout: float) -> tuple[list[Handle], list[Handle]]:
    for handle in handles:
        handle.left -= 1
    return [handle for handle in handles if handle.left < 0][:num_returns], []


def stream(monkeypatch: pytest.MonkeyPatch, waits: dict[str, int]) -> list[Any]:
    errors = SimpleNamespace(
        RayActorError=KeyError, ObjectLostError=KeyError, OutOfMemoryError=KeyError, RayTaskError=OSError
    )
    fake = SimpleNamespace(
        cluster_resources=dict,
        remote=lambda **_: lambda _: SimpleNamespace(remote=lambda *_: Worker(waits)),
        wait=wait,
        get=lambda handle: handle.result,
        kill=lambda _: None,
        exceptions=errors,
        is_initialized=lambda: True,
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(engine_module, "need", lambda _: None)
    engine = RayEngine("tiny", workers=1)
    return list(engine.stream(Greedy(), Decoding(), 0, [[Item("1", "?")], [Item("2", "?")]]))


def test_a_slow_load_and_slow_batches_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream(monkeypatch, {"started": 0, "ready": 5, "answer": 5}) == [["an answer"]] * 2


def test_a_cluster_without_room_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RevisitError, match="No worker has started"):
        stream(monkeypatch, {"started": 5, "ready": 0, "answer": 0})
