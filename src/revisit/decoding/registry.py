"""Every decoding method by name: built in, registered in this process, from a file, or from an installed package.

A method's module is imported when the method is asked for, and none of ours imports torch before it decodes, so listing
them is fast. Methods from outside come in three ways: the decorator `register`, the text `path/to/file.py:Class`, and the
entry points of the group `revisit.methods`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeVar

from revisit.decoding.grammar import parse_entry, parse_list
from revisit.decoding.method import Method
from revisit.decoding.options import parse_settings
from revisit.decoding.plugins import check_fields, class_from_file, class_missing, describe, installed, load_installed
from revisit.errors import RevisitError, unknown

GROUP = "revisit.methods"
BUILT_IN = {
    "greedy": "revisit.decoding.plain:Plain",
    "revisit": "revisit.methods.revisit:ReVisiT",
    "dola": "revisit.methods.dola:DoLa",
    "vcd": "revisit.methods.vcd:VCD",
    "m3id": "revisit.methods.m3id:M3ID",
    "code": "revisit.methods.code:CODE",
    "deco": "revisit.methods.deco:DeCo",
    "icd": "revisit.methods.icd:ICD",
    "pai": "revisit.methods.pai:PAI",
    "sid": "revisit.methods.sid:SID",
    "ritual": "revisit.methods.ritual:RITUAL",
    "avisc": "revisit.methods.avisc:AvisC",
    "apc": "revisit.methods.apc:APC",
    "chain": "revisit.methods.chain:Chain",
}
_registered: dict[str, type[Method]] = {}

AnyMethod = TypeVar("AnyMethod", bound=type[Method])


def register(cls: AnyMethod) -> AnyMethod:
    """Class decorator: the method is known by its `name` to everything that takes a method's name in this process."""
    check_class(cls, cls.__name__)
    known = _registered.get(cls.name)
    if cls.name in BUILT_IN or (known is not None and _origin(known) != _origin(cls)):
        raise RevisitError(f"{cls.__name__}: there is a method named {cls.name!r} already; give this one another name.")
    _registered[cls.name] = cls
    return cls


def names() -> list[str]:
    """All method names, plain decoding first."""
    return list(dict.fromkeys([*BUILT_IN, *_registered, *installed(GROUP)]))


def find(name: str) -> type[Method]:
    """The class of a method, by its registered name."""
    if name in _registered:
        return _registered[name]
    if name in BUILT_IN:
        module, _, cls = BUILT_IN[name].partition(":")
        found: type[Method] = getattr(importlib.import_module(module), cls)
        return found
    if name in installed(GROUP):
        return _from_package(installed(GROUP)[name])
    raise unknown("method", name, names())


def get(name: str, /, **settings: Any) -> Method:
    """A method with the given settings; values may be strings, as typed on a command line."""
    return _recommended(find(name), None, settings)


def recommended(name: str, model: Any, /, **settings: Any) -> Method:
    """A method with what is recommended for a loaded model, where the method knows that, and the given settings."""
    return _recommended(find(name), model, settings)


def parse_method(text: Any) -> tuple[str, dict[str, Any]]:
    """(registered name, settings) of `name:key=value,...`, of `path/to/file.py:Class:key=value,...`, or of a mapping.

    A class from a file is registered: from then on its own name finds it.
    """
    name, settings = parse_entry(text)
    file, _, cls = name.rpartition(":")
    if file.endswith(".py"):
        return _from_file(Path(file), cls).name, settings
    if name.endswith(".py"):
        raise class_missing(Path(name), "method")
    if ":" in name:
        raise RevisitError(
            f"A method's settings are key=value, as in revisit:alpha=1e-3,layers=all, not {name.partition(':')[2]!r}."
        )
    return name, settings


