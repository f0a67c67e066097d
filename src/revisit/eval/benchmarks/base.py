"""What a benchmark is: its items, its scorer, and how the answers of two methods can be compared on it.

A benchmark is a class whose fields are its options (`get("pope", parser="vcd")`), in its own module.
It never sees a model: `load` returns prompts and images, `score` takes the answers as plain text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict

from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks.io.download import Remote
from revisit.explain.records import AnswerRow, Record, folder
from revisit.registry import Settings

if TYPE_CHECKING:
    from revisit.eval.benchmarks.io.drafts import Draft


# NaN is null in JSON.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class HubDataset:
    """Where a benchmark's rows are: in the first of `repos` that exists."""

    repos: tuple[str, ...]
    splits: tuple[str, ...]
    configs: tuple[str, ...] = ()  # configurations in the order to read them; the only one if empty


def lmms(name: str) -> tuple[str, ...]:
    """Return both names of a dataset of lmms-eval, which moved to the second owner in July 2026."""
    return (f"lmms-lab/{name}", f"lmms-lab-encoder/{name}")


COCO_LICENSE = (
    "annotations CC BY 4.0; the images have their Flickr authors' licenses (https://cocodataset.org/#termsofuse)"
)


def coco_image(name: str) -> tuple[str, ...]:
    """Return the address of an image of COCO 2014, in val2014 or train2014 by its name."""
    return (f"http://images.cocodataset.org/{'train2014' if 'train2014' in name else 'val2014'}/{name}",)


