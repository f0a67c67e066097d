"""Classes by name, for methods and benchmarks alike, and how they are written in text.

A built-in class is its module and nothing else: the modules of a package are its list. From outside, a class comes by the
decorator `register`, by the text `path/to/file.py:Class`, or by an entry point of a group with the package's name.

    entry:  name  |  name:key=value,key=value        settings may also be separated by colons
    list:   entry,entry,...                          a convenience: options can also be repeated
"""

from __future__ import annotations

import ast
import copyreg
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic.errors import PydanticUserError

from revisit.errors import RevisitError, unknown
from revisit.validation import Settings

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
            raise RevisitError(f"{cls.__name__}: there is a {self.kind} named {name!r} already; choose another name.")
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
            raise class_missing(Path(text), self.kind)
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
            raise RevisitError(f"The {self.kind} {name!r} cannot be made: {type(error).__name__}: {error}.") from error

    def parse(self, entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """(name, settings) of an entry. A class from a file is registered: from then on its own name finds it."""
        name, settings = parse_entry(entry, self.kind)
        if name.endswith(".py") or ".py:" in name:
            return str(self.load(name).name), settings  # type: ignore[attr-defined]
        if ":" in name:
            raise RevisitError(f"A {self.kind}'s settings are key=value, as in {self.kind}:key=value, not {name!r}.")
        return name, settings

    def parse_list(self, given: Any) -> list[tuple[str, dict[str, Any]]]:
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

    def check(self, cls: Any, where: str) -> None:
        """Raises RevisitError unless this class can be used."""
        if not isinstance(cls, type) or not issubclass(cls, self.base):
            raise RevisitError(
                f"{where} is no {self.kind}: it must be a class derived from revisit.{self.base.__name__}."
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


def _reduce(place: str, instance: Settings) -> tuple[Any, ...]:
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
        return RevisitError(f"{path} is not Python that can be read: {error}.")
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if not classes:
        return RevisitError(f"{path} has no class; a {kind} is named path/to/file.py:Class.")
    return RevisitError(
        f"{path} needs the class of the {kind} after it: {' or '.join(f'{path}:{c}' for c in classes)}."
    )


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
            raise RevisitError(f"The setting {key.strip()!r} is given twice; leave one out.")
        settings[key.strip()] = value.strip()
    return settings


def parse_list(given: Any, is_name: Callable[[str], bool]) -> list[Any]:
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
