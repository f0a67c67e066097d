"""On a device that says it is CUDA: the CPU's tokens, on one device and on two, and budgets of what a step asks of it.

Run by `make test-device`, in a process of its own: torch believes in the device for as long as the process lives.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import fake_cuda
import pytest
import torch

import families
import revisit
from revisit import methods
from revisit.step import batched

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(fake_cuda.unavailable() is not None, reason=str(fake_cuda.unavailable())),
]
FAMILIES = ("llava", "qwen2_5_vl")
NEW = 12


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    fake_cuda.load()


@functools.cache
def on_the_cpu(family: str, items: int) -> tuple[Any, dict[str, Any]]:
    model, _ = families.build(family)
    prompts = [f"what is number {number}?" for number in range(items)]
    inputs = families.inputs(family, prompts, [[families.picture(number)] for number in range(items)])
    return model, dict(inputs)


def decode(model: Any, inputs: dict[str, Any], method: Any, new: int = NEW) -> torch.Tensor:
    torch.manual_seed(0)
    out: torch.Tensor = revisit.generate(model, **inputs, method=method, max_new_tokens=new, do_sample=False)
    return out.cpu()


def moved(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda:0") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def split(model: Any) -> Any:
    """The model with the second half of its decoder layers on the second device."""
    from accelerate import dispatch_model

    twin = copy.deepcopy(model)
    prefix, depth = "model.language_model.layers.", len(twin.model.language_model.layers)
    parts = {f"{prefix}{layer}": f"cuda:{int(layer >= depth // 2)}" for layer in range(depth)}
    text = [
        f"model.language_model.{name}" for name, _ in twin.model.language_model.named_children() if name != "layers"
    ]
    others = [f"model.{name}" for name, _ in twin.model.named_children() if name != "language_model"]
    parts |= dict.fromkeys([*text, *others, "lm_head"], "cuda:0")
    return dispatch_model(twin, parts, force_hooks=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["greedy", "revisit", "dola", "deco", "vcd", "m3id", "icd", "sid", "avisc", "pai"])
def test_every_method_gives_the_cpus_tokens(family: str, name: str) -> None:
    model, inputs = on_the_cpu(family, 2)
    method = methods.recommended(name, model).bind(families.build(family)[1])
    expected = decode(model, inputs, method)
    assert torch.equal(decode(copy.deepcopy(model).to("cuda:0"), moved(inputs), method), expected)
    assert torch.equal(decode(split(model), moved(inputs), method), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["last", "all"])
def test_a_step_of_revisit_stays_within_its_budget(family: str, layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not depend on the batch, the host waits once, and the states are read once."""
    shapes: list[tuple[int, int]] = []  # (numbers in the states, capacity × states) of each step
    compare = batched.compare

    def watched(some: Any, blocks: Any, head: Any, rule: Any) -> Any:
        shapes.append((blocks.states.nbytes, some.ids.shape[1] * blocks.states.shape[0] * blocks.states.shape[1]))
        return compare(some, blocks, head, rule)

    monkeypatch.setattr(batched, "compare", watched)
    kernels = []
    for items in (8, 32):
        model, inputs = on_the_cpu(family, items)
        device, method = copy.deepcopy(model).to("cuda:0"), revisit.ReVisiT(layers=layers)
        logs = []
        for new in (3, NEW):
            with fake_cuda.Log() as log:
                decode(device, moved(inputs), method, new)
            logs.append(log)
        steps = NEW - 3
        few, many = logs
        kernels.append((many.kernels - few.kernels) / steps)
        waits = (many.waits - few.waits) / steps
        moved_bytes = (many.bytes - few.bytes) / steps
        states, compared = shapes[-1]
        budget = 2 * states + 8 * 4 * items * model.config.get_text_config().vocab_size + 160 * compared
        assert kernels[-1] <= 60, many.places("kernel").most_common(70)
        assert waits <= 1, many.places("wait")
        assert moved_bytes <= budget * (1.4 if family == "qwen2_5_vl" and layers == "last" else 1)  # 6 vision tokens
    assert kernels[1] <= 1.1 * kernels[0]


@pytest.mark.parametrize("name", ["greedy", "dola", "vcd", "sid"])
def test_other_methods_wait_at_most_once_a_step(name: str) -> None:
    model, inputs = on_the_cpu("llava", 8)
    device, method = copy.deepcopy(model).to("cuda:0"), methods.recommended(name, model)
    logs = []
    for new in (3, NEW):
        with fake_cuda.Log() as log:
            decode(device, moved(inputs), method, new)
        logs.append(log)
    assert logs[1].waits - logs[0].waits <= NEW - 3, logs[1].places("wait")


def test_the_device_refuses_what_a_gpu_refuses_and_sees_what_it_would_wait_for() -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3)
    with fake_cuda.Log() as log:
        (here * 2).sum().item()
        torch.nonzero(here)
        torch.zeros(3).copy_(here, non_blocking=True)
    kinds = [event.kind for event in log.events]
    assert kinds.count("wait") == 2
    assert kinds.count("asynchronous copy") == 1
    assert [event.name for event in log.events if event.kind == "kernel"][:2] == ["aten::mul", "aten::sum"]
