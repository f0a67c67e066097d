"""Compute what a step of ReVisiT would cost on a GPU from its kernels and bytes at real shapes; nothing is timed.

The torch step runs on torch's "meta" device, which keeps shapes and no numbers, and every operator is counted: one kernel (a
few, such as topk, are several on a real GPU), the bytes it reads and writes (a gather counts what it fetches), and the
products of matrices. The kernels of the Triton step are counted as they are launched, and their bytes come from `traffic`,
which tests/step/test_triton.py compares with every load and store of the interpreted kernels.

The predicted time is bytes / (0.85 · bandwidth), or the time of the cache or the arithmetic if that is longer, plus a fixed time
per kernel: 6 µs for the host's launch ("exposed"), or 2 µs, the least that a kernel takes on the device ("hidden"), if the host
launches it while the device is still busy with the model. A greedy step reads the weights and the KV cache once; it takes at least
12 launches per layer.

    python perf/roofline.py [--json]        in an environment with Triton, such as that of `make test-triton`
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from revisit.models.head import LinearHead
from revisit.step import triton as kernels
from revisit.step.batched import refine_batch
from revisit.step.interface import RowStates, StepOutput
from revisit.step.rule import Rule
from revisit.vllm.plan import block_size

LAUNCH = 6e-6  # seconds of the host for a kernel
SMALLEST = 2e-6  # seconds of the device for the smallest kernel
EFFICIENCY = 0.85  # of the bandwidth
GATHERS = ("index", "gather", "scatter", "embedding", "index_select")
VIEWS = (
    "view",
    "expand",
    "unsqueeze",
    "transpose",
    "slice",
    "select",
    "t",
    "split",
    "alias",
    "detach",
    "permute",
    "_unsafe_view",
)
CANDIDATES = 64  # per row: the capacity that the torch step allocates for sets of up to 42 tokens
CACHE = (
    2.5  # bandwidth of the cache, from which tiles of states read the same rows of the head again, relative to memory
)


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    name: str
    bandwidth: float  # bytes a second
    half: float  # bf16 operations a second


GPUS = (Gpu("A100", 2.0e12, 312e12), Gpu("H100", 3.35e12, 990e12), Gpu("B200", 8.0e12, 2250e12))


@dataclass(frozen=True)
class Model:
    """The sizes of a checkpoint and a prompt that determine the cost."""

    name: str
    parameters: float
    depth: int
    width: int
    vocabulary: int
    kv_width: int  # numbers of keys and values of a token and layer
    vision_tokens: int
    layers: int  # number of layers whose vision states are compared
    image: int | None = None  # tokens per image, if the configuration fixes them


MODELS = (
    Model("LLaVA-1.5-7B, 576 tokens, last", 6.7e9, 32, 4096, 32064, 8192, 576, 1, 576),
    Model("InternVL3-8B, 3,328 tokens, last", 7.6e9, 28, 3584, 151674, 1024, 3328, 1, 256),
    Model("Qwen2.5-VL-7B, 1.2 k tokens, all", 7.6e9, 28, 3584, 152064, 1024, 1200, 15),
    Model("Qwen2.5-VL-7B, 16 k tokens, all", 7.6e9, 28, 3584, 152064, 1024, 16384, 15),
    Model("Qwen3-VL-8B, 1.2 k tokens, all", 8.2e9, 36, 4096, 151936, 2048, 1200, 19),
)


class Counted(TorchDispatchMode):
    """Count the kernels, bytes and matrix products of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in VIEWS or name.startswith(("view", "empty")):
            return out
        read = sum(_bytes(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if not any(x.is_meta for x in results):
            return out  # work of the host
        written = sum(_bytes(x) for x in results)
        self.kernels += 1
        self.bytes += 2 * written if name.startswith(GATHERS) else read + written
        if name in ("bmm", "mm"):
            self.products += 2 * args[0].numel() * args[1].shape[-1]
        return out


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.numel() > tensor.untyped_storage().size() else tensor.nbytes


class MetaHead(LinearHead):
    """A head whose half-precision products have float32 results, as on a GPU."""

    def logits(self, states: Tensor, ids: Tensor, model_dtype: bool = False) -> Tensor:
        return torch.bmm(states, self.weight[ids].mT, out_dtype=torch.float32)


@dataclass(frozen=True)
class Cost:
    """The work of one step."""

    kernels: int
    bytes: int  # from and to memory
    products: int
    cached: int = 0  # bytes read again, from the cache

    def seconds(self, gpu: Gpu, per_kernel: float) -> float:
        """Return the predicted time, with a fixed time per kernel."""
        bandwidth = EFFICIENCY * gpu.bandwidth
        busy = max(self.bytes / bandwidth, (self.bytes + self.cached) / (CACHE * bandwidth))
        return self.kernels * per_kernel + max(busy, self.products / (0.5 * gpu.half))


@dataclass(frozen=True)
class Traffic:
    """Bytes that the Triton step moves, for sets that are compared in one round."""

    logits: int  # read three times and written once
    states: int  # read once, and the selected ones once more
    states_again: int  # the selected ones by the other programs that project them, from the cache
    head: int  # rows of the candidates, for the first tile of states and for the first selected state
    head_again: int  # the same rows for the other tiles and selected states, from the cache
    other: int  # everything between the kernels


def traffic(
    rows: int,
    vocabulary: int,
    states: int,
    width: int,
    candidates: int,
    rule: Rule,
    tiles: kernels.Tiles,
    itemsize: int,
) -> Traffic:
    """Compute the bytes of a step whose rows have this many states and candidates each."""
    parts, state_tiles = -(-vocabulary // tiles.vocabulary), -(-states // tiles.states)
    projections, neighbors = -(-candidates // tiles.projected), rule.neighbors
    row_of_head = candidates * width * itemsize
    vocabulary_tiles = parts * (8 + 8 + 8 * parts + 16 * parts)  # maxima and count write, count and pack read
    lists = candidates * (8 + 2 * 8 * state_tiles + 8 + 4 + 20 + (8 if isinstance(rule.weight, str) else 0))
    selection = 8 * states + 8 * state_tiles + neighbors * (4 * tiles.states + 4 + 12 * projections)
    small = 16 * parts + 12 * state_tiles + 4 * projections + 64
    return Traffic(
        logits=rows * 4 * vocabulary * 4,
        states=rows * (states + neighbors) * width * itemsize,
        states_again=rows * (projections - 1) * neighbors * width * itemsize,
        head=rows * 2 * row_of_head,
        head_again=rows * (state_tiles + neighbors - 2) * row_of_head,
        other=rows * (vocabulary_tiles + lists + selection + small),
    )


def meta(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta")


def padded(model: Model, batch: int) -> RowStates:
    """Return the states of a batch of items that have one block each."""
    count = model.vision_tokens * model.layers
    return RowStates.of_blocks(meta(batch, count, model.width, dtype=torch.bfloat16), [count] * batch)


def torch_step(model: Model, batch: int, pooled: bool, rule: Rule) -> Cost:
    """Count the torch step."""
    count = model.vision_tokens * model.layers
    weight = meta(model.vocabulary, model.width, dtype=torch.bfloat16)
    if pooled:
        size = block_size(model.image, model.layers, batch * count * 100)
        blocks = -(-count // size)
        pool = meta(batch * blocks, size, model.width, dtype=torch.bfloat16)
        table = np.arange(batch * blocks)[::-1].reshape(batch, blocks)  # not in order, so that the states are copied
        states = RowStates(pool, table, np.full(batch, count))
    else:
        states = padded(model, batch)
    with Counted() as counted:
        refine_batch(meta(batch, model.vocabulary), states, MetaHead(weight), rule, capacity=CANDIDATES)
    return Cost(counted.kernels, counted.bytes, counted.products)


def triton_step(model: Model, batch: int, rule: Rule) -> Cost:
    """Count the Triton step, which is the same for transformers and for vLLM."""
    count = model.vision_tokens * model.layers
    tiles = kernels.tiles_for(batch, count, torch.bfloat16)
    states = padded(model, batch)
    logits, rows = meta(batch, model.vocabulary), meta(batch)
    buffers = kernels.allocate({}, logits, states, rule, tiles)
    head = meta(model.vocabulary, model.width, dtype=torch.bfloat16)
    out = StepOutput(logits, rows, rows, rows, rows, rows)
    launched = len(list(kernels.launches(logits, states, head, rule, buffers, out, tiles)))
    moved = traffic(batch, model.vocabulary, count, model.width, CANDIDATES, rule, tiles, 2)
    whole = moved.logits + moved.states + moved.head + moved.other
    return Cost(launched, whole, 2 * states.states.numel() * tiles.tokens, moved.head_again + moved.states_again)


def greedy_step(model: Model, batch: int, gpu: Gpu) -> float:
    """Return the seconds of the model's own step: weights and KV cache are read once."""
    cache = 2 * batch * (model.vision_tokens + 256) * model.kv_width * model.depth
    busy = (2 * model.parameters + cache) / (EFFICIENCY * gpu.bandwidth)
    return max(busy, 12 * model.depth * LAUNCH, 2 * model.parameters * batch / (0.5 * gpu.half))


def rows(rule: Rule) -> list[dict[str, Any]]:
    """Return one row for each model, batch size and implementation."""
    made = []
    for model in MODELS:
        for batch in (1, 8, 64):
            steps = {
                "torch, transformers": torch_step(model, batch, pooled=False, rule=rule),
                "torch, vLLM": torch_step(model, batch, pooled=True, rule=rule),
                "Triton, both": triton_step(model, batch, rule),
            }
            for name, cost in steps.items():
                row: dict[str, Any] = {"model": model.name, "batch": batch, "step": name, "kernels": cost.kernels}
                row["gigabytes"] = cost.bytes / 1e9
                row["states_gigabytes"] = 2 * batch * model.vision_tokens * model.layers * model.width / 1e9
                for gpu in GPUS:
                    rest = greedy_step(model, batch, gpu)
                    exposed, hidden = (1 + cost.seconds(gpu, each) / rest for each in (LAUNCH, SMALLEST))
                    row[gpu.name] = {"greedy_ms": 1e3 * rest, "exposed": exposed, "hidden": hidden}
                made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--adaptive", action="store_true", help='weight="agreement", neighbors=8 instead of the paper\'s'
    )
    options = parser.parse_args()
    made = rows(Rule(weight="agreement", neighbors=8) if options.adaptive else Rule())
    if options.json:
        print(json.dumps(made))
        return
    print(f"Computed, not measured: {EFFICIENCY:.0%} of the bandwidth, {CANDIDATES} candidates, bf16.\n")
    print(
        "| model and prompt | batch | step | kernels | GB per step (states) |",
        " | ".join(gpu.name for gpu in GPUS),
        "|",
    )
    print("|---|---|---|---|---|" + "---|" * len(GPUS))
    for row in made:
        times = (
            f"{row[g.name]['greedy_ms']:.1f} ms, {row[g.name]['exposed']:.3f}×, {row[g.name]['hidden']:.3f}×"
            for g in GPUS
        )
        moved = f"{row['gigabytes']:.2f} ({row['states_gigabytes']:.2f})"
        print("|", " | ".join([row["model"], str(row["batch"]), row["step"], str(row["kernels"]), moved, *times]), "|")


if __name__ == "__main__":
    main()
