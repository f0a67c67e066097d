"""Every benchmark by name: built in, registered in this process, from a file, or from an installed package."""

from __future__ import annotations

from typing import Any

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark
from revisit.registry import Registry


def _check(cls: Any, where: str) -> None:
    """Raise RevisitError unless a class has the attributes that every benchmark has."""
    for needed in ("metrics", "headline", "max_new_tokens"):
        if not hasattr(cls, needed):
            raise RevisitError(f"{where} needs a class attribute {needed!r}; see revisit.Benchmark.")
    if not any(metric.name == cls.headline for metric in cls.metrics):
        raise RevisitError(f"{where}: its headline {cls.headline!r} is not one of its metrics.")


BENCHMARKS = Registry("benchmark", "revisit.eval.benchmarks", Benchmark, _check)
names = BENCHMARKS.names
register = BENCHMARKS.register


def find(name: str) -> type[Benchmark]:
    """Return the class of a benchmark, by its name in any spelling ("LLaVA-Bench") or as `path/to/file.py:Class`."""
    spelled = name.lower().replace("-", "_")
    return BENCHMARKS.load(name if ".py" in name or name in BENCHMARKS.registered else spelled)


def get(name: str, /, **options: Any) -> Benchmark:
    """Return a benchmark with options, by its name or as `path/to/file.py:Class`; values may be text, as on a command line."""
    return find(name)(**options)


def title(name: str) -> str:
    """Return the benchmark's title in reports; its name if this process has no such benchmark."""
    return BENCHMARKS.find(name).title if name in BENCHMARKS.names() else name
