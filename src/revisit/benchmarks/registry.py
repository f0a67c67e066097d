"""Every benchmark by name: built in, registered in this process, from a file, or from an installed package.

A built-in benchmark is a module of this package whose class carries `@register`; there is no list to keep. From outside,
a benchmark comes by the same decorator, by the text `path/to/file.py:Class`, or by an entry point of the group
`revisit.benchmarks`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from revisit.benchmarks.base import Benchmark
from revisit.decoding.options import parse_settings
from revisit.decoding.plugins import check_fields, class_from_file, class_missing, describe, installed, load_installed
from revisit.errors import RevisitError, unknown

GROUP = "revisit.benchmarks"
_registered: dict[str, type[Benchmark]] = {}

AnyBenchmark = TypeVar("AnyBenchmark", bound=type[Benchmark])


def register(cls: AnyBenchmark) -> AnyBenchmark:
    """Class decorator: the benchmark is known by its `name` to everything that takes a benchmark's name."""
    _check_class(cls, getattr(cls, "__name__", repr(cls)))
    known = _registered.get(cls.name)
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RevisitError(
            f"{cls.__name__}: there is a benchmark named {cls.name!r} already; give this one another name."
        )
    _registered[cls.name] = cls
    return cls


def names() -> tuple[str, ...]:
    """The registered benchmark names, sorted."""
    _import_built_in()
    return tuple(sorted({*_registered, *installed(GROUP)}))


def find(name: str) -> type[Benchmark]:
    """The class of a benchmark, by its name or as `path/to/file.py:Class`; a class from a file is registered."""
    _import_built_in()
    file, _, cls = name.rpartition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), cls)
    if name.endswith(".py"):
        raise class_missing(Path(name), "benchmark")
    key = name if name in _registered else name.lower().replace("-", "_")
    if key in _registered:
        return _registered[key]
    if key in installed(GROUP):
        return _from_package(installed(GROUP)[key])
    raise unknown("benchmark", name, names())


def get(name: str, /, **options: Any) -> Benchmark:
    """The benchmark `name` with `options`; string values (from a command line) are parsed to the field's type."""
    cls = find(name)
    return cls(**parse_settings(cls, options))


def title(name: str) -> str:
    """What a report calls the benchmark; the name itself if nobody registered it in this process."""
    _import_built_in()
    return _registered[name].title if name in _registered else name


def parts(name: str) -> str:
    """What a report calls the benchmark's metrics such as "coco_random/F1", taken together."""
    _import_built_in()
    return _registered.get(name, Benchmark).parts


@functools.cache
def _import_built_in() -> None:
    """Imports the modules of this package, whose classes register themselves."""
    import revisit.benchmarks as package

    for module in pkgutil.iter_modules(package.__path__):
        if not module.ispkg:
            importlib.import_module(f"{package.__name__}.{module.name}")


def _from_package(point: EntryPoint) -> type[Benchmark]:
    found: type[Benchmark] = load_installed(point, "benchmark")
    _check_class(found, describe(point, "benchmark"))
    return register(found)


def _from_file(path: Path, name: str) -> type[Benchmark]:
    cls: type[Benchmark] = class_from_file(path, name, "benchmark")
    _check_class(cls, f"{path}:{name}")
    return register(cls)


def _check_class(cls: Any, where: str) -> None:
    """Raises RevisitError unless this class can be used as a benchmark."""
    if not isinstance(cls, type) or not issubclass(cls, Benchmark):
        raise RevisitError(f"{where} is no benchmark: it must be a class derived from revisit.Benchmark.")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise RevisitError(f"{where} needs a name of letters, digits and underscores, such as name = 'mine'.")
    for needed in ("metrics", "headline", "max_new_tokens"):
        if not hasattr(cls, needed):
            raise RevisitError(f"{where} needs a class attribute {needed!r}; see revisit.Benchmark.")
    if not any(metric.name == cls.headline for metric in cls.metrics):
        raise RevisitError(f"{where}: its headline {cls.headline!r} is none of its metrics.")
    check_fields(cls, where, "options")
