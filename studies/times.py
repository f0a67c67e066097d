"""How long does an answer take with each method? The time of a whole answer with its prompt, as a multiple of greedy decoding.

On a CPU this is processor time, which depends less on other processes. Methods take turns; the first round, in which CODE generates its
description, does not count.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from revisit.decoding.generate import generate
from revisit.decoding.method import METHODS as REGISTRY
from revisit.errors import RevisitError
from revisit.eval.report.document import Block, Table
from revisit.eval.run import Reporter
from revisit.methods import as_method
from revisit.paper.latency import wait
from revisit.paper.study import Result, Stored, Subject, track

METHODS = tuple(name for name in REGISTRY.names() if name not in ("greedy", "chain"))
ROUNDS = 3


def run(subject: Subject, reporter: Reporter) -> Result:
    """Run the study on one image: seconds per token, the median over rounds, or why a method does not support the model."""
    model, length = subject.loaded[0], subject.max_new_tokens
    inputs = subject.inputs(subject.items[:1])
    clock = time.process_time if model.device.type == "cpu" else time.perf_counter
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": length, "max_new_tokens": length}
    seconds: dict[str, list[float]] = {name: [] for name in ("greedy", *subject.methods)}
    unsupported: dict[str, str] = {}
    for _ in track(reporter, f"{len(seconds)} methods", range(ROUNDS + 1)):
        for name in [name for name in seconds if name not in unsupported]:
            wait(model.device)
            started = clock()
            try:
                method = as_method(name, model)
                generate(model, **inputs, method=method, num_beams=method.own_beams, **options)
            except RevisitError as error:
                unsupported[name] = str(error)
                continue
            wait(model.device)
            seconds[name].append((clock() - started) / length)
    measured = {name: median(found[1:]) for name, found in seconds.items() if name not in unsupported}
    return {"tokens": length, "seconds": measured, "unsupported": unsupported}


def draw(result: Stored) -> list[Block]:
    """Draw the times, and the methods that do not support the model."""
    seconds = result["seconds"]
    caption = (
        f"A whole answer of {result['tokens']} tokens, × greedy: the median of {ROUNDS} rounds in which the methods took turns. Greedy "
        "decoding (OPERA: beams), settings recommended for the model."
    )
    lines = [(name, f"{found / seconds['greedy']:.2f}") for name, found in seconds.items()]
    why = list(result["unsupported"].items())
    return [
        Table(("Method", "time ×"), lines, caption),
        *([Table(("Method", "Why it does not run"), why, "Not run.", left=2)] if why else []),
    ]
