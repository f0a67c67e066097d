"""Validated settings, and registries that find classes with settings by name.

A package lists its built-in classes in a table, `BUILT_IN`. Other classes are added by the decorator `register`, as
`path/to/file.py:Class`, or by an entry point of an installed package. In text, a class and its settings are written

    entry:  name  |  name:key=value,key=value
    list:   name,name,...                       only of names; an option is repeated for entries with settings
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property, wraps
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, validate_call

from revisit.errors import RevisitError, brief, invalid, short, unknown

if TYPE_CHECKING:
    from pydantic import ValidationInfo
    from typing_extensions import Self

P = ParamSpec("P")
R = TypeVar("R")
MAX_SEED = 2**63 - 1
MAX_BEAMS = 64  # each has its own key-value cache

Count = Annotated[int, Field(ge=1, le=100_000_000)]
Beams = Annotated[int, Field(ge=1, le=MAX_BEAMS)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Temperature = Annotated[float, Field(ge=1e-5, le=1e5)]  # dividing logits by less could overflow
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Strength = Annotated[float, Field(ge=0, le=1e9)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e9)]
WholeNumber = Annotated[int, Field(ge=0, le=100_000_000)]


class Settings(BaseModel):
    """A frozen set of typed fields. Text, as from a command line, is converted to each field's type.

    Raises:
        RevisitError: A field is unknown or its value is not allowed; the message names the class, the field and the value.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, /, **settings: Any) -> None:
        """Validate the settings."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise invalid(error, type(self).__name__, settings, [*type(self).model_fields]) from None

    @classmethod
    def read(cls, values: Mapping[str, object], where: str) -> Self:
        """Validate values from a file or another source, which error messages name instead of the class."""
        try:
            return cls(**{str(key): value for key, value in values.items()})
        except RevisitError as error:
            raise RevisitError(f"{where}: {str(error).removeprefix(f'{cls.__name__}: ')}") from None

    @field_validator("*", mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        return _from_text(value, cls.model_fields[str(info.field_name)].annotation)

    def __str__(self) -> str:
        return repr(self)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed; all are validated again."""
        given = {name: getattr(self, name) for name in self.model_fields_set}  # defaults may depend on the changes
        return type(self)(**{**given, **changes})


def _from_text(value: object, hint: object) -> object:
    """Convert what pydantic does not: "none", lists in text such as "0,2" or "[0,2]", and one number for a list."""
    members = _members(hint)
    has_list = any(get_origin(member) is tuple and Any not in get_args(member) for member in members)
    if not isinstance(value, str):
        lone_number = isinstance(value, (int, float)) and not {int, float} & {*members}
        return [value] if has_list and lone_number else value
    if str in members or any(value in get_args(member) for member in members if get_origin(member) is Literal):
        return value
    if type(None) in members and value.strip().lower() in ("none", "null", ""):
        return None
    return [part.strip() for part in without_brackets(value).split(",") if part.strip()] if has_list else value


