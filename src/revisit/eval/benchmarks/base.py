"""The base class of benchmarks, their items and scores, and the registry that finds them by name.

A benchmark is a class whose fields are its options (`get("pope", parser="vcd")`), in its own module. It has no access to the model:
`load` returns prompts and images, and `score` takes the answers as plain text.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from revisit.errors import RevisitError, short
from revisit.eval.benchmarks.io import packaged
from revisit.eval.benchmarks.io.download import Remote
from revisit.io.records import AnswerRow, Fields, Record, folder
from revisit.registry import Registry, Settings
from revisit.video.sampling import EIGHT_FRAMES, Sampling

if TYPE_CHECKING:
    from revisit.eval.benchmarks.io.data import Draft


DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet)(\.gz)?$", re.IGNORECASE)

# NaN is null in JSON.
Number = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the Hub, in the first of `repos` that exists."""

    repos: tuple[str, ...]
    splits: tuple[str, ...]
    configs: tuple[str, ...] = ()  # configurations in the order to read them; the only one if empty


def coco_image(name: str) -> tuple[str, ...]:
    """Return the address of an image of COCO 2014, in val2014 or train2014 by its name."""
    return (f"http://images.cocodataset.org/{'train2014' if 'train2014' in name else 'val2014'}/{name}",)


class Source(TypedDict, total=False):
    """Where the data of a benchmark comes from: class attributes of `Benchmark`."""

    title: str
    source: str
    license: str
    data_files: tuple[str, ...]
    hub: HubDataset
    downloads: tuple[Remote, ...]
    images_at: str


@functools.cache
def sources() -> dict[str, Source]:
    """Return what data/sources.json states, by the name of the benchmark."""
    return TypeAdapter(dict[str, Source]).validate_json(packaged("sources.json"))


# Keys of `Item.meta` with the correct answer, in the order to try them.
TARGETS = ("ground_truth", "gold", "label", "answer", "answers", "truth", "gt_answer", "category")


@dataclass(frozen=True)
class Item:
    """One question to a model; `prompt` is the user's text, without image tokens and chat template."""

    id: str
    prompt: str
    images: tuple[Path, ...] = ()
    meta: Fields = field(default_factory=dict)
    hash: str = ""  # of the prompt, the images' bytes and the sampled frames, set when they are read; answers are stored with it
    image_hashes: tuple[str, ...] = ()  # SHA-256 of each image's bytes
    sampling: Sampling = EIGHT_FRAMES  # of the videos, which are among the images
    frames: tuple[tuple[int, float], ...] = ()  # index and time of each sampled frame, set when the videos are read
    edit: str = ""  # a control: what is done to the images or frames
    error: str = ""  # why the item cannot be answered: its row or one of its files cannot be read

    @property
    def target(self) -> str | tuple[str, ...]:
        """The correct answer, or the objects that are in the image; empty if the benchmark has none."""
        row = self.meta.get("row")
        sources = [self.meta.get(key) for key in TARGETS]
        sources += (
            [row.get(key) for key in ("gt_answer_details", "gt_answer", "answer")] if isinstance(row, Mapping) else []
        )
        found = next((value for value in sources if value not in (None, "", [])), "")
        if isinstance(found, (list, tuple, set, frozenset)):
            names = tuple(map(str, found))
            return names if found is self.meta.get("ground_truth") else ", ".join(names)
        return str(found)


