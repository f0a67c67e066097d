"""What a run is to do: models × methods × benchmarks, with everything that decides the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from revisit.benchmarks.base import Benchmark
from revisit.decoding.method import Method, value_text
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError


@dataclass(frozen=True)
class Plan:
    """A grid of cells, as `EvalConfig.plan` returns it: names are resolved and settings validated."""

    methods: Mapping[str, tuple[Method, ...]]  # by model, since recommended settings depend on it
    benchmarks: tuple[Benchmark, ...]
    data: Mapping[str, Path]  # each benchmark's folder, by the benchmark's name
    output: Path
    limits: Mapping[str, int] = field(default_factory=dict)  # items of a benchmark, by its name; all where it has none
    batch_size: int = 8
    max_new_tokens: int | None = None  # None: each benchmark's own
    decoding: Decoding = field(default_factory=Decoding)  # its max_new_tokens is not used
    seeds: tuple[int, ...] = (0,)  # of sampling, each with cells of its own
    skip_bad_images: bool = False
    engine: str = "local"
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses an empty grid and repeated cells."""
        for kind, keys in (
            ("model", list(self.methods)),
            ("benchmark", [benchmark_label(b) for b in self.benchmarks]),
            ("seed", [str(seed) for seed in self.seeds]),
            *(("method", [label(m) for m in methods]) for methods in self.methods.values()),
        ):
            if not keys:
                raise RevisitError(f"Nothing to run: give at least one {kind}.")
            if repeated := {key for key in keys if keys.count(key) > 1}:
                raise RevisitError(f"The {kind} {sorted(repeated)[0]!r} is listed twice; list each once.")

    def to_json(self) -> dict[str, Any]:
        """The plan as the results of a run have it, methods and benchmarks by their labels."""
        return {
            "methods": {model: [label(method) for method in methods] for model, methods in self.methods.items()},
            "benchmarks": [benchmark_label(benchmark) for benchmark in self.benchmarks],
            "data": {name: str(path) for name, path in self.data.items()},
            "limits": dict(self.limits),
            "batch_size": self.batch_size,
            **dict(self.decoding),
            "max_new_tokens": self.max_new_tokens,
            "seeds": list(self.seeds),
            "skip_bad_images": self.skip_bad_images,
            "engine": self.engine,
            "engine_options": dict(self.engine_options),
        }

    def decoding_for(self, benchmark: Benchmark) -> Decoding:
        """The decoding settings of one benchmark."""
        return self.decoding.replace(max_new_tokens=self.max_new_tokens or benchmark.max_new_tokens)


@dataclass(frozen=True)
class PlannedCell:
    """A cell of a plan before it runs."""

    model: str
    method: str
    benchmark: str
    seed: int
    items: int
    stored: int  # answers of an earlier run
    seconds: float | None  # per answer, in that run

    @property
    def missing(self) -> int:
        """The answers that have to be generated."""
        return self.items - self.stored


def plan_text(cells: Sequence[PlannedCell]) -> str:
    """How much work a plan is, in one line; with an estimate of the time if some answers are stored."""
    counts = (len({getattr(cell, kind) for cell in cells}) for kind in ("model", "method", "benchmark"))
    grid = " × ".join(plural(n, kind) for n, kind in zip(counts, ("model", "method", "benchmark"), strict=True))
    answers, stored = sum(cell.items for cell in cells), sum(cell.stored for cell in cells)
    known = [cell.seconds for cell in cells if cell.seconds is not None]
    text = f"{plural(len(cells), 'cell')} ({grid}), {plural(answers, 'answer')}"
    text += f", {stored:,} of them stored" if stored else ""
    if known and stored < answers:
        seconds = sum(cell.missing * (cell.seconds or fmean(known)) for cell in cells)
        text += f", about {duration(seconds)} at the speed of the stored ones"
    return text


def plural(count: int, noun: str) -> str:
    """A count with its noun: "1 answer", "2,208 answers"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """A time for people: "27 s", "12 min", "3.5 h"."""
    return (
        f"{seconds:.0f} s"
        if seconds < 99.5
        else f"{seconds / 60:.0f} min"
        if seconds < 5970
        else f"{seconds / 3600:.1f} h"
    )


def label(method: Method) -> str:
    """The method's name with every setting that is not its default: what a table calls it."""
    return _label(method.name, method.settings(), type(method)().settings())


def benchmark_label(benchmark: Benchmark) -> str:
    """The benchmark's name with every option that is not its default, such as `pope(suffix=one-word)`."""
    return _label(benchmark.name, benchmark.options(), type(benchmark)().options())


def _label(name: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    own = [f"{key}={value_text(value)}" for key, value in settings.items() if defaults[key] != value]
    return f"{name}({', '.join(own)})" if own else name
