"""What every decoding method is: a frozen, self-validating settings object that stock `generate()` accepts."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from revisit.errors import RevisitError, unknown

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from revisit.decoding.run import Run

    Refine = Callable[[Tensor, Tensor], Tensor]  # (input_ids (B, T), logits (B, V)) -> logits (B, V)


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method: its settings, checked on creation, and `begin`, which acts on one call of `generate`.

    Pass it as `model.generate(..., custom_generate=method)` or `revisit.generate(model, ..., method=method)`.
    """

    name: ClassVar[str]  # what it is called on a command line
    summary: ClassVar[str] = ""  # one line of what it does
    cost: ClassVar[str] = ""  # forwards, rows and prefills that it needs
    source: ClassVar[str] = ""  # the paper

    def begin(self, run: Run) -> Refine:
        """Prepare for one call: what returns is given the raw logits of every step, before any other processor."""
        raise NotImplementedError  # every method defines it

    def bind(self, processor: Any) -> Self:
        """This method with whatever it needs of the model's processor (words as token ids); itself if it needs nothing."""
        return self

    def __call__(
        self,
        model: Any,
        input_ids: Any,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        trace: Any = None,
        vision_mask: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The `custom_generate` entry point; called by transformers, never by hand."""
        from revisit.decoding.loop import decode  # the layer above: a method is only ever called through it

        return decode(
            self,
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            trace=trace,
            vision_mask=vision_mask,
            **model_kwargs,
        )

    def settings(self) -> dict[str, Any]:
        """Every setting, in JSON-ready form."""
        return {
            f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v for f in dataclasses.fields(self)
        }

    def check_range(self, field: str, low: float, high: float, *, low_open: bool = False) -> None:
        """One sentence unless low <= value <= high (low < value with `low_open`)."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RevisitError(f"{type(self).__name__}: {field} must be a number, not {value!r}.")
        hint = get_type_hints(type(self))[field]
        if isinstance(value, float) and float not in (hint, *get_args(hint)):
            raise RevisitError(f"{type(self).__name__}: {field} must be a whole number, not {value!r}.")
        if not (low < value if low_open else low <= value) or not value <= high:
            bounds = f"{'above' if low_open else 'at least'} {low:g}" + (
                "" if high == float("inf") else f" and at most {high:g}"
            )
            raise RevisitError(f"{type(self).__name__}: {field} must be {bounds}, not {value!r}.")

    def check_seed(self) -> None:
        """One sentence unless `seed` is a whole number that generators take."""
        self.check_range("seed", 0, 2**63 - 1)

    def check_choice(self, field: str) -> None:
        """One sentence unless the value is one of the field's Literal choices."""
        choices = get_args(get_type_hints(type(self))[field])
        value = getattr(self, field)
        if value not in choices:
            raise unknown(f"{type(self).__name__} {field}", str(value), map(str, choices))


def parse_settings(cls: type[Method], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the method's fields want them; strings (from a command line) are read by the field's type."""
    hints = get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    parsed = {}
    for key, value in settings.items():
        if key not in known:
            raise unknown(f"{cls.__name__} setting", key, known)
        what = f"{cls.__name__}: {key}"
        parsed[key] = (
            _parse(value, hints[key], what) if isinstance(value, str) else _typed(as_tuples(value), hints[key], what)
        )
    return parsed


def _typed(value: Any, hint: Any, what: str) -> Any:
    """The value if it is of the hinted type, in a tuple if that is wanted; one sentence otherwise."""
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
    if get_origin(hint) in (types.UnionType, typing.Union):
        return any(fits(value, member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        inner = inner[:1] * len(value) if isinstance(value, tuple) and inner[-1] is Ellipsis else inner
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(fits, value, inner))
    if hint in (int, float):
        kinds = (int,) if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint)


def _parse(text: str, hint: Any, what: str, alone: bool = True) -> Any:
    """Read a string as the hinted type; for a union, as the first member that accepts it."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        errors = []
        for member in sorted(get_args(hint), key=lambda m: m is str):  # str accepts anything: ask it last
            try:
                return _parse(text, member, what, alone=False)
            except RevisitError as error:
                errors.append(error)
        if any(get_origin(member) is Literal for member in get_args(hint)):
            return text
        raise errors[0]
    if hint is type(None):
        if text.lower() in ("none", "null", ""):
            return None
    elif hint is bool:
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
    elif hint in (int, float):
        try:
            return _typed(hint(text), hint, what)
        except (ValueError, OverflowError):
            pass
    elif get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        if inner is Any:
            return text  # left to the settings' own reading
        return tuple(_parse(part.strip(), inner, what) for part in text.strip("[]()").split(",") if part.strip())
    elif hint is str or hint is Any or (get_origin(hint) is Literal and (alone or text in get_args(hint))):
        return text  # a wrong name alone is left to the settings' own check, which suggests the nearest
    raise RevisitError(f"{what} must be {_say(hint)}, not {text!r}.")


def _say(hint: Any) -> str:
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
    plain = {float: "a number", int: "a whole number", bool: "true or false", type(None): "none", str: "a text"}
    return plain.get(hint, str(hint))