@dataclass(frozen=True)
class Item:
    """One question to a model: `prompt` is the plain user text (no image token, no chat template)."""

    id: str
    prompt: str
    images: tuple[Path, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    hash: str = ""  # of the prompt and the images' bytes, once they were read; ties an answer to them
    noise: bool = False  # whether the model gets noise of the images' sizes, as a control


@dataclass(frozen=True)
class Metric:
    """How one number is read: which direction is better (None: neither), and how it is printed."""

    name: str
    better: Literal["higher", "lower"] | None = "higher"
    show: float = 1.0  # printed value = value * show
    decimals: int = 2
    rounded: int | None = None  # decimals to which the official script rounds the value before it is shown

    def text(self, value: float) -> str:
        """Format a value as a table prints it; an undefined value (NaN) is a dash."""
        if math.isnan(value):
            return "-"
        value = value if self.rounded is None else round(value, self.rounded)
        return f"{value * self.show:.{self.decimals}f}"


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval and its kind (`wilson` or `bootstrap`); NaN if it is undefined."""

    low: Number
    high: Number
    kind: str


# unit -> (numerator, denominator). A unit is an item id, or the name of the group the metric counts.
PerUnit = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Scores:
    """The result of scoring.

    Attributes:
        metrics: Unrounded, on the scale of the official scorer, NaN where the official division is by zero.
        per_item: For each metric that is a ratio of sums over units, the two sums' terms: sum(numerators) / sum(denominators) is the
            metric, and resampling units gives its sampling distribution.
        counts: The whole numbers behind the metrics.
        notes: Remarks for the reader.
        items: The scored items and their hashes. This and the following are filled in by the log.
        intervals: The 95 % interval of every metric that has one.
        shown: How every metric is printed.
        headline: The benchmark's main metric.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="null")

    metrics: dict[str, Number]
    per_item: dict[str, PerUnit] = field(default_factory=dict)
    counts: dict[str, Number] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    items: dict[str, str] = field(default_factory=dict)
    intervals: dict[str, Interval | None] = field(default_factory=dict)
    shown: dict[str, Metric] = field(default_factory=dict)
    headline: str = ""

    def value(self, metric: str) -> tuple[float, float, float]:
        """Return (value, low, high) of a metric on the printed scale; NaN where it is undefined."""
        scale, found = self.shown[metric].show, self.intervals[metric]
        low, high = (found.low, found.high) if found else (math.nan, math.nan)
        return self.metrics[metric] * scale, low * scale, high * scale

    def verdict(self, item: str) -> tuple[str, bool]:
        """Return an answer's verdict, and whether it fails: by the headline metric if it is counted per item, else by accuracy.

        A part's metric ("coco_random/accuracy") is printed like the whole. Empty if neither metric is counted per item.
        """
        terms = {name: units[item] for name, units in self.per_item.items() if item in units}
        for wanted in ((self.headline,), ("accuracy", "acc")):
            for name, (numerator, denominator) in terms.items():
                last = name.rpartition("/")[2]
                metric = self.shown.get(name) or self.shown.get(last)
                if not denominator or not {name, last} & {*wanted} or metric is None or not metric.better:
                    continue
                if metric.better == "lower":
                    failed = numerator > 0
                    caption = ("no hallucination", "hallucinated") if "CHAIR" in self.headline else ("right", "wrong")
                    return caption[failed], failed
                if 0 < numerator != denominator:
                    return f"score {metric.text(numerator / denominator)}", numerator < denominator
                return ("wrong", True) if numerator < denominator else ("right", False)
        return "", False

    @classmethod
    def of(cls, per_item: dict[str, PerUnit], counts: Mapping[str, float], notes: tuple[str, ...] = ()) -> Scores:
        """Return scores whose metrics are the ratios of what their units contribute."""
        metrics = {name: ratio(units.values()) for name, units in per_item.items()}
        return cls(metrics, per_item, {name: float(count) for name, count in counts.items()}, notes)


def ratio(units: Iterable[tuple[float, float]]) -> float:
    """Sum of numerators over sum of denominators; NaN if the denominators sum to zero."""
    numerator, denominator = 0.0, 0.0
    for n, d in units:
        numerator, denominator = numerator + n, denominator + d
    return numerator / denominator if denominator else math.nan


class Benchmark(Settings):
    """Base of all benchmarks: its fields are its options, read and validated by their types.

    A subclass states the class attributes below and defines `load` and `score`; the other methods only where the defaults do
    not fit.
    """

    name: ClassVar[str]  # how commands call it
    title: ClassVar[str] = ""  # how a report calls it; the name if empty
    max_new_tokens: ClassVar[int]
    metrics: ClassVar[tuple[Metric, ...]]  # their names, directions and printed form
    headline: ClassVar[str]  # the metric a one-number summary shows
    data_files: ClassVar[tuple[str, ...]] = ()  # annotation files, in DATA/<name>/ or in DATA itself
    source: ClassVar[str] = "its authors"  # where they come from, as the end of a sentence
    needs_nltk: ClassVar[bool] = False  # whether scoring reads NLTK's data
    hub: ClassVar[HubDataset | None] = None  # where `revisit data get` finds it on the Hub
    downloads: ClassVar[tuple[Remote, ...]] = ()  # its annotation files on the authors' servers
    license: ClassVar[str] = "see its authors' pages"  # of its data, shown when it is fetched
    places: ClassVar[tuple[str, ...]] = ("judge_url", "judge_cache")  # options that change no question and no number

    def __init_subclass__(cls) -> None:
        if "title" not in vars(cls):
            cls.title = vars(cls).get("name", "")

    @property
    def version(self) -> str:
        """Names the scoring rule, options included; only numbers of the same version can be compared."""
        return f"{self.name}-1"

    def options(self) -> dict[str, Any]:
        """Return the options that decide its questions or numbers, ready for JSON; they are part of a run's identity."""
        found = {option: value for option, value in self if option not in self.places}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def home(self, data_dir: Path) -> Path:
        """Return the folder of its annotation files: `data_dir/<name>`, or `data_dir` itself if they are there."""
        return folder(data_dir, self.name, *self.data_files)

    def files(self, data_dir: Path) -> list[Path]:
        """Return the annotation files (not the images) that `load` reads; raise RevisitError if one is missing."""
        home = self.home(data_dir)
        can_fetch = bool(self.downloads or self.hub)
        return [require(home / file, f"{self.title}'s {file}", self.source, can_fetch) for file in self.data_files]

    def load(self, data_dir: Path) -> list[Item]:
        """Return all items in official order; raise RevisitError if a file has to be downloaded by hand first."""
        raise NotImplementedError  # every benchmark defines it

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        """Score exactly these items; `answers` maps every item id to the generated text."""
        raise NotImplementedError  # every benchmark defines it

    def answer_id(self, answer: AnswerRow) -> str | None:
        """Return the id of the item that a row of an answer file answers; None if the row has no id."""
        return answer.key()

    def image_files(self, data_dir: Path, limit: int | None = None) -> list[Remote]:
        """Return the images of the first `limit` items, to be downloaded once its annotation files are in `data_dir`."""
        found = {image for item in self.load(data_dir)[:limit] for image in item.images}
        return [Remote(image.relative_to(data_dir).as_posix(), self.image_urls(image)) for image in sorted(found)]

    def image_urls(self, image: Path) -> tuple[str, ...]:
        """Return the addresses of an image on the authors' servers."""
        return coco_image(image.name)

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write the rows of its Hub dataset as the files that `load` reads."""
        raise NotImplementedError  # every benchmark with a Hub dataset defines it

    def metric(self, name: str) -> Metric:
        """Return how a metric is printed; metrics of a sub-setting (`"coco_random/F1"`) are printed like the metric itself."""
        last = name.rsplit("/", 1)[-1]
        for metric in self.metrics:
            if metric.name == last:
                return metric
        return Metric(name, better=None, decimals=4)


def check_choice(kind: str, value: str, allowed: Iterable[str]) -> None:
    """Raise RevisitError unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise unknown(kind, value, allowed)


def check_answers(items: Iterable[Item], answers: Mapping[str, str]) -> None:
    """Raise RevisitError unless `answers` has exactly one text for every item, so that nothing is dropped silently."""
    ids = [item.id for item in items]
    if not ids:
        raise RevisitError("Nothing to score: the list of items is empty.")
    if len(set(ids)) < len(ids):
        twice = next(i for i, count in Counter(ids).items() if count > 1)
        raise RevisitError(f"Duplicate item {twice!r} in the data files.")
    missing = [i for i in ids if i not in answers]
    if missing:
        raise RevisitError(
            f"{len(missing)} of {len(ids)} items have no answer (the first is {missing[0]!r}); "
            "finish the run, or use --subset to score only the answered items."
        )
    known = set(ids)
    extra = [i for i in answers if i not in known]
    if extra:
        raise RevisitError(
            f"{len(extra)} answers match no item of this benchmark (the first is {extra[0]!r}); "
            "check that answers and data files are from the same benchmark and split."
        )


def require(path: Path, what: str, source: str, can_fetch: bool = True) -> Path:
    """Return `path` if it exists; otherwise raise RevisitError with where the file goes and how to get it."""
    if not path.exists():
        how = "use --data download, which fetches it once, or " if can_fetch else ""
        raise RevisitError(f"{what} is missing: {how}put it at {path} (from {source}).")
    return path
