"""Every benchmark by name: built in, registered in this process, from a file, or from an installed package.

A built-in benchmark is a module of this package whose class carries `@register`; there is no list to keep. From outside,
a benchmark comes by the same decorator, by the text `path/to/file.py:Class`, or by an entry point of the group
`revisit.benchmarks`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import types
import typing
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from revisit.benchmarks.base import Benchmark
from revisit.decoding.grammar import class_from_file
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
    return tuple(sorted({*_registered, *_installed()}))


def find(name: str) -> type[Benchmark]:
    """The class of a benchmark, by its name or as `path/to/file.py:Class`; a class from a file is registered."""
    _import_built_in()
    file, _, cls = name.rpartition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), cls)
    key = name if name in _registered else name.lower().replace("-", "_")
    if key in _registered:
        return _registered[key]
    if key in _installed():
        return _from_package(_installed()[key])
    raise unknown("benchmark", name, names())


def get(name: str, /, **options: Any) -> Benchmark:
    """The benchmark `name` with `options`; string values (from a command line) are parsed to the field's type."""
    cls: Any = find(name)
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    for option in options:
        if option not in fields:
            raise unknown(f"option of benchmark {cls.name!r}:", option, fields)
    benchmark: Benchmark = cls(**{k: _parse(k, v, hints[k]) for k, v in options.items()})
    return benchmark


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


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    """What installed packages offer."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _from_package(point: EntryPoint) -> type[Benchmark]:
    where = f"The benchmark {point.name!r} of the installed package {point.dist.name if point.dist else point.value!r}"
    try:
        found = point.load()
    except Exception as error:  # whatever another package may raise
        raise RevisitError(f"{where} could not be loaded: {type(error).__name__}: {error}.") from error
    _check_class(found, where)
    checked: type[Benchmark] = found
    return register(checked)


def _from_file(path: Path, name: str) -> type[Benchmark]:
    cls: type[Benchmark] = class_from_file(path, name, "benchmark")
    _check_class(cls, f"{path}:{name}")
    return register(cls)


def _check_class(cls: Any, where: str) -> None:
    """One sentence unless this class can be used as a benchmark."""
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
    own = [key for key, hint in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if not set(own) <= {field.name for field in dataclasses.fields(cls)}:
        raise RevisitError(f"{where} has options but is no dataclass: put @dataclass(frozen=True) above it.")


def _parse(name: str, value: Any, kind: Any) -> Any:
    """`value` as `kind` if it is a string that has to be one of bool, int, float, Path or tuple."""
    if not isinstance(value, str):
        return value
    members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if type(None) in members and value.lower() in ("none", ""):
        return None
    for member in members:
        origin = typing.get_origin(member) or member
        if origin is tuple:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if origin is bool:
            if value.lower() in ("true", "yes", "1", "on"):
                return True
            if value.lower() in ("false", "no", "0", "off"):
                return False
            raise RevisitError(f"Option {name!r} must be true or false, not {value!r}.")
        if origin in (int, float, Path):
            try:
                return origin(value)
            except ValueError as error:
                raise RevisitError(f"Option {name!r} must be a {origin.__name__}, not {value!r}.") from error
    return value
