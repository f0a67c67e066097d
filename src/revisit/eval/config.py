"""The options of an evaluation, from the command line or Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from revisit.decoding.method import METHODS, Method, as_method
from revisit.decoding.method_id import MethodId
from revisit.decoding.settings import Decoding
from revisit.errors import EXTRAS, RevisitError
from revisit.eval.benchmarks.base import BENCHMARKS, Benchmark, find
from revisit.eval.benchmarks.io.places import (
    DEFAULT_SCENES,
    DOWNLOAD,
    is_scenes,
    parse_data,
    resolve_data,
    scene_packages,
)
from revisit.eval.controls import REQUIRED_METHODS
from revisit.eval.spec import label
from revisit.guard.rates import Rate, find_rate, no_risk
from revisit.io.records import Fields
from revisit.models.config import EMBEDDED, describe_model, name_of
from revisit.registry import Beams, Count, PositiveShare, Seed, Settings, Share, Temperature, parse_list

# `--preset paper`: the ReVisiT paper's protocol, as far as it is stated; docs/paper.md lists what the paper leaves open.
PAPER_TOKENS = 512
PAPER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "chair": {"ids": "auto"},  # the list seed42-500 if the annotations contain it
    "hallusionbench": {"part": "VD"},
    "pope": {"suffix": "none"},
    "vqav2": {"suffix": "none"},
    "mmmu": {"keep": "single-image"},
}
PAPER_ITEMS: Mapping[str, int] = {"vqav2": 500}  # the first items only


class EvalConfig(Settings):
    """The options of an evaluation; the defaults are those of the command line.

    Methods and benchmarks are names, names with settings (`revisit:alpha=0.01`), mappings with a name, or objects. A model is a name,
    or the pair (model, processor) of `revisit.load`.
    """

    model: Any = (EMBEDDED,)
    method: Any = ("greedy", "revisit")
    benchmark: Any = ("chair", "pope")
    data: str | Path | tuple[str | Path, ...] | Mapping[str, str | Path] | None = None
    out: str | Path = "results"
    limit: Count | None = None
    batch_size: Count = 8
    max_new_tokens: Count | None = None
    seed: Seed = 0
    seeds: tuple[Seed, ...] = ()
    sample: bool = False
    temperature: Temperature = 1.0
    top_p: PositiveShare = 1.0
    beams: Beams = 1
    engine: Literal["local", "ray", "vllm"] = "local"
    workers: Count | None = None
    address: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False
    allow_incomplete: bool = False
    controls: bool = False
    only_visual: bool = False
    preset: Literal["paper"] | None = None
    risk: Share | None = None
    calibration: str | Path | None = None
    any_calibration: bool = False

    def check(self) -> None:
        """Raise RevisitError for unknown names, wrong settings and options that exclude each other; nothing is loaded."""
        if (self.seed or self.seeds) and not self.sample:
            raise RevisitError("--seed and --seeds need --sample: without it every seed gives the same answers.")
        if self.seed and self.seeds:
            raise RevisitError("--seed has no effect with --seeds: use one of them.")
        if not all(isinstance(model, str) for model in self.models.values()):
            if self.engine != "local":
                raise RevisitError(f"A loaded model needs the local engine, not {self.engine}.")
            for name in ("dtype", "device_map", "trust_remote_code", "allow_incomplete"):
                if getattr(self, name):
                    raise RevisitError(f"{name} has no effect on a loaded model: pass it to revisit.load.")
        _ = self.decoding, self.engine_options
        if self.risk is None:
            no_risk(self.calibration, self.any_calibration)
        elif self.engine == "ray" or self.controls or self.only_visual:
            raise RevisitError("--risk needs the local engine or vLLM, and no --controls or --only-visual.")
        for name, source in self._sources.items():
            if source != DOWNLOAD and not is_scenes(source):
                resolve_data(source, name)
        for kind, keys in (
            ("model", list(self.models)),
            ("benchmark", [label(b) for b in self.benchmarks]),
            ("seed", [str(seed) for seed in self.all_seeds]),
            *(("method", [str(MethodId.of(m)) for m in self.methods_for(model)]) for model in self.models),
        ):
            if not keys:
                raise RevisitError(f"Nothing to run: give at least one {kind}.")
            if repeated := {key for key in keys if keys.count(key) > 1}:
                raise RevisitError(f"The {kind} {sorted(repeated)[0]!r} is listed twice; list each once.")

    @cached_property
    def models(self) -> Fields:
        """The models by name: the name itself, or a loaded pair."""
        first = next(iter(self.model), None) if isinstance(self.model, (tuple, list)) else self.model
        if hasattr(first, "generate"):
            from revisit.models.loading import loaded_pair

            pair = loaded_pair(self.model)
            return {name_of(pair[0]): pair}
        names = _entries([str(self.model)] if isinstance(self.model, Path) else self.model)
        if not all(isinstance(name, str) for name in names):
            raise RevisitError(f"{self.model!r} is not the name of a model: give a folder or a Hub id.")
        if len(set(names)) < len(names):
            raise RevisitError(f"The model {max(names, key=names.count)!r} is listed twice; list each once.")
        return {name: name for name in names}

    @cached_property
    def benchmarks(self) -> tuple[Benchmark, ...]:
        """The benchmarks with their options."""
        benchmarks = []
        for entry in _entries(self.benchmark):
            if not isinstance(entry, Benchmark):
                name, options = BENCHMARKS.parse(entry)
                cls = find(name)
                entry = cls(**{**(PAPER_OPTIONS.get(cls.name, {}) if self.preset else {}), **options})
            benchmarks.append(entry)
        return tuple(benchmarks)

    def methods_for(self, name: str) -> tuple[Method, ...]:
        """Return the methods for a model, with its recommended settings, and those that controls need."""
        if (rate := self.rate_for(name)) is not None:
            entries = self._method_entries if "method" in self.model_fields_set else [rate.decoding_method()]
            return tuple(rate.settle(self._method(entry, name), None, None)[0] for entry in entries)
        methods = [self._method(entry, name) for entry in self._method_entries]
        listed = {method.name for method in methods}
        required = REQUIRED_METHODS if self.controls else REQUIRED_METHODS[: self.only_visual]
        return (*methods, *(self._method(method, name) for method in required if method not in listed))

    def rate_for(self, name: str) -> Rate | None:
        """Return what was calibrated for a model and `risk`; None without a risk."""
        return None if self.risk is None else find_rate(self._configured(name), self.risk, self.calibration)

    @cached_property
    def _method_entries(self) -> list[Any]:
        return _entries(self.method)  # once: a generator has no entries the second time

    def _method(self, entry: Any, name: str) -> Method:
        if isinstance(entry, Method):
            depends_on_model = type(entry).for_model is not Method.for_model
            return entry.for_model(self._configured(name)) if depends_on_model else entry
        method, settings = METHODS.parse(entry)
        cls: Any = METHODS.find(method)  # before transformers is imported, which takes seconds
        configured = self._configured(name)
        model_type = configured.config.model_type
        if self.preset and method != "revisit" and hasattr(cls, "official"):
            official: Method = cls.official(**settings)
            return official.for_model(model_type)
        return as_method(method, model_type if self.preset else configured, **settings)

    def _configured(self, name: str) -> Any:
        """Return a loaded model, or the configuration of one that is given by name."""
        model = self.models[name]
        return describe_model(name, self.trust_remote_code) if isinstance(model, str) else model[0]

    @cached_property
    def decoding(self) -> Decoding:
        """Sampling and beams, without the length of an answer."""
        return Decoding.from_options(self.sample, self.temperature, self.top_p, self.beams)

    def decoding_for(self, benchmark: Benchmark) -> Decoding:
        """Return sampling, beams and length for one benchmark."""
        rate = self.rate_for(next(iter(self.models)))
        if rate is not None and self.max_new_tokens is None:
            return self.decoding.replace(max_new_tokens=rate.max_new_tokens)
        length = self.max_new_tokens or (PAPER_TOKENS if self.preset else None) or benchmark.max_new_tokens
        return self.decoding.replace(max_new_tokens=length)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of sampling; one without sampling."""
        return self.seeds or ((self.seed,) if self.sample else (0,))

    def limit_of(self, name: str) -> int | None:
        """Return the number of items of a benchmark to use; None for all."""
        return min((n for n in (self.limit, PAPER_ITEMS.get(name) if self.preset else None) if n), default=None)

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The data folder of every benchmark; data is generated or downloaded on first use."""
        return {name: resolve_data(source, name, self.limit_of(name)) for name, source in self._sources.items()}

    @cached_property
    def _sources(self) -> dict[str, str]:
        """The data source of every benchmark: a folder, `scenes:…` or `download`."""
        defaults = {benchmark.name: benchmark.default_data for benchmark in self.benchmarks if benchmark.default_data}
        if self.data is None and set(self.models) == {EMBEDDED}:
            defaults = {benchmark.name: DEFAULT_SCENES for benchmark in self.benchmarks} | defaults
        names = [benchmark.name for benchmark in self.benchmarks]
        if self.data is None and defaults.keys() != set(names):
            raise RevisitError(
                "--data is missing: use --data download to download the benchmark's files "
                f"once, --data DIR for your own, or --data {DEFAULT_SCENES} for generated scenes."
            )
        return parse_data(self.data or (), names, defaults)

    @property
    def needs_nltk_data(self) -> bool:
        """True if a score needs NLTK's data; the embedded model's captions of generated scenes do not."""
        scored = [self._sources[benchmark.name] for benchmark in self.benchmarks if benchmark.needs_nltk]
        return any(set(self.models) != {EMBEDDED} or not is_scenes(source) for source in scored)

    def packages(self) -> list[str]:
        """Return the packages that the data, the scores and the engine need; the command reports all missing ones at once."""
        return [
            *(["nltk"] if any(benchmark.needs_nltk for benchmark in self.benchmarks) else []),
            *("scipy", "statsmodels"),
            *(package for source in self._sources.values() for package in scene_packages(source)),
            *([self.engine] if self.engine in EXTRAS else []),
        ]

    @cached_property
    def engine_options(self) -> Fields:
        """The options of the engine; raises RevisitError for those that it does not have."""
        options = {name: getattr(self, name) for name in ("dtype", "device_map", "trust_remote_code")}
        for name in ("workers", "address"):
            if self.engine == "ray":
                options[name] = getattr(self, name)
            elif getattr(self, name) is not None:
                raise RevisitError(f"--{name} needs --engine ray, not --engine {self.engine}.")
        if self.allow_incomplete and self.engine == "vllm":
            raise RevisitError("--allow-incomplete needs --engine local or ray: vLLM only loads complete weights.")
        return options | ({"allow_incomplete": True} if self.allow_incomplete else {})


def _entries(value: object) -> list[Any]:
    """Return the entries of a value as a flat list: names, which may be separated by commas, mappings and objects."""
    if isinstance(value, (Method, Benchmark)):
        return [value]
    if isinstance(value, (str, Mapping)):
        return parse_list(value)
    if isinstance(value, type):
        raise RevisitError(f"{value.__name__} is a class: give an object, such as {value.__name__}(), or a name.")
    if not isinstance(value, Iterable):
        text = " ".join(repr(value).split())[:80]  # a model's has many lines
        raise RevisitError(f"{text} is not a name: give names, or mappings with a name and settings.")
    return [entry for element in value for entry in _entries(element)]
