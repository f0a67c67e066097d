"""From flags and a YAML file to a plan. A flag beats the file; an unknown key is refused with the nearest known one.

The file has the flags' names as keys, with underscores:

    model: [tiny]
    method: [greedy, revisit, {name: revisit, alpha: 0.01, layers: all}]
    benchmark: [chair, {name: pope, parser: vcd}]
    data: scenes:unusual:200
    out: runs/first
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from revisit import benchmarks
from revisit.benchmarks.registry import BENCHMARKS
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import EXTRAS, RevisitError, unknown, unknown_setting
from revisit.evaluation import presets
from revisit.evaluation.engines.base import ENGINES
from revisit.evaluation.places import DEFAULT_SCENES, parse_data, resolve_data, scene_packages
from revisit.evaluation.plan import Plan
from revisit.models.config import EMBEDDED, describe_model
from revisit.registry import Beams, Count, PositiveShare, Seed, Settings, Temperature, parse_list

Entry = str | Mapping[str, Any]  # a name with settings in its text, or a mapping with a name


class EvalConfig(Settings):
    """Every option of `revisit eval`; the defaults are those of the command line."""

    model: str | tuple[str, ...] = ("tiny",)
    method: Entry | tuple[Entry, ...] = ("greedy", "revisit")
    benchmark: Entry | tuple[Entry, ...] = ("chair", "pope")
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
    engine: str = "local"
    workers: Count | None = None
    address: str | None = None
    dtype: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False
    allow_incomplete: bool = False
    skip_bad_images: bool = False
    preset: str | None = None
    set: Mapping[str, Any] = Field(default_factory=dict)

    def plan(self) -> Plan:
        """The plan, every name looked up and every setting checked; nothing is loaded."""
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.preset not in (None, "paper"):
            raise unknown("preset", self.preset, ["paper"])
        chosen, models = self.chosen_benchmarks(), self._models()
        if repeated := {model for model in models if models.count(model) > 1}:
            raise RevisitError(f"The model {sorted(repeated)[0]!r} is listed twice; list each once.")
        decoding = Decoding.asked(self.sample, self.temperature, self.top_p, self.beams)
        if self.seeds and not self.sample:
            raise RevisitError("--seeds needs --sample: without sampling every seed gives the same answers.")
        names = [b.name for b in chosen]
        asked = presets.ITEMS if self.preset else {}
        limits = {
            name: min(n for n in (self.limit, asked.get(name)) if n) for name in names if self.limit or name in asked
        }
        places = self._places(models, names)
        data = {name: resolve_data(places[name], name, limits.get(name)) for name in names}
        from revisit.models.loading import as_dtype

        if self.dtype not in (None, "auto"):
            as_dtype(self.dtype)
        abouts = {model: describe_model(model, self.trust_remote_code) for model in models}
        return Plan(
            methods={model: self._methods_and_benchmarks(about)[0] for model, about in abouts.items()},
            benchmarks=chosen,
            data=data,
            output=Path(self.out),
            batch_size=self.batch_size,
            limits=limits,
            max_new_tokens=self.max_new_tokens or (presets.MAX_NEW_TOKENS if self.preset else None),
            decoding=decoding,
            seeds=self.seeds or (self.seed,),
            skip_bad_images=self.skip_bad_images,
            engine=self.engine,
            engine_options=self._engine_options(),
        )

    def chosen_benchmarks(self) -> tuple[benchmarks.Benchmark, ...]:
        """The benchmarks with their settings."""
        return self._methods_and_benchmarks(None)[1]

    def packages(self) -> list[str]:
        """The packages that the data, the scores and the engine need, so that all missing ones can be reported at once."""
        chosen = self.chosen_benchmarks()
        places = self._places(self._models(), [b.name for b in chosen])
        return [
            *(["nltk"] if any(benchmark.needs_nltk for benchmark in chosen) else []),
            *("scipy", "statsmodels"),
            *(package for place in places.values() for package in scene_packages(place)),
            *([self.engine] if self.engine in EXTRAS else []),
        ]

    def _models(self) -> list[str]:
        return [str(model) for model in parse_list(self.model, lambda _: True)]

    def _engine_options(self) -> dict[str, Any]:
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

    def _methods_and_benchmarks(self, model: Any) -> tuple[tuple[Method, ...], tuple[benchmarks.Benchmark, ...]]:
        """Both with their settings; other settings of methods are those recommended for `model`."""
        from revisit import methods

        def make(name: str, settings: dict[str, Any]) -> Method:
            cls: Any = methods.find(name)
            if self.preset and name != "revisit" and hasattr(cls, "official"):
                made: Method = cls.official(**settings)
                return made if model is None else made.for_model(model.config.model_type)
            if model is None:
                return methods.get(name, **settings)
            return methods.as_method(name, model.config.model_type if self.preset else model, **settings)

        wanted = methods.parse_methods(self.method)
        tests = [(benchmarks.find(name).name, own) for name, own in BENCHMARKS.parse_list(self.benchmark)]
        fields = {name: set(methods.find(name).model_fields) for name, _ in wanted}
        scoped = scope(self.set, fields, [name for name, _ in tests])
        protocol = presets.OPTIONS if self.preset else {}
        return (
            tuple(make(name, {**scoped[name], **own}) for name, own in wanted),
            tuple(benchmarks.get(name, **{**protocol.get(name, {}), **scoped[name], **own}) for name, own in tests),
        )

    def _places(self, models: Sequence[str], names: Sequence[str]) -> dict[str, str]:
        """Benchmark → place, as `parse_data` reads it."""
        given = self.data
        if given is None:
            if set(models) != {EMBEDDED}:
                raise RevisitError(
                    "--data is missing: use --data download to download the benchmark's files "
                    f"once, --data DIR for your own, or --data {DEFAULT_SCENES} for generated scenes."
                )
            given = DEFAULT_SCENES
        return parse_data(given, names)


def load_config(file: Path | None, flags: Mapping[str, Any]) -> EvalConfig:
    """The file's values with the given flags on top."""
    return merge(read_yaml(file) if file else {}, flags, str(file))


