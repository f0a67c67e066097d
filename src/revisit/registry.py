"""Settings of methods, benchmarks and runs, and classes with settings by name.

A built-in class is its module and nothing else: the modules of a package are its list. From outside, a class comes by the
decorator `register`, by the text `path/to/file.py:Class`, or by an entry point of a group with the package's name.

    entry:  name  |  name:key=value,key=value        settings may also be separated by colons
    list:   entry,entry,...                          a convenience: options can also be repeated
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.errors import PydanticUserError

from revisit.errors import RevisitError, unknown, unknown_setting

if TYPE_CHECKING:
    from pydantic import ValidationInfo
    from typing_extensions import Self

MAX_SEED = 2**63 - 1
MAX_BEAMS = 64  # each has a key-value cache of its own

Count = Annotated[int, Field(ge=1, le=100_000_000)]
Beams = Annotated[int, Field(ge=1, le=MAX_BEAMS)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Temperature = Annotated[float, Field(ge=1e-5, le=1e5)]  # logits divided by less could overflow
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[float, Field(ge=-1e9, le=1e9)]
Strength = Annotated[float, Field(ge=0, le=1e9)]
PositiveNumber = Annotated[float, Field(gt=0, le=1e9)]
WholeNumber = Annotated[int, Field(ge=0, le=100_000_000)]

KINDS = {
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "null": "none",
    "string": "a text",
    "object": "keys with values",
    "array": "a list",
}


class Settings(BaseModel):
    """A frozen set of typed fields. Text, as on a command line, is read by a field's type.

    Raises:
        RevisitError: For an unknown field or a wrong value; names the class, the field, the value and what is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **settings: Any) -> None:
        """Validate the settings."""
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise as_sentence(type(self), error, settings) from None

    @classmethod
    def read(cls, values: Mapping[Any, Any], where: str) -> Self:
        """The settings in a file or another place, which begins the sentence about a wrong one."""
        named = {str(key): value for key, value in values.items()}
        try:
            instance = cls.__new__(cls)
            cls.__pydantic_validator__.validate_python(named, self_instance=instance)
            return instance
        except ValidationError as error:
            raise as_sentence(cls, error, named, where) from None

    @field_validator("*", mode="before")
    @classmethod
    def _read_value(cls, value: object, info: ValidationInfo) -> object:
        return read_value(value, cls.model_fields[str(info.field_name)].annotation)

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if name in cls.model_fields:
            raise RevisitError(
                f"The settings of a {cls.__name__} are fixed: replace({name}=...) returns a changed copy."
            )
        kind = type(value).__name__
        raise RevisitError(
            f"{cls.__name__} has no setting {name!r}: declare it in the class, as in {name}: {kind} = ..."
        )

    def __str__(self) -> str:
        return repr(self)

    def replace(self, **changes: Any) -> Self:
        """These settings with some changed; all are validated again."""
        return type(self)(**{**dict(self), **changes})


def read_value(value: object, hint: Any) -> object:
    """A value as pydantic takes it: what pydantic would read too generously is refused, and text lists are split."""
    members = _members(hint)
    lists = [member for member in members if get_origin(member) is tuple]
    if isinstance(value, str):
        if str in members or Any in members or any(value in get_args(m) for m in members if get_origin(m) is Literal):
            return value
        if type(None) in members and value.strip().lower() in ("none", "null", ""):
            return None
        if lists and Any not in get_args(lists[0]):
            return [part.strip() for part in without_brackets(value).split(",") if part.strip()]
        return value
    if isinstance(value, (range, list, tuple)):
        value = list(value)
    elif lists and isinstance(value, (int, float)) and not {int, float} & set(members):
        value = [value]
    if bool in members:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            raise ValueError("neither true nor false")
    elif any(isinstance(part, bool) for part in (value if isinstance(value, list) else [value])) and members != [Any]:
        raise ValueError("true and false are not numbers")
    return value


def without_brackets(text: str) -> str:
    """A list without the brackets around it, if there are any; raises RevisitError for an opening bracket alone."""
    text = text.strip()
    closing = {"[": "]", "(": ")"}.get(text[:1])
    if closing is None:
        return text
    if not text.endswith(closing):
        raise RevisitError(f"The list {text[:60]!r} begins with {text[0]} but does not end with {closing}.")
    return text[1:-1].strip()


