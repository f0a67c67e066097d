"""Measure how a step's own time on a CPU grows with vision tokens, layers, plausible tokens and batch.

No model: random states and a random head of the stated size, logits from a stated profile. Every line is first compared
with the reference on one step.

    python perf/scaling.py [--threads 1] [--table tokens --table sets ...]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from random_models import Profile
from revisit.models.head import LinearHead
from revisit.step.interface import RowStates, StepInput
from revisit.step.rule import Rule
from step import check, implementations
from timing import Memory

WIDTH, VOCABULARY = 896, 151936
RULE = Rule()


def random_states(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def run(what: str, items: list[Tensor], head: LinearHead, profile: Profile) -> None:
    """Print milliseconds per sequence and step, for each implementation."""
    table = profile.logits(VOCABULARY)
    for way, step in implementations(head, RULE).items():
        if len(items) == 1:
            check(step, items[0], head, RULE, table[0])
        states = RowStates.of_items(items)
        memory, times = Memory(torch.device("cpu")), []
        for number in range(profile.steps):
            logits = table[[(number + 3 * row) % profile.steps for row in range(len(items))]]
            wall, busy = time.perf_counter(), time.process_time()
            step.take(StepInput(logits, states))
            times.append((time.perf_counter() - wall, time.process_time() - busy))
        took, cpu = (1e3 * statistics.fmean(column) / len(items) for column in zip(*times, strict=True))
        extra = memory.peak() / 2**20
        print(f"{what}, {way:8s}: {took:9.2f} ms  {cpu:9.2f} ms CPU  extra {extra:6.0f} MiB", flush=True)


def tokens(head: LinearHead) -> None:
    for layers in (1, 12):
        for count in (256, 1024, 4096, 16384):
            if layers * count <= 50000:
                what = f"{count:6d} vision tokens × {layers:2d} layers"
                run(what, [random_states(layers * count)], head, Profile(steps=40, largest=2000))


def layers(head: LinearHead) -> None:
    for count in (1, 2, 4, 8, 16, 32):
        run(
            f"{count:3d} layers × 346 vision tokens",
            [random_states(count * 346)],
            head,
            Profile(steps=40, largest=2000),
        )


def sets(head: LinearHead) -> None:
    for size in (1, 8, 64, 512, 2048, 8192):
        profile = Profile(median=size, spread=0, largest=50000, steps=20 if size <= 2048 else 2)
        for count in (346, 4152):
            run(f"{size:6d} plausible tokens, {count:5d} states", [random_states(count)], head, profile)


def batch(head: LinearHead) -> None:
    for count in (1, 2, 4, 8):
        items = [random_states(4152, seed) for seed in range(count)]
        run(f"batch {count:2d} × 4152 states", items, head, Profile(steps=20, largest=2000))


TABLES = {"tokens": tokens, "layers": layers, "sets": sets, "batch": batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--table", action="append", choices=list(TABLES), default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    weight = 0.1 * torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
    print(
        f"width {WIDTH}, vocabulary {VOCABULARY}, {torch.get_num_threads()} threads, {Profile(largest=2000).describe()}"
    )
    for name in arguments.table or TABLES:
        TABLES[name](LinearHead(weight))


if __name__ == "__main__":
    main()
