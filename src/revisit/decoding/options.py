"""Settings of methods and benchmarks, read by the types of a dataclass's fields: from text, YAML, JSON or Python."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from revisit.decoding.grammar import without_brackets
from revisit.errors import RevisitError, unknown_setting
from revisit.settings import truth

# Half a millisecond, a dozen times a method.
type_hints: Callable[..., dict[str, Any]] = functools.lru_cache(maxsize=256)(get_type_hints)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may be: `Annotated[int, Bounds(1, 64)]`; without `low` itself if `above`."""

    low: float
    high: float = 100_000_000
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        return f"above {self.low:,} and at most {self.high:,}" if self.above else f"from {self.low:,} to {self.high:,}"


def parse_settings(cls: Any, settings: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Settings as the fields of a dataclass want them; strings (from a command line) are read by the field's type.

    `where` they were found begins the sentence about a wrong one; the class's name if nothing is said.
    """
    hints = type_hints(cls, include_extras=True)
    known = {f.name for f in dataclasses.fields(cls)}
    parsed = {}
    for key, value in settings.items():
        if key not in known:
            owner = cls.__name__ if known else getattr(cls, "name", cls.__name__)
            raise unknown_setting(owner, str(key), known, f"key in {where}:" if where else "")
        what = f"{where or cls.__name__}: {key}"
        parsed[key] = (
            _parse(value, hints[key], what) if isinstance(value, str) else _typed(as_tuples(value), hints[key], what)
        )
    return parsed


def read_fields(instance: Any) -> None:
    """Reads every field of a frozen dataclass by its type, in place; raises RevisitError for the first wrong one."""
    given = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    for key, value in parse_settings(type(instance), given).items():
        object.__setattr__(instance, key, value)


def _typed(value: Any, hint: Any, what: str) -> Any:
    """The value if it is of the hinted type, in a tuple if that is wanted; raises RevisitError otherwise."""
    for read in (value, (value,)):
        if fits(read, hint):
            return read
    raise RevisitError(f"{what} must be {_say(hint)}, not {value!r}.")


def as_tuples(value: Any) -> Any:
    """Lists as tuples, at every depth: settings can be compared and hashed."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a setting's type: whole numbers are numbers too, and no number is infinite or huge."""
    if hint is Any:
        return True
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return fits(value, kind) and value in bounds
    if get_origin(hint) in (types.UnionType, typing.Union):
        return any(fits(value, member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        inner = inner[:1] * len(value) if isinstance(value, tuple) and inner[-1] is Ellipsis else inner
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if get_origin(hint) is Mapping:
        key, kind = get_args(hint)
        return isinstance(value, Mapping) and all(fits(k, key) and fits(v, kind) for k, v in value.items())
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint)


def _parse(text: str, hint: Any, what: str, alone: bool = True) -> Any:
    """Read a string as the hinted type; for a union, as the first member that accepts it."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        errors = []
        for member in sorted(get_args(hint), key=_takes_any_text):
            try:
                return _parse(text, member, what, alone=False)
            except RevisitError as error:
                errors.append(error)
        if any(get_origin(member) is Literal for member in get_args(hint)):
            return text
        raise errors[0]
    if get_origin(hint) is Annotated:
        return _typed(_parse(text, get_args(hint)[0], what), hint, what)
    if hint is type(None):
        if text.lower() in ("none", "null", ""):
            return None
    elif hint is bool:
        if (value := truth(text)) is not None:
            return value
    elif hint in (int, float):
        try:
            return _typed(hint(text), hint, what)
        except (ValueError, OverflowError):
            pass
    elif get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if inner is Any:
            return text  # left to the settings' own reading
        return tuple(_parse(part.strip(), inner, what) for part in without_brackets(text).split(",") if part.strip())
    elif hint is Path:
        return Path(text)
    elif hint is str or hint is Any or (get_origin(hint) is Literal and (alone or text in get_args(hint))):
        return text  # a wrong name alone is left to the settings' own check, which suggests the nearest
    raise RevisitError(f"{what} must be {_say(hint)}, not {text!r}.")


def _takes_any_text(hint: Any) -> int:
    """Of the members of a union, those that accept any text are asked last to read one, and lists of texts after text."""
    return 1 if hint is str else 2 * fits(("",), hint)


def _say(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return f"{_say(kind)} {bounds}"
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_say, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        return (
            f"a list, each {_say(first)}"
            if rest in ([], [Ellipsis])
            else f"a list of {len(rest) + 1}, each {_say(first)}"
        )
    if get_origin(hint) is Mapping:
        return "keys with values"
    plain = {
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        type(None): "none",
        str: "a text",
        Path: "a path",
    }
    return plain.get(hint, str(hint))
