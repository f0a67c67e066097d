"""`revisit doctor --gpu`: check the step, a model and the vLLM plug-in on this machine's GPU.

Every check compares one value with a threshold. A report has no paths, prompts or host names, so it can be sent to others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from revisit.cli.checkup import Check, Status
from revisit.decoding.generate import generate
from revisit.decoding.trace import Trace
from revisit.embedded.samples import SAMPLES
from revisit.errors import brief
from revisit.eval.spec import version
from revisit.methods.revisit import ReVisiT
from revisit.models import DESCRIBE
from revisit.models.devices import default_device, emulates_bfloat16
from revisit.models.head import LinearHead
from revisit.models.loading import load
from revisit.models.prompts import prepare
from revisit.step.choice import choose, without_triton
from revisit.step.interface import RowStates, StepInput

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.02}  # of a probability
VLLM_STARTS = (  # title, collected layers, eager, model runner: vLLM's choice, or V1
    ("plain", None, False, None),
    ("all layers", "all", False, None),
    ("eager", "all", True, None),
    ("V1 runner", "all", False, "0"),
    ("layers 1 and 2", "1,2", False, None),
    ("plain, again", None, False, None),
)
VLLM_ENVIRON = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # to ask the worker for its counts
}
NEW = 32  # tokens of an answer


class Shape(NamedTuple):
    """A step that is compared with the reference."""

    name: str
    states: tuple[int, ...]  # vision states of each row
    width: int
    vocabulary: int
    candidates: int
    dtype: torch.dtype = torch.float32
    settings: Mapping[str, Any] = MappingProxyType({})


ADAPTIVE = {"weight": "both", "neighbors": 8, "normalize": False, "once": 1.0}
SMALL = (
    Shape("one candidate", (64, 64), 64, 1009, 1),
    Shape("64 candidates", (64, 32), 64, 1009, 64),
    Shape("65 candidates", (64, 32), 64, 1009, 65),
    Shape("all candidates", (64, 1, 0), 64, 1009, 1009),
    Shape("adaptive weight, once", (64, 32, 0), 64, 1009, 40, settings=ADAPTIVE),
)
LARGE = (
    Shape("LLaVA-1.5-7B", (576,), 4096, 32064, 64, torch.float16),
    Shape("LLaVA-1.5-7B, batch 64", (576,) * 64, 4096, 32064, 64, torch.float16),
    Shape("Qwen2.5-VL-7B, all layers", (18_000,), 3584, 152_064, 64, torch.bfloat16),
    Shape("5,000 candidates", (576, 300), 4096, 32064, 5000, torch.bfloat16),
    Shape("batch of 2³¹ logits", (16,) * 14_123, 64, 152_064, 8, torch.float16),
)


def checks(model: str, with_vllm: bool) -> Iterator[Check]:
    """Run all checks in order; one that raises is a failure."""
    sections: list[Callable[[], Iterable[Check]]] = [environment, compilation, numbers, host, speed]
    sections += [partial(decoding, model)] + [partial(serving, model)] * with_vllm
    for section in sections:
        try:
            yield from section()
        except Exception as error:
            name = getattr(section, "func", section).__name__
            yield Check(name, "FAIL", f"{type(error).__name__}: {_without_paths(brief(error))}")


def environment() -> Iterator[Check]:
    """Name the versions and the devices."""
    for name in ("torch", "transformers", "triton", "vllm", "vllm-cpu"):
        if (found := version(name)) is not None:
            yield Check(name, "PASS", found)
    if not torch.cuda.is_available():
        yield Check("device", "needs a GPU", default_device() or "cpu")
        return
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        yield Check(
            f"device {number}",
            "PASS",
            f"{device.name}, {device.total_memory / 2**30:.0f} GB, {device.major}.{device.minor}",
        )
    yield Check("bfloat16", "SLOW" if emulates_bfloat16() else "PASS", "emulated" if emulates_bfloat16() else "native")
    reason = without_triton(torch.device("cuda"))
    yield Check("Triton step", "PASS" if reason is None else "SLOW", reason or "used")


def compilation() -> Iterator[Check]:
    """Compile the kernels of a step for every data type, and read what the compiler reports."""
    if not torch.cuda.is_available() or without_triton(torch.device("cuda")) is not None:
        yield Check("compile the kernels", "needs a GPU")
        return
    for shape in (LARGE[0], LARGE[2], SMALL[-1]):
        step, inputs = prepared(shape, "triton", torch.device("cuda"))
        start = time.perf_counter()
        step.take(inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        spills = max(kernel.n_spills for kernel in step.kernels)
        registers = max(kernel.n_regs for kernel in step.kernels)
        shared = max(kernel.metadata.shared for kernel in step.kernels)
        value = f"{seconds:.1f} s, {registers} registers, {spills} spills, {shared / 1024:.0f} kB shared"
        yield Check(f"kernels: {shape.name}", "SLOW" if spills > 16 else "PASS", value, "16 spills")


def numbers() -> Iterator[Check]:
    """Compare every implementation with the reference, and two runs with each other."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for shape in SMALL + LARGE:
        if shape in LARGE and not _fits(shape, device):
            yield Check(f"numbers: {shape.name}", "needs a GPU")
            continue
        expected = take(shape, "reference") if len(shape.states) <= 64 else take(shape, "torch")
        for implementation in ("torch", None):
            found, again = (take(shape, implementation) for _ in range(2))
            largest = max(
                float((a.float().softmax(-1) - b.float().softmax(-1)).abs().max())
                for a, b in zip(found, expected, strict=True)
            )
            limit, same = TOLERANCE[shape.dtype], torch.equal(found, again)
            value = f"{largest:.1e}" if same else f"{largest:.1e}; two runs differ"
            status: Status = "PASS" if largest <= limit and same else "FAIL"
            yield Check(f"numbers: {shape.name}, {implementation or 'default'}", status, value, f"{limit:g}")


