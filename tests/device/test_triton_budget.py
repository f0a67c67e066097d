"""The Triton step leaves nothing to torch. Its kernels are counted and not run. Run by `make test-triton`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import fake_cuda
import pytest
import torch

import families
import revisit
from revisit import methods

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1" or fake_cuda.unavailable() is not None:
    pytest.skip("needs the test device, and Triton without its interpreter", allow_module_level=True)

from test_vllm_budget import Server

from revisit.step import triton as kernels

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    fake_cuda.load()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the names of the launched kernels."""
    names: list[str] = []
    monkeypatch.setattr(kernels.Launch, "run", lambda launch: names.append(launch.kernel.__name__))
    monkeypatch.setattr(kernels, "works", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return names


@pytest.mark.parametrize(("requests", "drafts"), [(1, 0), (8, 0), (64, 0), (8, 3)])
def test_a_step_of_vllm_is_seven_kernels_and_no_wait(requests: int, drafts: int, launched: list[str]) -> None:
    server = Server(requests, "cuda:0")
    for number in range(3):
        launched.clear()
        server.decode(number, drafts)
        assert len(launched) == 7
        assert server.log.kernels == 0, server.log.places("kernel")
        assert server.log.waits == 0, server.log.places("wait")
    if requests > 1:  # the batch changes: its block table is sent, and the host does not wait for that either
        server.worker.remove("0")
        del server.prompts["0"]
        server.decode(3, drafts)
        assert server.log.waits == 0, server.log.places("wait")
        assert server.log.kernels == 0, server.log.places("kernel")
    assert not server.worker.take_failed()


@pytest.mark.parametrize("items", [1, 8])
def test_a_step_of_transformers_is_seven_kernels_and_no_wait(items: int, launched: list[str]) -> None:
    """Compare with the device calls of plain decoding."""
    model = families.build("llava")[0].to("cuda:0")
    inputs = families.inputs("llava", ["what is it?"] * items, [[families.image(n)] for n in range(items)])
    moved = {name: value.to("cuda:0") for name, value in inputs.items()}
    counts: dict[str, list[float]] = {}
    for name in ("greedy", "revisit"):
        logs = []
        for new in (3, 12):
            launched.clear()
            with fake_cuda.Log() as log:
                options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
                revisit.generate(model, **moved, method=methods.as_method(name, model), **options)
            logs.append((log.kernels, log.waits, len(launched)))
        counts[name] = [(many - few) / 9 for few, many in zip(*logs, strict=True)]
    assert counts["revisit"][2] == 7
    assert counts["revisit"][:2] == counts["greedy"][:2]
