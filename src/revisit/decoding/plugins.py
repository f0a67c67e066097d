"""Methods and benchmarks from outside this package: classes of a Python file, and what installed packages offer."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, get_type_hints

from revisit.errors import RevisitError


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """What installed packages offer under an entry point group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def describe(point: EntryPoint, kind: str) -> str:
    """An entry point as the beginning of a sentence."""
    return f"The {kind} {point.name!r} of the installed package {point.dist.name if point.dist else point.value!r}"


def load_installed(point: EntryPoint, kind: str) -> Any:
    """What an entry point names."""
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # whatever another package may raise
        raise RevisitError(f"{describe(point, kind)} could not be loaded: {type(error).__name__}: {error}.") from error


def check_fields(cls: type, where: str, what: str) -> None:
    """Raises RevisitError unless every annotated attribute is a ClassVar or a dataclass field with a default, of a type that exists."""
    own = [key for key, hint in vars(cls).get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if not set(own) <= {field.name for field in dataclasses.fields(cls)}:  # type: ignore[arg-type]
        raise RevisitError(f"{where} has {what} but is no dataclass: put @dataclass(frozen=True) above it.")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise RevisitError(f"{where} must have a default for {field.name!r}, so that its name alone can be used.")
    try:
        get_type_hints(cls)
    except Exception as error:  # an annotation is an expression, which may raise anything
        raise RevisitError(f"{where} has an annotation that means nothing: {type(error).__name__}: {error}.") from error


def class_from_file(path: Path, name: str, kind: str) -> Any:
    """What a Python file calls `name`; the file is run once in a process, as a module of its own."""
    path = path.expanduser()
    if not path.is_file():
        raise RevisitError(f"There is no file {str(path)!r} to take a {kind} from.")
    path = path.resolve()
    module = f"revisit_file_{path.stem}_{abs(hash(str(path))):x}"
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module])
        except (Exception, SystemExit) as error:  # whatever a user's file may raise
            del sys.modules[module]
            raise RevisitError(f"{path} could not be run: {type(error).__name__}: {error}.") from error
    if not hasattr(sys.modules[module], name):
        raise RevisitError(f"{path} has no class {name!r}; write path/to/file.py:Class.")
    return getattr(sys.modules[module], name)


def class_missing(path: Path, kind: str) -> RevisitError:
    """The sentence for a file named without its class; the classes are read from its text, and nothing of it runs."""
    try:
        tree = ast.parse(path.expanduser().read_bytes())
    except OSError as error:
        return RevisitError(f"There is no file {str(path)!r} to take a {kind} from: {error.strerror}.")
    except (SyntaxError, ValueError) as error:
        return RevisitError(f"{path} is no Python that can be read: {error}.")
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if not classes:
        return RevisitError(f"{path} has no class; a {kind} is named path/to/file.py:Class.")
    return RevisitError(
        f"{path} needs the class of the {kind} after it: {' or '.join(f'{path}:{c}' for c in classes)}."
    )