def host() -> Iterator[Check]:
    """Take steps without any wait of the host, in a CUDA graph, on a side stream and on a second device."""
    if not torch.cuda.is_available():
        yield from (Check(name, "needs a GPU") for name in ("no wait", "CUDA graph", "side stream", "second device"))
        return
    shape, device = LARGE[0], torch.device("cuda")
    implementation, inputs = prepared(shape, None, device)

    def step() -> Tensor:
        scores: Tensor = implementation.take(inputs).scores
        return scores

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        yield Check("no wait", "PASS")
    except RuntimeError as error:
        yield Check("no wait", "SLOW", brief(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    yield Check("CUDA graph", "PASS" if torch.equal(captured, expected) else "FAIL")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there = step()
    torch.cuda.synchronize()
    yield Check("side stream", "PASS" if torch.equal(there, expected) else "FAIL")
    if torch.cuda.device_count() > 1:
        second = take(shape, None, torch.device("cuda:1"))
        yield Check("second device", "PASS" if torch.equal(second.to(device), expected) else "FAIL")


def speed() -> Iterator[Check]:
    """Time a step in Triton and in torch beside one read of the vision states."""
    if not torch.cuda.is_available() or without_triton(torch.device("cuda")) is not None:
        yield Check("time of a step", "needs a GPU")
        return
    from triton.testing import do_bench  # where torch was built for GPUs

    device = torch.device("cuda")
    for rows in (1, 8, 64):
        shape = LARGE[0]._replace(states=(576,) * rows)
        (triton, inputs), (batched, _) = (prepared(shape, name, device) for name in ("triton", "torch"))
        times = {
            "Triton": do_bench(partial(triton.take, inputs)),
            "torch": do_bench(partial(batched.take, inputs)),
            "one read": do_bench(inputs.states.states.sum),
        }
        value = ", ".join(f"{name} {time:.3f} ms" for name, time in times.items())
        status: Status = "PASS" if times["Triton"] <= times["torch"] else "SLOW"
        yield Check(f"time of a step, batch {rows}", status, value, "Triton ≤ torch")


def decoding(name: str) -> Iterator[Check]:
    """Decode with a model: the same tokens on every device, in both steps and with a static cache; milliseconds per token."""
    device = default_device()
    model, inputs = _inputs(name, dtype=torch.float32)
    method = ReVisiT.recommended(model)
    if device is None:
        yield Check("tokens on the CPU and the GPU, float32", "needs a GPU")
    else:
        there = _inputs(name, dtype=torch.float32, device_map=device)
        yield _equal("tokens on the CPU and the GPU, float32", _tokens(model, inputs, method), _tokens(*there, method))
        model, inputs = _inputs(name, device_map=device)
    dtype = str(model.dtype).removeprefix("torch.")
    fast = _tokens(model, inputs, method)
    recorded = _tokens(model, inputs, method, trace=Trace(record=True))
    yield _equal(f"fast step and reference, {dtype}", fast, recorded)
    static = _tokens(model, inputs, method, cache_implementation="static")
    yield _equal(f"static cache, {dtype}", fast, static)
    greedy, refined = (_seconds(partial(_tokens, model, inputs, one, min_new_tokens=NEW)) for one in ("greedy", method))
    status: Status = "SLOW" if device and refined > 1.25 * greedy else "PASS"
    value = f"{1000 * refined / NEW:.1f} ms, {refined / greedy:.2f} × greedy"
    yield Check("time per token", status, value, "1.25 × on a GPU")
    if device == "cuda":
        yield Check("peak memory", "PASS", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GB")


def _inputs(name: str, **options: Any) -> tuple[Any, Any]:
    """Load a model, and prepare two sample images for it."""
    model, processor = load(name, **options)
    images = [sample.image() for sample in list(SAMPLES.values())[:2]]
    return model, prepare(processor, [DESCRIBE] * 2, images, device=model.device)


def _tokens(model: Any, inputs: Any, method: Any, **options: Any) -> list[Any]:
    output: Any = generate(model, **inputs, method=method, max_new_tokens=NEW, do_sample=False, **options)
    return list(output.tolist())


def _seconds(function: Callable[[], object]) -> float:
    """Return the median time of three calls."""
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[1]


def serving(name: str) -> Iterator[Check]:
    """Start vLLM plainly, with the plug-in for different layers, and plainly again, compiled, over one compile cache."""
    if version("vllm") is None and version("vllm-cpu") is None:
        yield Check("vLLM", "FAIL", "not installed")
        return
    gpu, results = torch.cuda.is_available(), {}
    with tempfile.TemporaryDirectory() as cache:
        for title, layers, eager, runner in VLLM_STARTS:
            if runner == "0" and not gpu:
                yield Check(f"vLLM, {title}", "needs a GPU")  # a CPU build has one runner
                continue
            chosen = {} if runner is None else {"VLLM_USE_V2_MODEL_RUNNER": runner}
            job = {"model": name, "layers": layers, "eager": eager, "rows": [1, 64, 256] if gpu and layers else []}
            result = _start(job, {**VLLM_ENVIRON, **chosen, "VLLM_CACHE_ROOT": cache})
            if isinstance(result, str):
                yield Check(f"vLLM, {title}", "FAIL", result)
                return
            results[title] = result
            yield Check(f"vLLM, {title}", "PASS", "starts and answers")
    alike = [result for title, result in results.items() if title not in ("eager", "V1 runner")]
    plain = [(result["plain"], result["logprobs"]) for result in alike]
    yield _equal("vLLM: requests without ReVisiT are unchanged", plain[:1] * len(plain), plain)
    compiled, *others = (results[title] for title in ("all layers", "eager", "V1 runner") if title in results)
    length = None if compiled["exact"] else 1  # half precision rounds differently, so that later tokens may differ
    for title, other in zip(("eager", "the V1 runner"), others, strict=False):
        found, wanted = ([answer[:length] for answer in result["refined"]] for result in (other, compiled))
        yield _equal(f"vLLM: tokens compiled and with {title}", found, wanted)
    refined = [result for result in results.values() if "steps" in result]
    outside = [result["outside_top_p"] for result in refined if result["outside_top_p"] is not None]
    sampled: Status = "FAIL" if sum(outside) else "PASS" if outside else "needs a GPU"
    yield Check("vLLM: top_p in 96 refined rows", sampled, f"{sum(outside)} tokens outside", "0")
    steps = sum((Counter(result["steps"]) for result in refined), Counter[str]())
    fallen = gpu and any(implementation != "triton" for implementation in steps)
    listed = ", ".join(f"{count:,} × {implementation}" for implementation, count in steps.items())
    yield Check("vLLM: steps", "SLOW" if fallen else "PASS", listed, "triton on a GPU")
    for rows, alone, with_revisit in compiled["speeds"]:
        status: Status = "SLOW" if with_revisit < 0.8 * alone else "PASS"
        value = f"{with_revisit:,.0f} tokens a second, {alone:,.0f} without ReVisiT"
        yield Check(f"vLLM: {rows} requests at a time", status, value, "0.8 ×")
    if not gpu:
        yield Check("vLLM: requests at a time", "needs a GPU")


def _start(job: dict[str, Any], environ: dict[str, str]) -> Any:
    """Return what the probe found in an engine of its own, or its error in a sentence."""
    layers = job["layers"]
    switches = {"REVISIT_VLLM": str(int(layers is not None)), "REVISIT_VLLM_LAYERS": layers or ""}
    command = [sys.executable, "-m", "revisit.cli.vllm_probe", json.dumps(job)]
    done = subprocess.run(command, env={**os.environ, **environ, **switches}, capture_output=True, text=True)
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if "Error: " in line]
        return _without_paths(" ".join(reasons[-1:]))[:200] or f"exit status {done.returncode}"
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- data ----------------------------------------------------------------------------------------------------------


def example(shape: Shape, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor, Tensor | None]:
    """Return vision states of each row, a head, logits and written tokens; one state of each row is near its output."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device, shape.dtype)

    head = normal(shape.vocabulary, shape.width)
    hidden = normal(len(shape.states), shape.width) * (3 / shape.width**0.5)
    logits = (hidden @ head.T).float()
    states = []
    for row, count in enumerate(shape.states):
        one = normal(count, shape.width)
        if count:
            one[count // 2] = hidden[row] + 0.1 * one[count // 2] / shape.width**0.5
        if count > 8:
            one[-1] = torch.nan  # padding, which is never selected
        states.append(one)
    return states, head, logits, logits.topk(4).indices if shape.settings.get("once") else None


def settings(shape: Shape, logits: Tensor) -> dict[str, Any]:
    """Return settings with which the first row has the shape's number of candidates."""
    top = logits[0].sort(descending=True).values
    last = min(shape.candidates, len(top) - 1)
    middle = (top[last - 1] + top[last]) / 2 if shape.candidates < len(top) else top[-1] - 1
    return {"alpha": float((middle - top[0]).exp()), **shape.settings}


def prepared(shape: Shape, implementation: Any, device: torch.device) -> tuple[Any, StepInput]:
    """Return a step and its input, which is on the device already."""
    states, head, logits, written = example(shape, device)
    step = choose(LinearHead(head), ReVisiT(**settings(shape, logits)).rule(), logits.device, implementation)
    return step, StepInput(logits, RowStates.of_items(states), written=written)


def take(shape: Shape, implementation: Any, device: torch.device | None = None) -> Tensor:
    """Return the scores of a step."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step, inputs = prepared(shape, implementation, device)
    scores: Tensor = step.take(inputs).scores
    return scores


def _fits(shape: Shape, device: torch.device) -> bool:
    """Return whether a large step fits on a GPU with room for everything else."""
    if device.type != "cuda":
        return False
    rows = len(shape.states)
    needed = 40 * rows * shape.vocabulary + 4 * shape.width * (shape.vocabulary + sum(shape.states))
    return needed < torch.cuda.mem_get_info()[0]


def _equal(name: str, found: list[Any], expected: list[Any]) -> Check:
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    return Check(name, "PASS" if same == len(expected) else "FAIL", f"{same} of {len(expected)} equal")


def _without_paths(text: str) -> str:
    return " ".join("…" if "/" in word or "\\" in word else word for word in text.split())
