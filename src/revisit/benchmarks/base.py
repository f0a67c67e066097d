"""What a benchmark is: its items, its scorer, and how the answers of two methods can be compared on it.

A benchmark is a frozen dataclass whose fields are its options (`get("pope", parser="vcd")`), in its own module.
It never sees a model: `load` gives prompts and images, `score` takes the answers as plain text.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from revisit.benchmarks.io.answers import Answer

from revisit.errors import RevisitError, unknown

# Registry name -> (module below this package, class). Modules are imported on first use only.
_REGISTRY: dict[str, tuple[str, str]] = {
    "chair": ("chair", "Chair"),
    "pope": ("pope", "Pope"),
    "repope": ("pope", "RePope"),
    "hallusionbench": ("hallusionbench", "HallusionBench"),
    "vqav2": ("vqav2", "VQAv2"),
    "mmmu": ("mmmu", "MMMU"),
    "llava_bench": ("llava_bench", "LlavaBench"),
    "amber": ("amber", "Amber"),
    "mme": ("mme", "MME"),
}


@dataclass(frozen=True)
class Item:
    """One question to a model: `prompt` is the plain user text (no image token, no chat template)."""

    id: str
    prompt: str
    images: tuple[Path, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """How one number is read: which direction is better (None: neither), and how it is printed."""

    name: str
    better: Literal["higher", "lower"] | None = "higher"
    show: float = 1.0  # printed value = value * show
    decimals: int = 2
    rounded: int | None = None  # decimals to which the official script rounds the value before it is shown

    def text(self, value: float) -> str:
        """The value as a table prints it; an undefined value (NaN) is a dash."""
        if math.isnan(value):
            return "-"
        value = value if self.rounded is None else round(value, self.rounded)
        return f"{value * self.show:.{self.decimals}f}"


# unit -> (numerator, denominator). A unit is an item id, or the name of the group the metric counts.
PerUnit = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Scores:
    """The result of scoring.

    `metrics`: unrounded, on the scale of the official scorer, NaN where the official division is by zero.
    `per_item`: for each metric that is a ratio of sums over units, the two sums' terms, so that
    sum(numerators) / sum(denominators) is the metric; resample units to get its sampling distribution.
    `counts`: the whole numbers behind the metrics. `notes`: what a reader of the numbers must know.
    """

    metrics: dict[str, float]
    per_item: dict[str, PerUnit] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def ratio(units: Iterable[tuple[float, float]]) -> float:
    """Sum of numerators over sum of denominators; NaN if the denominators sum to zero."""
    numerator, denominator = 0.0, 0.0
    for n, d in units:
        numerator, denominator = numerator + n, denominator + d
    return numerator / denominator if denominator else math.nan


class Benchmark:
    """Base of all benchmarks; subclasses are frozen dataclasses whose fields are the options."""

    name: ClassVar[str]
    max_new_tokens: ClassVar[int]
    metrics: ClassVar[tuple[Metric, ...]]
    headline: ClassVar[str]  # the metric a one-number summary shows
    truth: ClassVar[str]  # the option of `revisit score` that names the file to score against
    partial: ClassVar[bool] = False  # whether the official script scores whatever was answered

    @property
    def version(self) -> str:
        """Names the scoring rule, options included; two numbers compare only under one version."""
        raise NotImplementedError  # every benchmark defines it

    def files(self, data_dir: Path) -> list[Path]:
        """The annotation files (not the images) that `load` reads, for checksums; raises if one is missing."""
        raise NotImplementedError  # every benchmark defines it

    def load(self, data_dir: Path) -> list[Item]:
        """All items in official order; raises one clear sentence when a file has to be fetched by hand first."""
        raise NotImplementedError  # every benchmark defines it

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        """Scores exactly these items; `answers` maps every item id to the generated text."""
        raise NotImplementedError  # every benchmark defines it

    def match(self, answers: list[Answer], truth: list[Path]) -> tuple[list[Item], dict[str, str]]:
        """Items, and their answers by id, for answers from files: judged against `truth`, or by what they carry."""
        raise NotImplementedError  # every benchmark defines it

    def adapted(self, answers: list[Answer], chosen: Mapping[str, Any]) -> Benchmark:
        """This benchmark with options that the answers themselves suggest, unless the user has `chosen` them."""
        return self

    def metric(self, name: str) -> Metric:
        """How metric `name` is read; metrics of a sub-setting (`"coco_random/F1"`) read like the metric itself."""
        last = name.rsplit("/", 1)[-1]
        for metric in self.metrics:
            if metric.name == last:
                return metric
        return Metric(name, better=None, decimals=4)


def names() -> tuple[str, ...]:
    """The registered benchmark names, sorted."""
    return tuple(sorted(_REGISTRY))


def get(name: str, **options: Any) -> Benchmark:
    """The benchmark `name` with `options`; string values (from a command line) are parsed to the field's type."""
    key = name.lower().replace("-", "_")
    if key not in _REGISTRY:
        raise unknown("benchmark", name, _REGISTRY)
    module, cls_name = _REGISTRY[key]
    cls: Any = getattr(importlib.import_module(f"revisit.benchmarks.{module}"), cls_name)
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}
    for option in options:
        if option not in fields:
            raise unknown(f"option of benchmark {key!r}:", option, fields)
    benchmark: Benchmark = cls(**{k: _parse(k, v, hints[k]) for k, v in options.items()})
    return benchmark


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


def check_choice(kind: str, value: str, allowed: Iterable[str]) -> None:
    """Raises the unknown-name error unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise unknown(kind, value, allowed)


def check_answers(items: Iterable[Item], answers: Mapping[str, str]) -> None:
    """Raises unless `answers` holds exactly one text for every item, so that nothing is dropped in silence."""
    ids = [item.id for item in items]
    if not ids:
        raise RevisitError("There is nothing to score: the list of items is empty.")
    if len(set(ids)) < len(ids):
        twice = next(i for i, count in Counter(ids).items() if count > 1)
        raise RevisitError(f"The data files have item {twice!r} twice; each must be there once.")
    missing = [i for i in ids if i not in answers]
    if missing:
        raise RevisitError(
            f"{len(missing)} of {len(ids)} items have no answer (the first is {missing[0]!r}); "
            "finish the run, or score only what was answered (--subset)."
        )
    known = set(ids)
    extra = [i for i in answers if i not in known]
    if extra:
        raise RevisitError(
            f"{len(extra)} answers belong to no item of this benchmark (the first is {extra[0]!r}); "
            "check that answers and data files are of the same benchmark and split."
        )


def require(path: Path, what: str, source: str) -> Path:
    """`path` if it exists, else the sentence that says what is missing, where it goes and where it comes from."""
    if not path.exists():
        raise RevisitError(f"{what} not found: put it at {path}; it comes from {source}.")
    return path