def as_sentence(cls: type[Settings], error: ValidationError, given: Mapping[str, Any], where: str = "") -> RevisitError:
    """What is wrong with the first wrong field, in one sentence."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RevisitError):
        return RevisitError(f"{where}: {cause}") if where else cause
    field = str(first["loc"][0]) if first["loc"] else ""
    known = list(cls.model_fields)
    if field not in known:
        owner = cls.__name__ if known else getattr(cls, "name", cls.__name__)
        return unknown_setting(owner, field, known, f"key in {where}:" if where else "")
    value, owner = given.get(field), where or cls.__name__
    members = _members(cls.model_fields[field].annotation)
    choices = [str(choice) for member in members if get_origin(member) is Literal for choice in get_args(member)]
    schema = cls.model_json_schema()["properties"][field]
    if choices and isinstance(value, str):
        others = [_allowed(part) for part in schema.get("anyOf", []) if part.get("type") not in ("string", "null")]
        return unknown(f"{owner} {field}", value, [*choices, *others])
    return RevisitError(f"{owner}: {field} must be {_allowed(schema)}, not {value!r}.")


def describe(cls: type[Settings]) -> list[dict[str, Any]]:
    """The settings of a class, its own first, ready for JSON: name, default, what is allowed, what its docstring says."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        arguments = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]
        texts.update(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE))
    schema = cls.model_json_schema()["properties"] if cls.model_fields else {}
    return [
        {
            "name": name,
            "default": list(field.default) if isinstance(field.default, tuple) else field.default,
            "allowed": _allowed(schema[name]),
            "about": " ".join(texts.get(name, "").split()),
        }
        for name, field in sorted(cls.model_fields.items(), key=lambda item: item[0] not in cls.__annotations__)
    ]