def merge(values: Mapping[str, Any], flags: Mapping[str, Any], where: str) -> EvalConfig:
    """The values found in the file `where` with the given flags on top; `set` merges key by key."""
    read = EvalConfig.read(values, where)
    config = read.replace(**{**flags, "set": {**read.set, **flags.get("set", {})}})
    chosen = {"method", "benchmark", "set", "preset"}
    if chosen & values.keys() and not chosen & flags.keys():
        try:
            config.chosen_benchmarks()
        except RevisitError as error:
            raise RevisitError(f"{where}: {error}") from error
    return config


def read_yaml(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file; raises RevisitError if it cannot be read."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML without code."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Refuses duplicate keys, of which YAML would silently take the last."""
            seen: set[tuple[str, str]] = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

        def construct_scalar(self, node: Any) -> str:
            """Joins characters that JSON writes in halves (\\ud83e\\udd8a), refuses a half alone."""
            return super().construct_scalar(node).encode("utf-16", "surrogatepass").decode("utf-16")

    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise RevisitError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RevisitError(f"{path} is not UTF-8 text; save it as UTF-8.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())[:300]
        if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark) is not None:
            reason = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem or error.context}"
        raise RevisitError(f"{path} is not valid YAML: {reason}.") from error
    if value is None:  # an empty file
        return {}
    if not isinstance(value, dict):
        raise RevisitError(f"{path} must contain keys and values such as `model: tiny`, not a {type(value).__name__}.")
    return value


def scope(
    assignments: Mapping[str, Any], method_fields: Mapping[str, set[str]], benchmark_names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """`method.key` and `benchmark.key` to their own; a bare key to every method that has such a setting."""
    scoped: dict[str, dict[str, Any]] = {name: {} for name in [*method_fields, *benchmark_names]}
    everywhere = {key: value for key, value in assignments.items() if "." not in key}
    for key, value in everywhere.items():
        owners = [name for name, fields in method_fields.items() if key in fields]
        if not owners:
            known = set().union(*method_fields.values())
            raise unknown_setting(" and ".join(method_fields), key, known, "setting of the chosen methods:")
        for name in owners:
            scoped[name][key] = value
    for key, value in assignments.items():
        owner, dot, field = key.partition(".")
        if dot:
            if owner not in scoped:
                raise unknown(f"method or benchmark in --set {key}:", owner, scoped)
            scoped[owner][field] = value
    return scoped