def _members(hint: object) -> list[object]:
    """List the members of a union, or the type alone, without annotations."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def without_brackets(text: str) -> str:
    """Remove the brackets around a list, if there are any."""
    text = text.strip()
    return text[1:-1].strip() if text[:1] + text[-1:] in ("[]", "()") else text


def validated(function: Callable[P, R]) -> Callable[P, R]:
    """Validate the arguments of a function by their annotations, which must be importable at run time.

    An argument of another type raises a RevisitError that names the function, the argument and the value.
    """
    names = [*inspect.signature(function).parameters]

    @validate_call
    @wraps(function)
    def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            valid_args, valid_kwargs = arguments(*args, **kwargs)
        except ValidationError as error:
            values = {**dict(zip(names, args, strict=False)), **kwargs}
            raise invalid(error, function.__name__, values, names) from None
        return function(*valid_args, **valid_kwargs)

    return checked


S = TypeVar("S", bound=Settings)
Class = TypeVar("Class", bound=type[Settings])


class Registry(Generic[S]):
    """Classes derived from `base`, found by their `name`.

    Args:
        kind: What messages call such a class, for example "method".
        package: Package with the table of the built-in classes. Its last part names the entry point group: `revisit.methods`.
        base: The base class.
        check: Called with a class that is not built in and a description of its origin; raises RevisitError if it cannot be used.
    """

    def __init__(self, kind: str, package: str, base: type[S], check: Callable[[Any, str], None]) -> None:
        self.kind, self.package, self.base, self._check = kind, package, base, check
        self.group = f"revisit.{package.rpartition('.')[2]}"
        self.registered: dict[str, type[S]] = {}

    @cached_property
    def built_in(self) -> dict[str, str]:
        """Name -> "module:class"."""
        table: dict[str, str] = importlib.import_module(self.package).BUILT_IN
        return table

    def register(self, cls: Class) -> Class:
        """Make a class available by its `name` in this process; a class decorator."""
        self.check(cls, cls.__name__)
        name = str(cls.name)  # type: ignore[attr-defined]
        known = self.find(name) if name in self.registered or name in self.built_in else cls
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RevisitError(f"{cls.__name__}: a {self.kind} named {name!r} already exists; choose another name.")
        self.registered[name] = cls  # type: ignore[assignment]
        return cls

    def names(self) -> list[str]:
        """List all names: built-in ones first, each group sorted."""
        return list(dict.fromkeys([*sorted(self.built_in), *sorted({*self.registered, *installed(self.group)})]))

    def find(self, name: str) -> type[S]:
        """Return the class with this name. The name never refers to a file, so names from a network are safe."""
        if name in self.registered:
            return self.registered[name]
        name = self._spelled(name)
        if name in self.built_in:
            module, _, cls = self.built_in[name].partition(":")
            return getattr(importlib.import_module(module), cls)  # type: ignore[no-any-return]
        if (point := installed(self.group).get(name)) is None:
            raise unknown(self.kind, name, self.names())
        package = point.dist.name if point.dist else point.value
        where = f"The {self.kind} {name!r} of the installed package {package!r}"
        try:
            cls = point.load()
        except Exception as error:  # another package may raise anything
            raise RevisitError(
                f"{where} could not be loaded: {type(error).__name__}: {brief(error).rstrip('.')}."
            ) from error
        self.check(cls, where)
        return self.registered.setdefault(name, cls)

    def _spelled(self, name: str) -> str:
        """Return a built-in name as the table spells it: with underscores."""
        underscored = name.replace("-", "_")
        return underscored if underscored in self.built_in else name

    def load(self, text: str) -> type[S]:
        """Return the class with a name, or load and register `path/to/file.py:Class`."""
        file, _, name = text.rpartition(":")
        if text.endswith(".py"):
            raise RevisitError(f"{text} must be followed by the class of the {self.kind}, as in {text}:Class.")
        if not file.endswith(".py"):
            return self.find(text)
        path = Path(file).expanduser().resolve()
        cls: type[S] = class_from_file(path, name, self.kind)
        self.check(cls, text)
        # Another process (a Ray worker) loads the class from the same file.
        copyreg.pickle(cls, lambda instance: (_unpickle, (path, name, dict(instance))))
        return self.register(cls)

    def get(self, name: str, /, **settings: object) -> S:
        """Create an instance of the class with this name; the values of settings may be text."""
        return self.find(name)(**settings)

    def parse(self, entry: str | Mapping[str, object]) -> tuple[str, dict[str, object]]:
        """Split an entry into (name, settings); a class from a file is registered under its own name."""
        name, settings = parse_entry(entry, self.kind)
        return (str(self.load(name).name) if ".py" in name else self._spelled(name)), settings  # type: ignore[attr-defined]

    def parse_list(self, entries: object) -> list[tuple[str, dict[str, object]]]:
        """Split a list into entries, and each entry into (name, settings)."""
        return [self.parse(entry) for entry in parse_list(entries)]

    def check(self, cls: object, where: str) -> None:
        """Raise RevisitError unless this is a class that can be used; the message begins with `where`."""
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise RevisitError(
                f"{where} is not a {self.kind}: it must be a class derived from revisit.{self.base.__name__}."
            )
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise RevisitError(f"{where} needs a name that can be typed, such as name = 'mine', not {name!r}.")
        self._check(cls, where)


def _unpickle(path: Path, name: str, settings: dict[str, object]) -> Any:
    return class_from_file(path, name, "class")(**settings)


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group in installed packages, by name."""
    return {point.name: point for point in entry_points(group=group)}


