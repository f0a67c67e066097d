"""Count the kernels, host waits and bytes of one ReVisiT step on the fake GPU of tests/device; no time is measured.

    PYTHONPATH=tests:tests/device python perf/counts.py     in an environment with Triton, such as that of `make test-triton`

The counts are those of a later step of small random models: LLaVA in transformers, minus the counts of greedy decoding, and
requests with images of at least 100 vision tokens in vLLM's worker. Triton kernels are counted but not run; `perf/roofline.py`
computes their bytes.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import fake_cuda
import torch
from test_vllm_budget import Server

import families
import revisit
from revisit.step import triton as kernels

STEPS = 9  # over which a run of transformers is averaged


def transformers_step(items: int, launched: list[str]) -> list[float]:
    """Return kernels, waits and bytes of a step after the third, beyond those of greedy decoding."""
    model = families.build("llava")[0].to("cuda:0")
    inputs = families.inputs("llava", ["what is it?"] * items, [[families.image(n % 9)] for n in range(items)])
    moved = {name: value.to("cuda:0") for name, value in inputs.items()}
    counts = []
    for method in ("greedy", "revisit"):
        for new in (3, 3 + STEPS):
            launched.clear()
            with fake_cuda.Log() as log:
                options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
                revisit.generate(model, **moved, method=method, **options)
            counts.append((log.kernels + len(launched), log.waits, log.bytes))
    return [(d - c - b + a) / STEPS for a, b, c, d in zip(*counts, strict=True)]


def vllm_step(requests: int, launched: list[str]) -> list[float]:
    """Return kernels, waits and bytes of the third step."""
    server = Server(requests, "cuda:0")
    for number in range(3):
        launched.clear()
        server.decode(number)
    return [server.log.kernels + len(launched), server.log.waits, server.log.bytes]


def main() -> None:
    fake_cuda.load()
    launched: list[str] = []
    kernels.Launch.run = lambda launch: launched.append(launch.kernel.__name__)  # type: ignore[method-assign, assignment]
    kernels.works = lambda *_: True
    torch.cuda.device = lambda _: contextlib.nullcontext()  # type: ignore[misc, assignment]
    print("| engine | step | batch | kernels | waits | MB |\n|---|---|---|---|---|---|")
    for engine, count in (("transformers", transformers_step), ("vLLM", vllm_step)):
        for step in ("torch", "Triton"):
            os.environ["REVISIT_KERNEL"] = "0" if step == "torch" else "1"
            for batch in (1, 8, 64):
                kernel_count, waits, moved = count(batch, launched)
                size = f"{moved / 1e6:.2f}" if step == "torch" else ""
                print(f"| {engine} | {step} | {batch} | {kernel_count:.4g} | {waits:.4g} | {size} |", flush=True)


if __name__ == "__main__":
    main()
