"""What a step of ReVisiT would cost on a GPU, computed from the operators it runs at real shapes; nothing is timed.

The batched step runs on torch's "meta" device, which keeps shapes and no numbers, and every operator is counted: one
kernel (a few, such as topk, are several on a real GPU), the bytes it reads and writes (a gather counts what it fetches),
and the products of matrices. The predicted time is bytes / (0.85 · bandwidth), or the arithmetic if that takes longer, and
for every kernel either 6 µs (the host's launch, if nothing hides it) or 2 µs (the least that a kernel takes on the device,
if the host launches it while the device is still busy with the model, as it can wherever the model's own step takes longer
than its 12 launches a layer). A greedy step reads the weights and the KV cache once.

    python perf/roofline.py [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from revisit.integrations.vllm.plan import block_size
from revisit.models.parts import LinearHead
from revisit.step.batched import refine
from revisit.step.interface import StateBlocks
from revisit.step.rule import Rule

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
CAPACITY = 64  # places for candidates: plausible sets of up to 42 tokens, which have half as much room again


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    name: str
    bandwidth: float  # bytes a second
    half: float  # bf16 operations a second
    single: float  # float32 operations a second


GPUS = (Gpu("A100", 2.0e12, 312e12, 19.5e12), Gpu("H100", 3.35e12, 990e12, 67e12))


@dataclass(frozen=True)
class Model:
    """What counts of a checkpoint, and of the prompt."""

    name: str
    parameters: float
    depth: int
    width: int
    vocabulary: int
    kv_width: int  # numbers of keys and values of a token and layer
    vision_tokens: int
    layers: int  # whose vision states are looked at
    image: int | None = None  # tokens of an image, where the configuration says so


MODELS = (
    Model("LLaVA-1.5-7B, 576 tokens, last", 6.7e9, 32, 4096, 32064, 8192, 576, 1, 576),
    Model("InternVL3-8B, 3,328 tokens, last", 7.6e9, 28, 3584, 151674, 1024, 3328, 1, 256),
    Model("Qwen2.5-VL-7B, 1.2 k tokens, all", 7.6e9, 28, 3584, 152064, 1024, 1200, 15),
    Model("Qwen2.5-VL-7B, 16 k tokens, all", 7.6e9, 28, 3584, 152064, 1024, 16384, 15),
    Model("Qwen3-VL-8B, 1.2 k tokens, all", 8.2e9, 36, 4096, 151936, 2048, 1200, 19),
)


class Counted(TorchDispatchMode):
    """Kernels, bytes and matrix products of what runs inside."""

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
    """What one step asks of the device."""

    kernels: int
    bytes: int
    products: int

    def seconds(self, gpu: Gpu, per_kernel: float) -> float:
        """With this time a kernel beside what its bytes or its arithmetic take."""
        busy = max(self.bytes / (EFFICIENCY * gpu.bandwidth), self.products / (0.5 * gpu.half))
        return self.kernels * per_kernel + busy


def own_step(model: Model, batch: int, pooled: bool, rule: Rule) -> Cost:
    """ReVisiT's part of a step."""
    count = model.vision_tokens * model.layers
    device = torch.device("meta")
    weight = torch.empty(model.vocabulary, model.width, dtype=torch.bfloat16, device=device)
    logits = torch.empty(batch, model.vocabulary, device=device)
    if pooled:
        size = block_size(model.image, model.layers, batch * count * 100)
        blocks = -(-count // size)
        pool = torch.empty(batch * blocks, size, model.width, dtype=torch.bfloat16, device=device)
        lengths = torch.empty(batch * blocks, dtype=torch.long, device=device)
        table = torch.empty(batch, blocks, dtype=torch.long, device=device)
        states = StateBlocks.pooled(pool, lengths, table)
    else:
        padded = torch.empty(batch, count, model.width, dtype=torch.bfloat16, device=device)
        states = StateBlocks(padded, None, torch.empty(batch, 1, dtype=torch.long, device=device))
    with Counted() as counted:
        refine(logits, states, MetaHead(weight), rule, capacity=CAPACITY)
    return Cost(counted.kernels, counted.bytes, counted.products)


def greedy_step(model: Model, batch: int, gpu: Gpu) -> float:
    """Seconds of the model's own step: weights and KV cache read once."""
    cache = 2 * batch * (model.vision_tokens + 256) * model.kv_width * model.depth
    busy = (2 * model.parameters + cache) / (EFFICIENCY * gpu.bandwidth)
    return max(busy, 12 * model.depth * LAUNCH, 2 * model.parameters * batch / (0.5 * gpu.half))


def rows(rule: Rule) -> list[dict[str, Any]]:
    """One row for each model, batch size and engine."""
    made = []
    for model in MODELS:
        for batch in (1, 8, 64):
            for engine in ("transformers", "vLLM"):
                cost = own_step(model, batch, pooled=engine == "vLLM", rule=rule)
                row: dict[str, Any] = {"model": model.name, "batch": batch, "engine": engine, "kernels": cost.kernels}
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
    print(f"Computed, not measured: {EFFICIENCY:.0%} of the bandwidth, {CAPACITY} candidates, bf16.\n")
    print(
        "| model and prompt | batch | engine | kernels | GB a step (states) | A100: greedy, launches exposed, hidden | H100 |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in made:
        times = (
            f"{gpu['greedy_ms']:.1f} ms, {gpu['exposed']:.3f}×, {gpu['hidden']:.3f}×"
            for gpu in (row["A100"], row["H100"])
        )
        moved = f"{row['gigabytes']:.2f} ({row['states_gigabytes']:.2f})"
        print(
            f"| {row['model']} | {row['batch']} | {row['engine']} | {row['kernels']} | {moved} | {' | '.join(times)} |"
        )


if __name__ == "__main__":
    main()
