"""Settings of methods, benchmarks and runs: pydantic models whose errors are one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

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
        raise RevisitError(f"The list {text[:60]!r} begins with {text[0]} and does not end with {closing}.")
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