def class_from_file(path: Path, name: str, kind: str) -> Any:
    """Return the class `name` from a Python file, which is run once per process, as a module of its own."""
    if not path.is_file():
        raise RevisitError(f"There is no file {str(path)!r} for the {kind}.")
    module = f"revisit_file_{path.stem}_{abs(hash(str(path))):x}"
    if module not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(module, path)
        sys.modules[module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[module])
        except (Exception, SystemExit) as error:  # a user's file may raise anything
            del sys.modules[module]
            raise RevisitError(
                f"{path} could not be run: {type(error).__name__}: {brief(error).rstrip('.')}."
            ) from error
    if not hasattr(sys.modules[module], name):
        raise RevisitError(f"{path} has no class {name!r}; write path/to/file.py:Class.")
    return getattr(sys.modules[module], name)


_NAME = re.compile(r"(?:[^=]*?\.py:\w+|[^:]*)")
_MARK = re.compile(r"[\[(]|[\])]|,(?=\s*[A-Za-z_][\w.]*\s*=)")  # brackets, and commas before a new `key=`


def parse_entry(entry: str | Mapping[str, object], kind: str = "method") -> tuple[str, dict[str, object]]:
    """Split `name`, `name:key=value,key=value`, or `{name: ..., key: value}` into (name, settings)."""
    if isinstance(entry, Mapping):
        if "name" not in entry:
            raise RevisitError(f"A {kind} with settings needs its name: {{name: …, …}}, not {short(dict(entry))}.")
        name, settings = parse_entry(str(entry["name"]), kind)
        return name, {**settings, **{str(key): value for key, value in entry.items() if key != "name"}}
    name = _NAME.match(entry)[0]  # type: ignore[index]
    if not name.strip():
        raise RevisitError(f"A {kind} needs a name before its settings, as in name:key=value, not {short(entry)}.")
    if "," in name:
        each = " ".join(f"--{kind} {part.strip()}" for part in entry.split(",", 2)[:2] if part.strip())
        hint = " (in a chain, use semicolons)" if kind == "method" else ""
        raise RevisitError(f"{short(entry)} lists several {kind}s: pass each separately, as in {each}{hint}.")
    assignments = _split(entry[len(name) + 1 :])
    file = {}
    if kind == "benchmark" and assignments[0] and "=" not in assignments[0]:  # yesno:questions.jsonl
        file = {"file": assignments.pop(0).strip()}
    if kind == "method" and name.strip().lower() in ("off", "none"):
        name = "greedy"
    return name.strip(), {**file, **parse_assignments(filter(None, assignments), f"{kind}:key=value")}


def _split(text: str) -> list[str]:
    """Split `key=value,key=value` at the commas before a key, except within brackets."""
    cuts, depth = [-1], 0
    for mark in _MARK.finditer(text):
        if mark[0] != ",":
            depth = max(0, depth + (1 if mark[0] in "[(" else -1))
        elif not depth:
            cuts.append(mark.start())
    return [text[start + 1 : end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def parse_assignments(texts: Iterable[str], form: str = "--set key=value") -> dict[str, str]:
    """Convert texts such as `key=value` to a mapping; error messages show the `form` of the option."""
    settings: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise RevisitError(f"Settings are written {form}, not {short(text)}.")
        if key.strip() in settings:
            raise RevisitError(f"The setting {short(key.strip())} is given twice; remove one.")
        settings[key.strip()] = value.strip()
    return settings


def parse_list(entries: object) -> list[Any]:
    """Split a list into entries. A text with settings (a colon) is one entry, other text is names separated by commas."""
    if isinstance(entries, str):
        return [entries] if ":" in entries else [name.strip() for name in entries.split(",") if name.strip()]
    if isinstance(entries, Mapping) or not isinstance(entries, Iterable):
        return [entries]
    return [entry for part in entries for entry in parse_list(part)]


def parse_links(text: str) -> list[str]:
    """Split the methods of a chain: "vcd,revisit", or "[vcd:alpha=2;revisit]" if one has settings."""
    return [entry for part in without_brackets(text).split(";") for entry in parse_list(part)]
