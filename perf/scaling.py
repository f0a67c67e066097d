"""How the engine's own time grows with vision tokens, layers, plausible tokens, batch and steps.

No model: random states and a random head of the stated size, logits from a stated profile. Every row of every table is
first compared with the reference (or, where that would take minutes, with the reference on a part of the rows).

    python perf/scaling.py [--threads 1] [--table tokens --table sets ...]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from revisit.evaluation.latency import Memory, Profile
from revisit.step.engine import STORE_BYTES, Batch, Engine, Peaks, Rule
from step import Rows

WIDTH, VOCABULARY = 896, 151936
RULE = Rule(1e-5)


def check(engine: Engine, vision: Rows, logits: Tensor) -> None:
    """The engine's step is the reference's."""
    expected, got = RULE.reference(logits, vision), engine.refine(Peaks(logits[None]))
    assert torch.equal(expected.ids, got.ids)
    assert expected.row == got.row
    torch.testing.assert_close(expected.final, got.final, atol=1e-3, rtol=1e-3)


def timed(function: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """(seconds, processor seconds) of a call."""
    wall, busy = time.perf_counter(), time.process_time()
    function(*arguments)
    return time.perf_counter() - wall, time.process_time() - busy


def step(engine: Engine, logits: Tensor) -> None:
    engine.refine(Peaks(logits[None]))


def run(vision: Rows, table: Tensor, steps: int, *, checked: bool = True) -> str:
    """Milliseconds per step over some steps of one sequence, after a check."""
    if checked:
        check(Engine(vision, RULE), vision, table[0])
    memory = Memory(torch.device("cpu"))
    engine = Engine(vision, RULE)
    times = [timed(step, engine, table[t]) for t in range(steps)]
    peak = memory.peak()
    wall, busy = (statistics.fmean(column) * 1e3 for column in zip(*times, strict=True))
    reuse = f"{1 - engine.projected / engine.asked:5.1%}" if engine.asked else "none"  # identities, or streamed
    return f"{wall:9.2f} ms/step  {busy:9.2f} ms CPU  columns reused {reuse}  extra {peak / 2**20:6.0f} MiB"


def tokens(head: Tensor) -> None:
    table = Profile(steps=40, largest=2000).logits(VOCABULARY)
    for layers in (1, 12):
        for count in (256, 1024, 4096, 16384):
            if layers * count <= 50000:
                print(
                    f"{count:6d} vision tokens × {layers:2d} layers: {run(Rows(layers * count, head), table, 40)}",
                    flush=True,
                )
    vision = Rows(12 * 16384, head)
    states = vision.states.numel() * 4 / 2**20
    print(
        f" 16384 vision tokens × 12 layers: {run(vision, table, 5, checked=False)} (states {states:.0f} MiB)",
        flush=True,
    )


def layers(head: Tensor) -> None:
    table = Profile(steps=40, largest=2000).logits(VOCABULARY)
    for count in (1, 2, 4, 8, 16, 32):
        print(f"{count:3d} layers × 346 vision tokens: {run(Rows(count * 346, head), table, 40)}", flush=True)


def sets(head: Tensor) -> None:
    for size in (1, 8, 64, 512, 2048, 8192, 50000):
        profile = Profile(median=size, spread=0, largest=50000, steps=20 if size <= 2048 else 2)
        for rows in (346, 4152):
            if rows * size <= 10**8:
                line = run(Rows(rows, head), profile.logits(VOCABULARY), profile.steps)
                print(f"{size:6d} plausible tokens, {rows} rows: {line}", flush=True)


def batch(head: Tensor) -> None:
    table = Profile(steps=64, largest=2000).logits(VOCABULARY)
    for count in (1, 2, 4, 8, 16):
        visions = [Rows(4152, head, seed) for seed in range(count)]
        whole = Batch(visions, RULE, copies=1)
        rows = range(count)
        times = [
            timed(whole.refine, table[[(t + 3 * r) % 64 for r in rows]], rows, 0.0, lambda *_: None) for t in range(20)
        ]
        wall, busy = (statistics.fmean(column) * 1e3 / count for column in zip(*times, strict=True))
        print(f"batch {count:2d} × 4152 rows: {wall:8.2f} ms per sequence and step  {busy:8.2f} ms CPU", flush=True)


def steps(head: Tensor) -> None:
    for name, profile in {
        "median 64": Profile(steps=400, largest=2000),
        "512 each": Profile(512, 0.0, steps=400),
    }.items():
        vision, table = Rows(4152, head), profile.logits(VOCABULARY)
        engine = Engine(vision, RULE, store_bytes=STORE_BYTES)
        check(engine, vision, table[0])
        for start, stop in ((0, 25), (25, 50), (50, 100), (100, 200), (200, 400)):
            before = (engine.asked, engine.projected)
            times = [timed(step, engine, table[t]) for t in range(start, stop)]
            asked, made = engine.asked - before[0], engine.projected - before[1]
            wall, busy = (statistics.fmean(column) * 1e3 for column in zip(*times, strict=True))
            line = f"{wall:8.2f} ms/step  {busy:8.2f} ms CPU  columns reused {1 - made / asked:5.1%}"
            print(f"{name}, steps {start:3d}–{stop:3d}: {line}", flush=True)


TABLES = {"tokens": tokens, "layers": layers, "sets": sets, "batch": batch, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--table", action="append", choices=list(TABLES), default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    head = 0.1 * torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(0))
    print(
        f"width {WIDTH}, vocabulary {VOCABULARY}, {torch.get_num_threads()} threads, {Profile(largest=2000).describe()}"
    )
    for name in arguments.table or TABLES:
        TABLES[name](head)


if __name__ == "__main__":
    main()