def _members(hint: Any) -> list[Any]:
    """The members of a union, or the type alone, without what is annotated."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [member for part in get_args(hint) for member in _members(part)]
    return [hint]


def _allowed(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_allowed, schema["anyOf"])))
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return " or ".join(map(repr, choices))
    kind = KINDS.get(schema.get("type", ""), "another value")
    if schema.get("items"):
        return f"{kind}, each {_allowed(schema['items'])}"
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    if low is not None:
        return (
            f"{kind} from {_number(low)} to {_number(high)}"
            if high is not None
            else f"{kind} of at least {_number(low)}"
        )
    return (
        f"{kind} above {_number(above)} and at most {_number(high)}" if above is not None and high is not None else kind
    )


def _number(value: float) -> str:
    """A bound with separators between thousands; 1e9 is 1,000,000,000."""
    return f"{int(value):,}" if value == int(value) else str(value)


S = TypeVar("S", bound=Settings)
Class = TypeVar("Class", bound=type[Settings])


class Registry(Generic[S]):
    """Classes derived from `base`, found by their `name`.

    Args:
        kind: What they are called in sentences, such as "method".
        package: The package whose modules hold the built-in ones; also the group of entry points.
        base: What they derive from.
        check: Raises RevisitError for a class from outside that cannot be used; takes the class and where it comes from.
    """

    def __init__(self, kind: str, package: str, base: type[S], check: Callable[[Any, str], None]) -> None:
        self.kind, self.package, self.base, self._check = kind, package, base, check
        self.registered: dict[str, type[S]] = {}
        self._built_in: dict[str, type[S]] = {}
        self._seen: set[str] = set()  # modules of the package whose classes are known

    def register(self, cls: Class) -> Class:
        """Class decorator: in this process, the class is known by its `name`."""
        self.check(cls, cls.__name__)
        name = str(cls.name)  # type: ignore[attr-defined]
        known = self.built_in().get(name) or self.registered.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RevisitError(f"{cls.__name__}: a {self.kind} named {name!r} already exists; choose another name.")
        self.registered[name] = cls  # type: ignore[assignment]
        return cls

    def names(self) -> list[str]:
        """All names: built-in ones first, each group sorted."""
        return list(dict.fromkeys([*sorted(self.built_in()), *sorted({*self.registered, *installed(self.package)})]))

    def find(self, name: str) -> type[S]:
        """The class of this name; no file is run, whatever the name is."""
        if name in self.registered:
            return self.registered[name]
        if name.isidentifier():
            self._import(name)
        if name in self._built_in or name in self.built_in():
            return self._built_in[name]
        if name in installed(self.package):
            return self._from_package(installed(self.package)[name])
        raise unknown(self.kind, name, self.names())

    def load(self, text: str) -> type[S]:
        """The class of a name, or of `path/to/file.py:Class`, which is registered."""
        file, _, cls = text.rpartition(":")
        if file.endswith(".py"):
            return self._from_file(Path(file), cls)
        if text.endswith(".py"):
            raise RevisitError(f"{text} needs the class of the {self.kind} after it, as in {text}:Class.")
        return self.find(text)

    def get(self, name: str, /, **settings: Any) -> S:
        """The class of this name with settings; their values may be text, as on a command line."""
        return self.make(self.find(name), **settings)

    def make(self, cls: Callable[..., S], /, **settings: Any) -> S:
        """What a class, or another callable, makes of settings; raises RevisitError whatever it raises."""
        try:
            return cls(**settings)
        except RevisitError:
            raise
        except Exception as error:  # a class from outside may raise anything
            name = getattr(cls, "name", self.kind)
            raise RevisitError(
                f"The {self.kind} {name!r} cannot be created: {type(error).__name__}: {error}."
            ) from error

    def parse(self, entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """(name, settings) of an entry. A class from a file is registered: from then on its own name finds it."""
        name, settings = parse_entry(entry, self.kind)
        if name.endswith(".py") or ".py:" in name:
            return str(self.load(name).name), settings  # type: ignore[attr-defined]
        if ":" in name:
            raise RevisitError(f"A {self.kind}'s settings are key=value, as in {self.kind}:key=value, not {name!r}.")
        return name, settings

    def parse_list(self, given: object) -> list[tuple[str, dict[str, Any]]]:
        """(name, settings) of every entry in comma-separated text, or in a list of texts and mappings."""
        return [self.parse(entry) for entry in parse_list(given, lambda name: name in self.names() or ".py:" in name)]

    def built_in(self) -> dict[str, type[S]]:
        """The classes of the package's own modules."""
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            self._import(module.name)
        return self._built_in

    def by_class_name(self, name: str) -> type[S] | None:
        """The built-in class of this name, such as VCD; its module is tried first if it has the name in lower case."""
        self._import(name.lower())
        classes = {cls.__name__: cls for cls in self._built_in.values()}
        return classes.get(name) or {cls.__name__: cls for cls in self.built_in().values()}.get(name)

    def check(self, cls: object, where: str) -> None:
        """Raises RevisitError unless this class can be used."""
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise RevisitError(
                f"{where} is not a {self.kind}: it must be a class derived from revisit.{self.base.__name__}."
            )
        name = getattr(cls, "name", None)
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise RevisitError(f"{where} needs a name that can be typed, such as name = 'mine', not {name!r}.")
        if "__dataclass_fields__" in vars(cls):
            raise RevisitError(f"{where} needs no decorator: leave @dataclass out; its annotated fields are settings.")
        try:
            cls.model_rebuild()
        except (PydanticUserError, NameError) as error:
            raise RevisitError(
                f"{where} has an annotation that cannot be read: {str(error).splitlines()[0]}."
            ) from error
        for field, about in cls.model_fields.items():
            if about.is_required():
                raise RevisitError(f"{where} must have a default for {field!r}, so that its name alone can be used.")
        self._check(cls, where)

    def _import(self, module: str) -> None:
        """Import a module of the package, if there is one of this name, and note its classes."""
        path = f"{self.package}.{module}"
        if path in self._seen or importlib.util.find_spec(path) is None:
            return
        self._seen.add(path)
        for value in list(vars(importlib.import_module(path)).values()):
            own = isinstance(value, type) and issubclass(value, self.base) and value.__module__ == path
            if own and "name" in vars(value):
                self._built_in[str(value.name)] = value

    def _from_package(self, point: EntryPoint) -> type[S]:
        where = f"The {self.kind} {point.name!r} of the installed package {point.dist.name if point.dist else point.value!r}"
        try:
            found = point.load()
        except (Exception, SystemExit) as error:  # whatever another package may raise
            raise RevisitError(f"{where} could not be loaded: {type(error).__name__}: {error}.") from error
        self.check(found, where)
        return self.registered.setdefault(point.name, found)

    def _from_file(self, path: Path, name: str) -> type[S]:
        found: type[S] = class_from_file(path, name, self.kind)
        self.check(found, f"{path}:{name}")
        # Another process (a Ray worker) takes the class from the same file.
        copyreg.pickle(found, partial(_reduce, f"{path.expanduser().resolve()}:{name}"))  # type: ignore[arg-type]
        return self.register(found)


