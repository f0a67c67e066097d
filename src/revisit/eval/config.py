"""The options of an evaluation, from the command line or Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from revisit.decoding.method import METHODS, Method, as_method
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
from revisit.eval.controls import METHODS as CONTROL_METHODS
from revisit.eval.spec import benchmark_label, label
from revisit.models.config import EMBEDDED, describe_model, name_of
from revisit.registry import Beams, Count, PositiveShare, Seed, Settings, Temperature, parse_list

# `--preset paper`: the ReVisiT paper's protocol, as far as it is stated; docs/research/reproduce.md lists what the paper leaves open.
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
    """Every option of an evaluation; the defaults are those of the command line.

    Methods and benchmarks are names, names with settings (`revisit:alpha=0.01`), mappings with a name, or objects. A model is a name,
    or the pair (model, processor) of `revisit.load`.
    """

    model: Any = (EMBEDDED,)
    method: Any = ("greedy", "revisit")
    benchmark: Any = ("chair", "pope")
    data: str | tuple[str, ...] | Mapping[str, str] | None = None
    out: str = "results"
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

    def check(self) -> None:
        """Raise RevisitError for unknown names, wrong settings and options that exclude each other; nothing is loaded."""
        if self.seeds and not self.sample:
            raise RevisitError("Several seeds need sampling: without it every seed gives the same answers.")
        if self.engine != "local" and not all(isinstance(model, str) for model in self.models.values()):
            raise RevisitError(f"A loaded model needs the local engine, not {self.engine}.")
        _ = self.decoding, self.engine_options
        for name, place in self._places.items():
            if place != DOWNLOAD and not is_scenes(place):
                resolve_data(place, name)
        for kind, keys in (
            ("model", list(self.models)),
            ("benchmark", [benchmark_label(b) for b in self.benchmarks]),
            ("seed", [str(seed) for seed in self.all_seeds]),
            *(("method", [label(m) for m in self.methods_for(model)]) for model in self.models),
        ):
            if not keys:
                raise RevisitError(f"Nothing to run: give at least one {kind}.")
            if repeated := {key for key in keys if keys.count(key) > 1}:
                raise RevisitError(f"The {kind} {sorted(repeated)[0]!r} is listed twice; list each once.")

    @cached_property
    def models(self) -> dict[str, Any]:
        """The models by name: the name itself, or a loaded pair."""
        given = self.model
        if hasattr(given, "generate") or (
            isinstance(given, (tuple, list)) and hasattr(next(iter(given), None), "generate")
        ):
            from revisit.models.loading import loaded_pair

            pair = loaded_pair(given)
            return {name_of(pair[0]): pair}
        names = _entries([str(given)] if isinstance(given, Path) else given)
        if not all(isinstance(name, str) for name in names):
            raise RevisitError(f"{given!r} is not the name of a model: give a folder or a Hub id.")
        if len(set(names)) < len(names):
            raise RevisitError(f"The model {max(names, key=names.count)!r} is listed twice; list each once.")
        return {name: name for name in names}

    @cached_property
    def benchmarks(self) -> tuple[Benchmark, ...]:
        """The benchmarks with their options."""
        found = []
        for entry in _entries(self.benchmark):
            if not isinstance(entry, Benchmark):
                name, own = BENCHMARKS.parse(entry)
                cls = find(name)
                entry = cls(**{**(PAPER_OPTIONS.get(cls.name, {}) if self.preset else {}), **own})
            found.append(entry)
        return tuple(found)

    def methods_for(self, name: str) -> tuple[Method, ...]:
        """Return the methods for a model: settings that are not given are those recommended for it."""
        found = [entry if isinstance(entry, Method) else self._method(entry, name) for entry in _entries(self.method)]
        named = {method.name for method in found}
        controls = CONTROL_METHODS if self.controls else CONTROL_METHODS[: self.only_visual]
        added = [self._method(control, name) for control in controls if control not in named]
        return (*found, *added)

    def _method(self, entry: Any, name: str) -> Method:
        (method, settings), model = METHODS.parse(entry), self.models[name]
        cls: Any = METHODS.find(method)  # before transformers is imported, which takes seconds
        about = describe_model(name, self.trust_remote_code) if isinstance(model, str) else model[0]
        if self.preset and method != "revisit" and hasattr(cls, "official"):
            made: Method = cls.official(**settings)
            return made.for_model(about.config.model_type)
        return as_method(method, about.config.model_type if self.preset else about, **settings)

    @cached_property
    def decoding(self) -> Decoding:
        """How answers are drawn, but for their length."""
        return Decoding.asked(self.sample, self.temperature, self.top_p, self.beams)

    def decoding_for(self, benchmark: Benchmark) -> Decoding:
        """Return how the answers to one benchmark are drawn."""
        length = self.max_new_tokens or (PAPER_TOKENS if self.preset else None) or benchmark.max_new_tokens
        return self.decoding.replace(max_new_tokens=length)

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds of sampling; one without sampling."""
        return self.seeds or ((self.seed,) if self.sample else (0,))

    def limit_of(self, name: str) -> int | None:
        """Return the number of items of a benchmark that are asked; None for all."""
        return min((n for n in (self.limit, PAPER_ITEMS.get(name) if self.preset else None) if n), default=None)

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The data folder of every benchmark; data is generated or downloaded at first use."""
        return {name: resolve_data(place, name, self.limit_of(name)) for name, place in self._places.items()}

    @cached_property
    def _places(self) -> dict[str, str]:
        given, names = self.data, [benchmark.name for benchmark in self.benchmarks]
        if given is None:
            if set(self.models) != {EMBEDDED}:
                raise RevisitError(
                    "--data is missing: use --data download to download the benchmark's files "
                    f"once, --data DIR for your own, or --data {DEFAULT_SCENES} for generated scenes."
                )
            given = DEFAULT_SCENES
        return parse_data(given, names)

    @property
    def needs_nltk_data(self) -> bool:
        """Whether a score needs NLTK's data; the embedded model's captions of generated scenes do not."""
        scored = [self._places[benchmark.name] for benchmark in self.benchmarks if benchmark.needs_nltk]
        return any(set(self.models) != {EMBEDDED} or not is_scenes(place) for place in scored)

    def packages(self) -> list[str]:
        """Return the packages that the data, the scores and the engine need, so that all missing ones can be reported at once."""
        return [
            *(["nltk"] if any(benchmark.needs_nltk for benchmark in self.benchmarks) else []),
            *("scipy", "statsmodels"),
            *(package for place in self._places.values() for package in scene_packages(place)),
            *([self.engine] if self.engine in EXTRAS else []),
        ]

    @cached_property
    def engine_options(self) -> dict[str, Any]:
        """The options that the engine is opened with; raises RevisitError for those that it does not have."""
        found = {name: getattr(self, name) for name in ("dtype", "device_map", "trust_remote_code")}
        for name in ("workers", "address"):
            if self.engine == "ray":
                found[name] = getattr(self, name)
            elif getattr(self, name) is not None:
                raise RevisitError(f"--{name} needs --engine ray, not --engine {self.engine}.")
        if self.allow_incomplete and self.engine == "vllm":
            raise RevisitError("--allow-incomplete needs --engine local or ray: vLLM only loads complete weights.")
        return found | ({"allow_incomplete": True} if self.allow_incomplete else {})


def _entries(given: Any) -> list[Any]:
    """Split a list into entries; objects stay what they are."""
    if isinstance(given, (Method, Benchmark)):
        return [given]
    if isinstance(given, (str, Mapping)):
        return parse_list(given)
    if isinstance(given, type):
        raise RevisitError(f"{given.__name__} is a class: give an object, such as {given.__name__}(), or a name.")
    if not isinstance(given, Iterable):
        raise RevisitError(f"{given!r} is not a name: give names, or mappings with a name and settings.")
    return [found for entry in given for found in _entries(entry)]
