"""Measure the host time of the vLLM plug-in per refined row and step, beside that of rows that did not opt in, in one run.

The step itself is left out: a step that does nothing stands in for it, so what is measured is the Python around it. Nothing of
vLLM is needed.

    python perf/vllm_host.py [--rows 256] [--steps 400] [--settings 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from revisit.step.interface import Step
from revisit.vllm import worker
from revisit.vllm.head import ShardedHead
from revisit.vllm.plan import Plan
from revisit.vllm.worker import Worker

IMAGE, WIDTH, VOCABULARY, DEPTH, TOKENS = 9, 16, 64, 4, 64


class NoStep(Step):
    """A step that leaves the logits as they are."""

    name = "none"

    def take_in_place(self, *_: Any) -> Any:
        return None


def make_worker(rows: int, opted_in: bool, settings: int) -> tuple[Worker, list[str]]:
    """Return a worker with requests whose vision states are stored, and their names."""
    generation = SimpleNamespace(revisit=None)
    model = SimpleNamespace(config=SimpleNamespace(model_type="llava"), generation_config=generation)
    plan = Plan((IMAGE,), DEPTH, False, WIDTH, torch.float32, rows + 1, TOKENS, model)
    made, names = Worker(plan, "cpu", lambda: ShardedHead(torch.zeros(VOCABULARY, WIDTH))), []
    prompt = [IMAGE] * TOKENS + [1]
    for number in range(rows):
        extra = {"revisit": {"alpha": 1e-5 * (1 + number % settings)}} if opted_in else None
        made.add(str(number), SimpleNamespace(extra_args=extra), prompt)
        names.append(str(number))
    length = len(prompt)
    made.begin(names, [0] * rows, [length] * rows)
    made.observe(torch.zeros(rows * length, WIDTH), [])
    made.refine(torch.zeros(rows, VOCABULARY), torch.zeros(rows, WIDTH))
    return made, names


def microseconds(made: Worker, names: list[str], steps: int) -> float:
    """Return the median processor time of a decoding step."""
    logits, states = torch.zeros(len(names), VOCABULARY), torch.zeros(len(names), WIDTH)
    ones, times = np.ones(len(names), np.int32), []
    for step in range(steps):
        firsts = np.full(len(names), TOKENS + 1 + step, np.int32)
        started = time.process_time()
        made.begin(names, firsts, ones, [0] * len(names))
        made.observe(states, [])
        made.refine(logits, states)
        times.append(time.process_time() - started)
    return 1e6 * statistics.median(times)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=256)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--settings", type=int, default=1, help="different settings among the requests")
    given = options.parse_args()
    torch.set_num_threads(1)
    with patch.object(worker, "choose", lambda head, rule, _: NoStep(head, rule)):
        refined, plain = (
            microseconds(*make_worker(given.rows, opted_in, given.settings), given.steps) for opted_in in (True, False)
        )
        mixed, names = make_worker(given.rows, True, given.settings)
        beside = microseconds(
            mixed, [f"plain {name}" for name in names], given.steps
        )  # rows beside those that opted in
    report = {"refined": refined, "plain": plain, "plain beside refined": beside}
    each = {f"µs per row, {name}": round(value / given.rows, 3) for name, value in report.items()}
    print(json.dumps({**each, "refined ÷ plain beside refined": round(refined / beside, 2)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
