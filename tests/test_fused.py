"""The kernel for GPUs, in Triton's interpreter, equals the reference; and Triton's compiler accepts it for GPUs that are not here."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import families
import revisit
from revisit import ReVisiT, RevisitError, accelerator, core
from revisit.engine import Batch, Rule
from test_engine import VOCABULARY, Rows, some_logits

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, about NaN, in the interpreter
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make test-fused")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, switched on, with a count of its calls."""
    monkeypatch.setenv("REVISIT_FUSED", "1")
    from revisit import fused

    whole = fused.divergences

    def counted(*arguments: Any) -> torch.Tensor:
        fused.calls += 1
        return whole(*arguments)

    monkeypatch.setattr(fused, "calls", 0, raising=False)
    monkeypatch.setattr(fused, "divergences", counted)
    return fused


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "width", "sizes"), [(1, 16, (2, 3)), (37, 33, (1, 5, 64)), (70, 48, (65, 128, 200)), (32, 96, (200, 63))]
)
def test_divergences_are_those_of_the_reference(
    fused: Any, dtype: torch.dtype, rows: int, width: int, sizes: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, width, generator=generator).to(dtype)
    head = torch.randn(300, width, generator=generator).to(dtype)
    if rows > 32:
        states[3], states[33, 0], states[35] = math.nan, math.inf, 0
    ids = torch.stack([torch.randperm(300, generator=generator)[:200] for _ in sizes])
    log_p = torch.full((len(sizes), 200), -math.inf)
    for row, size in enumerate(sizes):
        log_p[row, :size] = (4 * torch.randn(size, generator=generator)).log_softmax(-1)
    got = fused.divergences(states, head, ids, log_p, torch.tensor(sizes))
    for row, size in enumerate(sizes):
        logits = states.float() @ head[ids[row, :size]].float().T
        expected = core.compare(log_p[row, :size], logits, "jsd", False)
        assert expected.isnan().sum() == (2 if rows > 32 else 0)
        torch.testing.assert_close(got[row], expected, atol=2e-6, rtol=1e-5, equal_nan=True)


@needs_triton
def test_a_batch_equals_the_reference(fused: Any) -> None:
    visions = [Rows(40, seed=1), Rows(0), Rows(30, seed=2)]
    logits = some_logits(0, 3.0, rows=6)
    logits[5] *= 20  # a single plausible token
    got = Batch(visions, Rule(1e-3), copies=2).refine_without_waiting(logits, 0.0)
    assert fused.calls == 2
    for row in range(6):
        expected = Rule(1e-3).reference(logits[row], visions[row // 2])
        if row in (2, 3):
            assert torch.equal(got.scores[row], logits[row])
        else:
            torch.testing.assert_close(got.scores[row], core.scatter(expected, VOCABULARY), atol=1e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("extra", [{}, {"num_beams": 2}], ids=str)
def test_it_decodes_the_same(fused: Any, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = families.build("llava")
    inputs = families.inputs("llava", ["hi", "what is it?"], [[families.picture(0)], [families.picture(1)]])
    options = {"method": ReVisiT(alpha=1e-2, layers="all"), "max_new_tokens": 4, "do_sample": False, **extra}
    expected = revisit.generate(model, **inputs, **options)
    assert fused.calls == 0
    monkeypatch.setattr(accelerator, "waiting_is_free", lambda _: False)
    assert torch.equal(revisit.generate(model, **inputs, **options), expected)
    assert fused.calls == 4 * 2


@needs_triton
@pytest.mark.parametrize("rule", [Rule(1e-2, divergence="kl"), Rule(1e-2, model_dtype=True)], ids=str)
def test_other_settings_go_another_way(fused: Any, rule: Rule) -> None:
    vision, logits = Rows(20), some_logits(1, 2.0)
    got = Batch([vision], rule, copies=1).refine_without_waiting(logits, 0.0)
    torch.testing.assert_close(got.scores[0], core.scatter(rule.reference(logits[0], vision), VOCABULARY))
    assert fused.calls == 0


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from revisit import fused

types = {name: "i32" for name in ("height", "width", "capacity")}
types |= {"ids": "*i64", "sizes": "*i64", "log_p": "*fp32", "out": "*fp32"}
constants = {"WIDEN": False, "ROWS": fused.ROWS, "COLUMNS": fused.COLUMNS, "DEEP": fused.DEEP}
for kind, processor in (("bf16", 80), ("fp16", 90), ("fp32", 80)):
    given = {**types, "states": "*" + kind, "head": "*" + kind}
    signature = {name: given.get(name, "constexpr") for name in fused._divergences.arg_names}
    made = triton.compile(ASTSource(fused._divergences, signature, constants), target=GPUTarget("cuda", processor, 32))
    print(kind, processor, len(made.asm["cubin"]) > 1000, made.metadata.shared <= 48 << 10)
"""


@needs_triton
def test_triton_compiles_it_for_gpus_that_are_not_here(tmp_path: Any) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.stdout.split("\n")[:3] == ["bf16 80 True True", "fp16 90 True True", "fp32 80 True True"], run.stderr


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISIT_FUSED", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "revisit.fused", raising=False)
    monkeypatch.delattr(revisit, "fused", raising=False)
    with pytest.raises(RevisitError, match="pip install triton"):
        importlib.import_module("revisit.fused")
    with pytest.raises(RevisitError, match="unset REVISIT_FUSED"):
        Batch([Rows(20)], Rule(1e-2), copies=1).refine_without_waiting(some_logits(1, 2.0), 0.0)
