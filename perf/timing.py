"""Measure a method's own time and memory within a call, in addition to the times of `revisit.paper.latency`.

The own time is spent inside the method's logits processor: it is the time that the method adds, and the noise of the machine does
not hide it. The processor time of a step is recorded as well, because other processes affect it less.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from pydantic import Field, InstanceOf
from torch import Tensor

from revisit import Method, Trace
from revisit.eval.report.document import Table
from revisit.paper import latency
from revisit.paper.latency import now, seconds

Script = Callable[[int, Tensor], Tensor]  # (step, the model's logits) -> the logits that take their place


class Timed(Method):
    """A method, timed from inside; `script` replaces the model's logits, outside the measured time."""

    inner: InstanceOf[Method]
    script: Any = None  # Script
    spans: list[tuple[Any, Any]] = Field(default_factory=list)  # inside the method, step by step
    busy: list[float] = Field(default_factory=list)  # the same in processor time of all threads

    name = "timed"

    def settings(self) -> dict[str, Any]:
        return self.inner.settings()

    def begin(self, prompt: Any, passes: Any) -> Any:
        steps = [method.begin(prompt, passes) for method in self.inner.links or (self.inner,)]
        step = 0

        def timed(input_ids: Tensor, logits: Tensor) -> Tensor:
            nonlocal step
            if self.script is not None:
                logits = self.script(step, logits)
            step += 1
            started, busy = now(logits.device), time.process_time()
            result = logits
            for refine in steps:
                result = refine(input_ids, getattr(result, "scores", result))
            self.spans.append((started, now(logits.device)))
            self.busy.append(time.process_time() - busy)
            return result

        return timed


@dataclass
class Timing(latency.Timing):
    """The measurements of one method over all repeats."""

    own: list[float] = field(default_factory=list)  # seconds inside the method at each further step
    own_first: list[float] = field(default_factory=list)  # and at the first
    own_busy: list[float] = field(default_factory=list)  # processor seconds of the method's part of each further step
    peak: int = 0  # most bytes that a call needed in addition to those in use before it
    counters: dict[str, Any] = field(default_factory=dict)


def time_call(model: Any, inputs: Any, method: Method, timing: Timing, script: Script | None = None, **kw: Any) -> None:
    """Run one call and add its times to `timing`."""
    timed, trace, memory = Timed(inner=method, script=script), Trace(), Memory(model.device)
    latency.time_call(model, inputs, timed, timing, trace=trace, **kw)
    timing.peak = max(timing.peak, memory.peak())
    own = [seconds(*span) for span in timed.spans]
    timing.own_first.append(own[0])
    timing.own.extend(own[1:])
    timing.own_busy.extend(timed.busy[1:])
    timing.counters = trace.summary()


def measure(
    model: Any,
    inputs: Any,
    methods: Mapping[str, tuple[Method, Script | None]],
    *,
    new_tokens: int,
    repeats: int = 3,
    warmups: int = 1,
    **generate_kwargs: Any,
) -> list[Timing]:
    """Time all methods in turns; the first one is the baseline."""
    timings = {label: Timing(label) for label in methods}
    for repeat in range(-warmups, repeats):
        for label, (method, script) in methods.items():
            timing = Timing(label) if repeat < 0 else timings[label]
            length = 4 if repeat < 0 else new_tokens
            options = {"do_sample": False, "min_new_tokens": length, "max_new_tokens": length, **generate_kwargs}
            time_call(model, inputs, method, timing, script, **options)
    return list(timings.values())


class Memory:
    """Track the peak of memory beyond what was in use when the object was created."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
            return
        _trim()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the process's peak so far
        self.start = _status("VmRSS")

    def peak(self) -> int:
        """Return bytes; on a CPU from the kernel's count of resident pages, 0 on systems without one."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return max(0, _status("VmHWM") - self.start)


def _status(name: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _trim() -> None:
    """Return freed memory to the system, so that it does not count as memory in use."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def table(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Return one row per method, in milliseconds and MiB, with ratios to the first."""
    base, rows = timings[0], latency.table(timings)
    for row, timing in zip(rows, timings, strict=True):
        own = fmean(timing.own)
        # the model's part of the same steps
        rest = fmean(t for run in timing.intervals for t in run) - own
        row |= {
            "own_first_ms": 1e3 * median(timing.own_first),
            "own_ms_per_step": 1e3 * own,
            "own_ratio": 1 + own / rest,
            "own_cpu_ratio": 1 + fmean(timing.own_busy) / fmean(base.busy),
            "extra_memory_mib": (timing.peak - base.peak) / 2**20,
            "plausible_tokens": timing.counters.get("median_plausible_tokens"),
        }
    return rows


def bench_table(rows: Sequence[Mapping[str, Any]], caption: str) -> Table:
    """Format the rows of `table`: what `revisit bench` prints, and what was measured inside."""
    plain = latency.bench_table(rows, caption)
    heads = ("own ms/step", "× by own time", "× by own CPU time", "extra MiB", "plausible tokens")
    lines = [
        (
            *line,
            f"{row['own_ms_per_step']:.2f}",
            f"{row['own_ratio']:.4f}",
            f"{row['own_cpu_ratio']:.4f}",
            f"{row['extra_memory_mib']:.0f}",
            "–" if row["plausible_tokens"] is None else f"{row['plausible_tokens']:.0f}",
        )
        for line, row in zip(plain.rows, rows, strict=True)
    ]
    return Table((*plain.heads, *heads), lines, caption)