def _reduce(place: str, instance: Settings) -> tuple[object, ...]:
    return _restore, (place, dict(instance))


def _restore(place: str, settings: dict[str, Any]) -> Settings:
    path, _, name = place.rpartition(":")
    made: Settings = class_from_file(Path(path), name, "class")(**settings)
    return made


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """What installed packages offer under an entry point group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def class_from_file(path: Path, name: str, kind: str) -> Any:
    """What a Python file calls `name`; the file is run once in a process, as a module of its own."""
    path = path.expanduser()
    if not path.is_file():
        raise RevisitError(f"There is no file {str(path)!r} for the {kind}.")
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


# -- text -----------------------------------------------------------------------------------------------------------

KEY = re.compile(r"\s*[A-Za-z_][\w.]*\s*=")
LIST_OF_METHODS = "methods"  # the setting of a chain whose value is a list of entries itself


def parse_entry(entry: str | Mapping[str, Any], kind: str = "method") -> tuple[str, dict[str, Any]]:
    """(name, settings) of `name`, `name:key=value,key=value`, or `{name: ..., key: value}`."""
    if isinstance(entry, Mapping):
        if "name" not in entry:
            raise RevisitError(f"A {kind} with settings needs its name: {{name: …, …}}, not {dict(entry)!r}.")
        name, settings = parse_entry(str(entry["name"]), kind)
        return name, {**settings, **{str(key): value for key, value in entry.items() if key != "name"}}
    name, *assignments = split(str(entry), ":,", KEY.match)
    if not name.strip():
        raise RevisitError(f"A {kind} needs a name before its settings, as in name:key=value, not {entry!r}.")
    return name.strip(), parse_assignments(assignments, f"{kind}:key=value")


def parse_assignments(texts: Iterable[str], wanted: str = "--set key=value") -> dict[str, str]:
    """`key=value` strings as a mapping; each key may be given once."""
    settings: dict[str, str] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise RevisitError(f"Settings are written {wanted}, not {text!r}; for example alpha=1e-3.")
        if key.strip() in settings:
            raise RevisitError(f"The setting {key.strip()!r} is given twice; remove one.")
        settings[key.strip()] = value.strip()
    return settings


def parse_list(given: object, is_name: Callable[[str], bool]) -> list[Any]:
    """The entries of comma-separated text, or of a list whose texts may hold commas themselves.

    A comma outside brackets ends an entry, unless more of its last setting follows: no known name, or a chain's methods.
    """
    if not isinstance(given, (str, Mapping)) and isinstance(given, Iterable):
        return [found for entry in given for found in parse_list(entry, is_name)]
    if not isinstance(given, str):
        return [given]
    entries: list[str] = []
    for part in split(given, ","):
        last = split(entries[-1], ":,", KEY.match)[-1] if entries else ""
        in_chain = re.match(rf"\s*{LIST_OF_METHODS}\s*=\s*[^\[(\s]", last)
        if KEY.match(part) or (KEY.match(last) and (in_chain or not is_name(parse_entry(part)[0]))):
            entries[-1:] = [",".join([*entries[-1:], part])]
        elif part.strip():
            entries.append(part)
    return [entry.strip() for entry in entries]


def split(text: str, marks: str, before: Callable[[str], object] = lambda rest: True) -> list[str]:
    """The text cut at these marks outside brackets, where `before` is true of what follows."""
    pieces, start, depth = [], 0, 0
    for place, letter in enumerate(text):
        depth = max(0, depth + (letter in "[({") - (letter in "])}"))
        if letter in marks and depth == 0 and before(text[place + 1 :]):
            pieces.append(text[start:place])
            start = place + 1
    return [*pieces, text[start:]]
