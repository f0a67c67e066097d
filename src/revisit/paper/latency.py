"""Decoding times of methods: `revisit bench`, and `revisit reproduce latency` over many images.

The time at which each token is available gives the time to the first token and the intervals between tokens. On a GPU these times are
events in its queue, so nothing waits before the call ends. Methods take turns within every repeat, so a slow minute affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from transformers import StoppingCriteria

from revisit.decoding.generate import generate
from revisit.decoding.method import Method
from revisit.errors import RevisitError
from revisit.eval.config import EvalConfig
from revisit.eval.report.document import Table
from revisit.eval.run import Reporter
from revisit.io.files import digest, inside, make_folder, slug, write_json
from revisit.io.records import read_json
from revisit.models.types import Model
from revisit.paper.study import Result, Subject, track

if TYPE_CHECKING:
    from revisit.models.types import Inputs


Time: TypeAlias = "float | torch.cuda.Event"  # on the host, or at a point of a GPU's queue


def wait(device: torch.device) -> None:
    """Wait until a GPU has finished its queue; return at once for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(device: torch.device) -> Time:
    """Return the host's time, or an event at this point of a GPU's queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Time, end: Time) -> float:
    """Return the seconds between two times of `now`; events must have completed."""
    if isinstance(start, float) or isinstance(end, float):
        return end - start  # type: ignore[operator]  # both are from the host
    return float(start.elapsed_time(end)) / 1e3


class Clock(StoppingCriteria):
    """Record when each token is available; never stop decoding."""

    def __init__(self) -> None:
        self.times: list[Time] = []  # see `now`
        self.busy: list[float] = []  # processor time of all threads at the same moments

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # type: ignore[override]
        self.times.append(now(input_ids.device))
        self.busy.append(time.process_time())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


COMPARABLE = 0.1  # spread of the times of a method above which ratios mean little


@dataclass
class Timing:
    """The times of one method, over all repeats."""

    label: str
    first: list[float] = field(default_factory=list)  # seconds to the first token, one per repeat
    intervals: list[list[float]] = field(default_factory=list)  # seconds between tokens, one list per repeat
    busy: list[float] = field(default_factory=list)  # processor seconds of each further step, over all threads
    rows: int = 1  # sequences that were decoded together

    @property
    def per_token(self) -> tuple[float, float]:
        """Mean and standard deviation over the repeats of a run's seconds per further token."""
        means = [fmean(run) for run in self.intervals if run]
        return fmean(means), stdev(means) if len(means) > 1 else 0.0

    @property
    def spread(self) -> float:
        """The largest difference of a repeat's time per token from their median, relative to it."""
        middle = median(means := [fmean(run) for run in self.intervals if run])
        return max(abs(mean - middle) for mean in means) / middle

    @property
    def quick(self) -> float:
        """Lower quartile of all intervals: the step time of an undisturbed machine."""
        every = sorted(interval for run in self.intervals for interval in run)
        return every[len(every) // 4]


def time_call(model: Model, inputs: Inputs, method: Method, timing: Timing, **kw: Any) -> None:
    """Run one call and add its times to `timing`."""
    clock = Clock()
    wait(model.device)
    started = now(model.device)
    timing.rows = len(generate(model, **inputs, method=method, stopping_criteria=[clock], **kw))
    wait(model.device)
    timing.first.append(seconds(started, clock.times[0]))
    timing.intervals.append([seconds(a, b) for a, b in pairwise(clock.times)])
    timing.busy.extend(b - a for a, b in pairwise(clock.busy))


def measure(
    model: Model,
    inputs: Inputs,
    methods: Mapping[str, Method],
    *,
    new_tokens: int,
    repeats: int = 3,
    warmups: int = 1,
    **generate_kwargs: Any,
) -> list[Timing]:
    """Time all methods in turns; the first one is the baseline."""
    for method in methods.values():
        if type(method).decode is not Method.decode:
            raise RevisitError(
                f"{method.name} has its own decoding loop, whose steps are not timed here: leave it out."
            )
    timings = {label: Timing(label) for label in methods}
    for repeat in range(-warmups, repeats):
        for label, method in methods.items():
            timing = Timing(label) if repeat < 0 else timings[label]
            length = 4 if repeat < 0 else new_tokens
            options: Result = {"do_sample": False, "min_new_tokens": length, "max_new_tokens": length}
            time_call(model, inputs, method, timing, **options | generate_kwargs)
    return list(timings.values())


def table(timings: Sequence[Timing]) -> list[Result]:
    """Return one row per method, in milliseconds, with ratios to the first."""
    base, rows = timings[0], []
    for timing in timings:
        middle = median(fmean(run) for run in timing.intervals if run)
        rows.append(
            {
                "method": timing.label,
                "first_token_ms": 1e3 * median(timing.first),
                "first_token_ratio": median(timing.first) / median(base.first),
                "ms_per_token": 1e3 * middle,
                "spread": timing.spread,
                "tokens_per_second": timing.rows / middle,
                "quick_ms_per_token": 1e3 * timing.quick,
                "ratio": timing.quick / base.quick,
                "cpu_ratio": fmean(timing.busy) / fmean(base.busy),
            }
        )
    return rows


def busy_warning(rows: Sequence[Result]) -> str:
    """Return a warning if the repeats of a method differ too much to compare it; empty otherwise."""
    worst = max(rows, key=lambda row: float(row["spread"]))
    if worst["spread"] <= COMPARABLE:
        return ""
    return (
        f"The times of {worst['method']} differ by up to {worst['spread']:.0%} between calls, too much to compare: the machine is busy. "
        "Use more --repeats, or compare CPU times."
    )


def bench_table(rows: Sequence[Result], caption: str) -> Table:
    """Build the table of `revisit bench` from the rows of `table`."""
    heads = ("method", "first token", "× greedy", "ms/token", "lower quartile", "× greedy", "tokens/s", "× by CPU time")
    lines = [
        (
            row["method"],
            f"{row['first_token_ms']:.0f} ms",
            f"{row['first_token_ratio']:.3f}",
            f"{row['ms_per_token']:.1f} ± {row['spread']:.0%}",
            f"{row['quick_ms_per_token']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['cpu_ratio']:.3f}",
        )
        for row in rows
    ]
    return Table(heads, lines, caption)


# -- over many images --------------------------------------------------------------------------------------------

PROTOCOL = {"warmups": 6, "repeats": 3, "max_new_tokens": 512}  # the paper's


def time_images(subject: Subject, reporter: Reporter) -> list[Timing]:
    """Time every method on every image by the paper's protocol; the repeats of an image count as one.

    The times of each image are stored as soon as they are measured, so a killed measurement resumes.
    """
    config = EvalConfig(model=(subject.model,), method=subject.methods, data=str(subject.folder), preset="paper")
    methods = dict(zip(subject.methods, config.methods_for(subject.model), strict=True))
    identity = [PROTOCOL, {name: [m.name, m.settings()] for name, m in methods.items()}, subject.settings()]
    folder = make_folder(inside(subject.out, "latency", digest(identity)[:12]))
    total = {name: Timing(name) for name in methods}
    warmups = PROTOCOL["warmups"]
    for item in track(reporter, f"latency of {len(methods)} methods", subject.items):
        file = inside(folder, f"{slug(item.id)}.json")
        if not file.exists():
            timings = measure(
                subject.loaded[0],
                subject.inputs([item]),
                methods,
                new_tokens=PROTOCOL["max_new_tokens"],
                repeats=PROTOCOL["repeats"],
                warmups=warmups,
                min_new_tokens=None,  # answers may end early
            )
            write_json(file, [asdict(timing) for timing in timings])
            warmups = 0
        for stored in read_json(file):
            timing = total[stored["label"]]
            timing.first.append(fmean(stored["first"]))
            timing.intervals.append([interval for run in stored["intervals"] for interval in run])
            timing.busy += stored["busy"]
    return list(total.values())