@dataclass(frozen=True)
class Metric:
    """The name of a metric, its better direction (None: neither), and how it is printed."""

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
        per_item: The terms of each metric that is a ratio of sums over units: sum(numerators) / sum(denominators) is the metric, and
            resampling units gives its sampling distribution.
        counts: The whole numbers behind the metrics.
        notes: Remarks for the reader.
        items: The scored items and their hashes. This and the following are filled in by the log.
        failed: The requested items without an answer, and their hashes.
        intervals: The 95 % interval of every metric that has one.
        shown: How every metric is printed.
        headline: The benchmark's main metric, or the first one if that was not computed.
    """

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="null")

    metrics: dict[str, Number]
    per_item: dict[str, PerUnit] = field(default_factory=dict, repr=False)
    counts: dict[str, Number] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    items: dict[str, str] = field(default_factory=dict, repr=False)
    failed: dict[str, str] = field(default_factory=dict, repr=False)
    intervals: dict[str, Interval | None] = field(default_factory=dict)
    shown: dict[str, Metric] = field(default_factory=dict)
    headline: str = ""

    def value(self, metric: str) -> tuple[float, float, float]:
        """Return (value, low, high) of a metric on the printed scale; NaN where it is undefined."""
        scale, interval = self.shown[metric].show, self.intervals[metric]
        low, high = (interval.low, interval.high) if interval else (math.nan, math.nan)
        return self.metrics[metric] * scale, low * scale, high * scale

    def verdict(self, item: str) -> tuple[str, bool]:
        """Return the verdict on an answer, such as ("wrong", True), where True marks a failure.

        It is that of the headline metric, else of accuracy, of the whole benchmark or of a subset ("coco_random/accuracy"). It is empty if
        neither is counted per item.
        """
        for wanted in (self.headline, "accuracy", "acc"):
            for name, units in self.per_item.items():
                last = name.rpartition("/")[2]
                metric = self.shown.get(name) or self.shown.get(last)
                numerator, denominator = units.get(item, (0.0, 0.0))
                if wanted not in (name, last) or metric is None or not metric.better or not denominator:
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
        """Return scores whose metrics are the ratios of their terms."""
        metrics = {name: ratio(units.values()) for name, units in per_item.items()}
        return cls(metrics, per_item, {name: float(count) for name, count in counts.items()}, notes)


def ratio(units: Iterable[tuple[float, float]]) -> float:
    """Return the sum of numerators over the sum of denominators; NaN if the denominators sum to zero."""
    numerator, denominator = 0.0, 0.0
    for n, d in units:
        numerator, denominator = numerator + n, denominator + d
    return numerator / denominator if denominator else math.nan


def mean_of(parts: Mapping[str, PerUnit]) -> PerUnit:
    """Return the terms of the mean over parts of the ratio within each part."""
    totals = {name: len(parts) * sum(d for _, d in units.values()) for name, units in parts.items()}
    return {unit: (n / totals[name], d / totals[name]) for name in parts for unit, (n, d) in parts[name].items()}


class Benchmark(Settings):
    """Base of all benchmarks. The annotated fields of a subclass are its options.

    A subclass sets the class attributes below, defines `load` and `score`, and overrides other methods where the defaults do not fit.
    """

    name: ClassVar[str]  # in commands
    title: ClassVar[str] = ""  # in reports; the name if empty
    max_new_tokens: ClassVar[int]
    metrics: ClassVar[tuple[Metric, ...]]  # their names, directions and printed form
    headline: ClassVar[str]  # the metric a one-number summary shows
    data_files: ClassVar[tuple[str, ...]] = ()  # annotation files, in DATA/<name>/ or in DATA itself
    source: ClassVar[str] = "its authors"  # of these files, as the end of an error message
    rule_options: ClassVar[tuple[str, ...]] = ()  # those that are part of the name of the scoring rule
    needs_nltk: ClassVar[bool] = False  # scoring reads NLTK's data
    hub: ClassVar[HubDataset | None] = None  # read by `revisit data get`
    downloads: ClassVar[tuple[Remote, ...]] = ()  # its annotation files on the authors' servers
    images_at: ClassVar[str] = ""  # URL of an image there, with "{name}"; COCO's if empty
    license: ClassVar[str] = "see its authors' pages"  # of its data, shown when it is downloaded

    def __init_subclass__(cls) -> None:
        """Set what data/sources.json states about the data of a published benchmark."""
        name = vars(cls).get("name", "")
        stated: Fields = {"title": name, **sources().get(name, {})}
        for attribute in stated.keys() - vars(cls).keys():
            setattr(cls, attribute, stated[attribute])

    @property
    def version(self) -> str:
        """Name of the scoring rule, with its options; only numbers of the same version can be compared."""
        return "-".join([self.name, *(getattr(self, option) for option in self.rule_options), "1"])

    def options(self) -> Fields:
        """Return the options as JSON values; they are part of a run's identity, except fields with `exclude`."""
        return self.model_dump(mode="json")

    def home(self, data_dir: Path) -> Path:
        """Return the folder of its annotation files: `data_dir/<name>`, or `data_dir` itself if they are there."""
        return folder(data_dir, self.name, *self.data_files)

    @property
    def default_data(self) -> str:
        """The data folder to use if none is given; empty if the user has to choose one."""
        return ""

    def files(self, data_dir: Path) -> list[Path]:
        """Return the annotation files (not the images) that `load` reads; raise RevisitError if one is missing."""
        return [self.require(self.home(data_dir) / file) for file in self.data_files]

    def require(self, path: Path) -> Path:
        """Return the path of an annotation file; raise RevisitError if it does not exist."""
        if not path.exists():
            how = "use --data download, which fetches it once, or " if self.downloads or self.hub else ""
            raise RevisitError(
                f"{self.title}'s {path.name} is missing: {how}put it at {path}, or select its folder with --data DIR "
                f"(source: {self.source})."
            )
        return path

    def load(self, data_dir: Path) -> list[Item]:
        """Return all items in official order; raise RevisitError if a file has to be downloaded by hand first."""
        raise NotImplementedError  # every benchmark defines it

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        """Score these items; `answers` has the generated text of every item, by its id."""
        raise NotImplementedError  # every benchmark defines it

    def answer_id(self, answer: AnswerRow) -> str | None:
        """Return the id of the item that a row of an answer file belongs to; None if the row has no id."""
        return answer.key()

    def image_files(self, data_dir: Path, limit: int | None = None) -> list[Remote]:
        """Return the images of the first `limit` items; the annotation files must be in `data_dir`."""
        images = {image: item for item in self.load(data_dir)[:limit] for image in item.images}
        paths = {image: image.relative_to(data_dir).as_posix() for image in sorted(images)}
        return [Remote(path, self.image_urls(image, images[image])) for image, path in paths.items()]

    def image_urls(self, image: Path, item: Item) -> tuple[str, ...]:
        """Return the URLs of an item's image on the authors' servers."""
        return (self.images_at.format(name=image.name),) if self.images_at else coco_image(image.name)

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write the rows of its Hub dataset as the files that `load` reads."""
        raise NotImplementedError  # every benchmark with a Hub dataset defines it

    def metric(self, name: str) -> Metric:
        """Return a metric by its name; those of a subset, such as `"coco_random/F1"`, are printed like the metric itself."""
        last = name.rsplit("/", 1)[-1]
        for metric in self.metrics:
            if metric.name == last:
                return metric
        return Metric(name, better=None, decimals=4)


# -- registry ------------------------------------------------------------------------------------------------------


def _check_class(cls: type[Benchmark], where: str) -> None:
    """Raise RevisitError unless a class has the attributes that every benchmark has."""
    for needed in ("metrics", "headline", "max_new_tokens"):
        if not hasattr(cls, needed):
            raise RevisitError(f"{where} needs a class attribute {needed!r}; see revisit.Benchmark.")
    if not any(metric.name == cls.headline for metric in cls.metrics):
        raise RevisitError(f"{where}: its headline {cls.headline!r} is not one of its metrics.")


BENCHMARKS = Registry("benchmark", "revisit.eval.benchmarks", Benchmark, _check_class)
names = BENCHMARKS.names
register = BENCHMARKS.register


def find(name: str) -> type[Benchmark]:
    """Return the class of a benchmark, by its name in any spelling ("LLaVA-Bench") or as `path/to/file.py:Class`."""
    if DATA_FILE.search(name):
        kinds = " or ".join(f"{kind}:{name}" for kind in ("yesno", "choice", "captions"))
        raise RevisitError(f"{name!r} is a file, not the name of a benchmark: for your own questions, write {kinds}.")
    spelled = name.lower().replace("-", "_")
    return BENCHMARKS.load(name if ".py" in name or name in BENCHMARKS.registered else spelled)


def get(name: str, /, **options: Any) -> Benchmark:
    """Return a benchmark with options, by its name or as `path/to/file.py:Class`; values may be text."""
    return find(name)(**options)


def title(name: str) -> str:
    """Return the benchmark's title in reports; its name if this process has no such benchmark."""
    return BENCHMARKS.find(name).title if name in names() else name


# -- checks --------------------------------------------------------------------------------------------------------


def check_answers(items: Iterable[Item], answers: Mapping[str, str]) -> None:
    """Raise RevisitError unless every item has an answer, and every answer an item."""
    ids = [item.id for item in items]
    if not ids:
        raise RevisitError("Nothing to score: the list of items is empty.")
    if len(set(ids)) < len(ids):
        twice = next(i for i, count in Counter(ids).items() if count > 1)
        raise RevisitError(f"Duplicate item {twice!r} in the data files.")
    missing = [i for i in ids if i not in answers]
    if missing:
        raise RevisitError(
            f"{len(missing)} of {len(ids)} items have no answer (the first is {short(missing[0])}); "
            "finish the run, or use --subset to score only the answered items."
        )
    known = set(ids)
    extra = [i for i in answers if i not in known]
    if extra:
        raise RevisitError(
            f"{len(extra)} answers match no item of this benchmark (the first is {short(extra[0])}); "
            "check that answers and data files are from the same benchmark and split."
        )