def parse_methods(given: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, settings) of every method in comma-separated text, or in a list of texts and mappings."""
    return [parse_method(entry) for entry in parse_list(given, lambda name: name in names() or ".py:" in name)]


def method_text(name: str, settings: Mapping[str, Any]) -> str:
    """What `parse_method` reads as this method: its name, and the settings that are not its defaults."""
    defaults = get(name).settings() if name in names() else {}
    told = {key: value for key, value in settings.items() if key not in defaults or defaults[key] != value}
    return ":".join([name, *([",".join(f"{key}={value_text(told[key])}" for key in told)] if told else [])])


def value_text(value: Any) -> str:
    """A setting's value as it is typed; the links of a chain as methods with their settings."""
    if isinstance(value, Mapping):
        return method_text(value["name"], {key: own for key, own in value.items() if key != "name"})
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(value_text, value))}]"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def as_method(method: Any, model: Any = None, /, **settings: Any) -> Method:
    """A method from whatever names one: a method, its class, text, or a mapping with its name.

    A method is taken with the settings it has. Where only its class or name is given, what is recommended for `model` holds,
    if a model is given and the method knows that. `settings` come on top.
    """
    if isinstance(method, Method):
        _check_begin(type(method), type(method).__name__)
        made = partial(dataclasses.replace, method) if settings else lambda: method
        return _made(type(method), made, model, settings)
    if isinstance(method, type) and issubclass(method, Method):
        check_class(method, method.__name__)
        return _recommended(method, model, settings)
    if not isinstance(method, (str, Mapping)):
        raise RevisitError(
            f"method must be a decoding method such as revisit.ReVisiT(), or its name such as 'revisit' (plain decoding is 'greedy'), not "
            f"{method!r}."
        )
    name, own = parse_method(method)
    return _recommended(find(name), model, {**own, **settings})


def refuse_settings(method: Method, given: Mapping[str, Any]) -> None:
    """Raises RevisitError for a setting of the method among the arguments of `generate`, where it would be none."""
    for field in dataclasses.fields(method):
        if field.name in given:
            text = f"{method.name}:{field.name}={given[field.name]}"
            raise RevisitError(
                f"{field.name} is a setting of the method, not an argument of generate: write method={text!r}."
            )


def _recommended(cls: type[Method], model: Any, settings: Mapping[str, Any]) -> Method:
    knows = model is not None and hasattr(cls, "recommended")
    return _made(cls, partial(cls.recommended, model) if knows else cls, model, settings)  # type: ignore[attr-defined]


def _made(cls: type[Method], make: Callable[..., Method], model: Any, settings: Mapping[str, Any]) -> Method:
    """What `make` makes of settings, for a model if there is one; raises RevisitError whatever the class raises."""
    parsed = parse_settings(cls, settings)
    try:
        made = make(**parsed)
        return made if model is None else made.for_model(model)
    except RevisitError:
        raise
    except Exception as error:  # a class from outside may raise anything
        raise RevisitError(f"The method {cls.name!r} cannot be made: {type(error).__name__}: {error}.") from error


def check_class(cls: Any, where: str) -> None:
    """Raises RevisitError unless this class can be used as a method."""
    if not isinstance(cls, type) or not issubclass(cls, Method):
        raise RevisitError(f"{where} is no decoding method: it must be a class derived from revisit.Method.")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
        raise RevisitError(f"{where} needs a name that can be typed, such as name = 'mine', not {name!r}.")
    check_fields(cls, where, "settings")
    _check_begin(cls, where)


def _check_begin(cls: type[Method], where: str) -> None:
    if cls.begin is Method.begin:
        raise RevisitError(f"{where} cannot decode: it must have a method begin(self, run).")


def _origin(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _from_file(path: Path, cls: str) -> type[Method]:
    """A class of a Python file, registered."""
    found: type[Method] = class_from_file(path, cls, "method")
    check_class(found, f"{path}:{cls}")
    copyreg.pickle(found, partial(_by_file, str(path.expanduser().resolve())))  # type: ignore[arg-type]
    return register(found)


def _by_file(path: str, method: Method) -> tuple[Any, ...]:
    """How a method from a file is pickled: another process (a Ray worker) takes its class from the same file."""
    settings = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return _restored, (path, type(method).__qualname__, settings)


def _restored(path: str, cls: str, settings: dict[str, Any]) -> Method:
    return _from_file(Path(path), cls)(**settings)


def _from_package(point: EntryPoint) -> type[Method]:
    """The class that an installed package offers, registered under the name it is offered by."""
    found: type[Method] = load_installed(point, "method")
    check_class(found, describe(point, "method"))
    return _registered.setdefault(point.name, found)
