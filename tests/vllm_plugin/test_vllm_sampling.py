"""vLLM's own top-p kernel on refined rows, in Triton's interpreter. Run by `make test-vllm`."""

from __future__ import annotations

import builtins
import importlib.util
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    pytest.skip("needs vLLM and Triton's interpreter: run `make test-vllm`", allow_module_level=True)

from triton.runtime import interpreter
from vllm.v1.sample.ops import topk_topp_triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from revisit.vllm.head import ShardedHead
from revisit.vllm.plan import Plan
from revisit.vllm.worker import Worker

IMAGE, WIDTH, VOCABULARY, ROWS = 9, 16, 9000, 96


def loop_range(*bounds: Any) -> Iterable[Any]:
    """Yield tensors where the bounds are tensors, as in a compiled kernel; the interpreter yields whole numbers."""
    numbers = builtins.range(*bounds)
    return (bounds[0] * 0 + number for number in numbers) if hasattr(bounds[0], "handle") else numbers


def test_top_p_keeps_the_tokens_that_sorting_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more than 64 rows vLLM uses a kernel that has no room for tokens far below the others."""
    monkeypatch.setattr(interpreter, "range", loop_range, raising=False)
    monkeypatch.setattr(topk_topp_triton, "num_compute_units", lambda *_: 4)
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, WIDTH)
    described = SimpleNamespace(config=SimpleNamespace(model_type="llava"))
    worker = Worker(
        Plan((IMAGE,), 2, False, WIDTH, torch.float32, ROWS, 64, described), "cpu", lambda: ShardedHead(weight)
    )
    names = [str(row) for row in range(ROWS)]
    for name in names:
        worker.add(name, SimpleNamespace(extra_args={"revisit": {"alpha": 1e-3}}), [IMAGE, IMAGE])
    worker.begin(names, [0] * ROWS, [2] * ROWS)
    hidden = torch.randn(2 * ROWS, WIDTH)
    worker.observe(hidden, [])
    refined = worker.refine(hidden[1::2] @ weight.T, hidden[1::2])
    top_p = torch.full((ROWS,), 0.8)
    top_p[5] = 1.0  # a greedy row
    wanted = apply_top_k_top_p_pytorch(refined.clone(), None, top_p).isfinite().sum(-1)
    got = topk_topp_triton.apply_top_k_top_p_triton(refined.clone(), None, top_p).isfinite().sum(-1)
    assert got.tolist() == wanted.tolist()
    assert int(wanted[5]) > int(wanted[:5].min()) > 0
