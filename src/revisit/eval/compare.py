"""Comparison of methods, one per model and benchmark: values, ranks, and tests against a baseline.

All logs of a comparison have the same scorer, decoding settings, prompts and images.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import TypeAlias

from revisit.decoding.method_id import MethodId, value_text
from revisit.errors import RevisitError, did_you_mean, listed, unknown
from revisit.eval import statistics
from revisit.eval.benchmarks.base import Metric, Scores
from revisit.eval.controls import control_note
from revisit.eval.log import Log, unfinished
from revisit.io.records import Fields

logger = logging.getLogger(__name__)

Group: TypeAlias = (
    "tuple[tuple[str, str], ...]"  # names and values of the settings that the logs of one comparison share
)


@dataclass(frozen=True)
class Value:
    """The value of one metric; `rank` is 1 for the best method, 2 for the second best, 0 otherwise.

    With several seeds it is their mean, and `std` their standard deviation. The interval of `paired` has the level at which Holm's
    correction tests `p`, so the interval and the corrected p-value agree.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    rank: int = 0
    paired: statistics.Paired | None = None
    p: float = math.nan
    p_holm: float = math.nan
    std: float = math.nan


class Values(dict[MethodId, dict[str, Value]]):
    """Method -> metric -> value. `values["revisit"]` also finds `revisit(layers=all)` if it is the only ReVisiT."""

    def __missing__(self, name: MethodId | str) -> dict[str, Value]:
        methods = [method for method in self if method.short == name]
        if len(methods) == 1:
            return self[methods[0]]
        problem = "has several settings" if methods else "was not compared"
        raise RevisitError(f"{str(name)!r} {problem}: use one of {', '.join(map(str, methods or self))}.")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The methods on one benchmark with one model.

    Attributes:
        values: Method -> metric -> value; a name without settings also works if only one method has it.
        headline: The benchmark's main metric.
        variant: The settings in which it differs from other comparisons of the same benchmark and model.
        logs: The compared logs.
    """

    model: str
    benchmark: str
    scorer: str
    n: int
    metrics: tuple[Metric, ...]
    values: Mapping[MethodId, Mapping[str, Value]]
    baseline: MethodId | None
    headline: str = ""
    notes: tuple[str, ...] = ()
    variant: str = ""
    logs: tuple[Log, ...] = ()

    def __repr__(self) -> str:
        return f"<Comparison {self.benchmark} · {self.title}: {len(self.values)} methods, n = {self.n}>"

    def _repr_html_(self) -> str:
        from revisit.eval.report.comparisons import notebook_html  # which compares

        return notebook_html(self)

    @property
    def title(self) -> str:
        """The model, and the settings in which the comparison differs from others."""
        return f"{self.model}, {self.variant}" if self.variant else self.model


def compare(
    logs: Iterable[Log],
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    resamples: int = statistics.RESAMPLES,
) -> list[Comparison]:
    """Compare the methods of complete logs, by default with `greedy` or else the first method as the baseline.

    Logs that cannot be compared are skipped with a warning; RevisitError is raised if no other logs remain.
    """
    if isinstance(logs, (str, Path)):
        raise RevisitError(f"compare takes logs, not a folder: compare(revisit.read_logs({str(logs)!r})).")
    logs = list(logs)
    complete = [log for log in logs if log.scores is not None]
    if not complete:
        raise RevisitError(f"No method is finished yet. {unfinished(logs) or 'Run `revisit eval` with this --out.'}")
    if baseline is not None:
        known = {name for log in complete for name in (str(log.spec.method), log.spec.method.name)}
        if baseline not in known:
            raise RevisitError(
                f"{baseline} was not run.{did_you_mean(baseline, known)} Methods: {', '.join(sorted(known))}."
            )
    variants, comparisons, errors = variants_of(logs), [], []
    for group in dict.fromkeys(map(group_of, complete)):
        same = [log for log in complete if group_of(log) == group]
        if all(log.spec.method.control for log in same):  # they only selected the items of --only-visual
            continue
        try:
            comparison = _compare(same, baseline, metrics, resamples)
        except RevisitError as error:
            logger.warning("%s", error)
            errors.append(error)
            continue
        partial = "; ".join(log.state for log in logs if log.scores is None and group_of(log) == group)
        notes = [f"Partial, not in this table: {partial}."] if partial else []
        comparisons.append(replace(comparison, variant=variants[same[0].path], notes=(*notes, *comparison.notes)))
    if errors and not comparisons:
        raise errors[0]
    if metrics and not any(comparison.metrics for comparison in comparisons):
        raise unknown("metric", metrics[0], {name for log in complete for name in _scores(log).metrics})
    return [comparison for comparison in comparisons if comparison.metrics]


def group_of(log: Log) -> Group:
    """Return the settings that two logs must share to be compared."""
    spec = log.spec
    shared: Fields = {
        "model": spec.model,
        "benchmark": spec.benchmark_name,
        "scorer": spec.scorer,
        **spec.options,
        "weights": spec.fingerprint[:8],
        "device": spec.device,
        "dtype": spec.dtype,
        "engine": spec.engine,
        "items": spec.subset or "all",
        **spec.decoding,
    }
    return tuple((name, value_text(value)) for name, value in shared.items())


def variants_of(logs: Sequence[Log]) -> dict[Path, str]:
    """Return for each log's path the settings in which it differs from other logs of its model and benchmark.

    The method is not such a setting. The scorer is one only if nothing else tells two logs apart.
    """
    groups = {log.path: group_of(log) for log in logs}
    variants = {}
    for path, group in groups.items():
        others = [dict(other) for other in groups.values() if other[:2] == group[:2]]  # model and benchmark
        changes = [{name for name, value in group if other.get(name) != value} for other in others]
        different = {name for names in changes for name in names if name != "scorer" or names == {"scorer"}}
        variants[path] = ", ".join(f"{name} {value}" for name, value in group if name in different)
    return variants


def control_notes(logs: Sequence[Log]) -> list[str]:
    """Return the notes on controls of all comparisons, without running the tests."""
    values: dict[Group, dict[MethodId, float]] = {}
    metrics: dict[Group, Metric] = {}
    for log in logs:
        if log.scores is not None and not log.spec.subset:
            metric = metrics.setdefault(group_of(log), log.scores.shown[log.scores.headline])
            values.setdefault(group_of(log), {}).setdefault(log.spec.method, log.scores.metrics[metric.name])
    return [
        f"{dict(group)['benchmark']}, {dict(group)['model']}: {note}"
        for group, metric in metrics.items()
        if (note := control_note(values[group], metric, MethodId("greedy")))
    ]


def _scores(log: Log) -> Scores:
    assert log.scores is not None
    return log.scores


def _compare(logs: list[Log], baseline: str | None, patterns: Sequence[str], resamples: int) -> Comparison:
    _check_items(logs)
    methods, seeds = _by_method(logs)
    metrics = _metrics(logs, patterns)
    base = _baseline(methods, baseline)
    values = _values(methods, metrics, base, resamples)
    notes = []
    if len(seeds) > 1:
        notes.append(
            f"Mean ± standard deviation over the seeds {', '.join(map(str, seeds))}; intervals and tests resample items, an item with its "
            "answers under all seeds together."
        )
    if base is not None and len(methods) > 1:
        notes += _test_notes(values)
    spec, n, headline = logs[0].spec, len(_scores(logs[0]).items), _scores(logs[0]).headline
    main = next((metric for metric in metrics if metric.name == headline), None)
    if excluded := logs[0].request.excluded:
        notes.append(
            f"Subset {spec.subset}: {excluded} of {excluded + n} items, which greedy decoding answers correctly without the image, are "
            "left out."
        )
    elif base is not None and main is not None:
        notes.append(control_note({method: row[main.name].value for method, row in values.items()}, main, base))
    for log in logs:
        if log.failed:
            reasons = listed([f"{answer.id}: {answer.error}" for answer in log.failed], 3)
            notes.append(f"{len(log.failed)} of {log.request.items} items have no answer and are left out ({reasons}).")
        notes += _scores(log).notes
    return Comparison(
        model=spec.model,
        benchmark=spec.benchmark_name,
        scorer=spec.scorer,
        n=n,
        metrics=metrics,
        values=values,
        baseline=base,
        headline=headline,
        notes=tuple(dict.fromkeys(filter(None, notes))),
        logs=tuple(logs),
    )


def _by_method(logs: Sequence[Log]) -> tuple[dict[MethodId, list[Log]], list[int]]:
    """Return the logs of every method in the order of the seeds, and the seeds, which must be the same for all methods."""
    methods: dict[MethodId, dict[int, Log]] = {}
    for log in logs:
        methods.setdefault(log.spec.method, {})[log.spec.seed] = log
    seeds = sorted(next(iter(methods.values())))
    if any(sorted(runs) != seeds for runs in methods.values()):
        listed = "; ".join(f"{method}: {', '.join(map(str, sorted(runs)))}" for method, runs in methods.items())
        raise RevisitError(
            f"The methods were not run with the same seeds on {logs[0].spec.benchmark_name} ({listed}): run the same command for "
            "all of them."
        )
    return {method: [runs[seed] for seed in seeds] for method, runs in methods.items()}, seeds


def _test_notes(values: Mapping[MethodId, Mapping[str, Value]]) -> list[str]:
    tested = [(name, value) for row in values.values() for name, value in row.items() if not math.isnan(value.p)]
    family = "1 test" if len(tested) == 1 else f"{len(tested)} tests"
    notes = [f"Holm's correction covers the {family} of this table (metrics with a better direction)."]
    means = sorted({name for name, value in tested if value.paired and math.isnan(value.paired.p_permutation)})
    if means:
        notes.append(f"Means over settings ({', '.join(means)}) are tested by the bootstrap.")
    return notes


def _check_items(logs: Sequence[Log]) -> None:
    """Raise RevisitError unless the logs have the same items with the same prompts and images."""
    # The hash of an item with the images of another one (a control) is followed by that one's.
    items_of = [{id: hash.partition(" ")[0] for id, hash in _scores(log).items.items()} for log in logs]
    first, name = items_of[0], logs[0].spec.benchmark_name
    for log, items in zip(logs[1:], items_of[1:], strict=True):
        changed = next((id for id, hash in items.items() if first.get(id, hash) != hash), None)
        if changed is not None:
            raise RevisitError(
                f"{logs[0].spec.method} and {log.spec.method} answered different questions with the same id {changed!r} of "
                f"{name} (another prompt or image): run both on the same data."
            )
    if any(items != first for items in items_of):
        listed = ", ".join(f"{log.spec.method} {len(items)}" for log, items in zip(logs, items_of, strict=True))
        common = len(set.intersection(*map(set, items_of)))
        raise RevisitError(
            f"The methods were not run on the same items of {name} ({listed}; {common} in common): run the same command for "
            "all of them."
        )


def _metrics(logs: Sequence[Log], patterns: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics of all logs that match a pattern (`coco_*/F1`), or without patterns all but those of sub-settings."""
    return tuple(
        metric
        for name, metric in _scores(logs[0]).shown.items()
        if all(name in _scores(log).metrics for log in logs)
        if (any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) if patterns else "/" not in name)
    )


def _baseline(methods: Iterable[MethodId], requested: str | None) -> MethodId | None:
    """Return the requested baseline, by its text or its name; by default `greedy`, or else the first method."""
    wanted = requested or "greedy"
    exact = [method for method in methods if method == wanted]
    named = [method for method in methods if method.name == wanted]
    default = next(iter(methods)) if requested is None else None
    return next(iter([*exact, *named]), default)


def _values(
    methods: Mapping[MethodId, list[Log]], metrics: Sequence[Metric], base: MethodId | None, resamples: int
) -> Values:
    raw: dict[tuple[str, MethodId], Value] = {}  # (metric, method) -> value without Holm's correction
    for metric in metrics:
        runs = {method: [_scores(log).metrics[metric.name] for log in logs] for method, logs in methods.items()}
        means = {method: sum(values) / len(values) for method, values in runs.items()}
        ranked = {method: value for method, value in means.items() if not method.control}
        rank = dict(zip(ranked, ranks(list(ranked.values()), metric), strict=True))
        for method, logs in methods.items():
            paired = None if base is None or method == base else _paired(methods[base], logs, metric.name, resamples)
            tested = paired is not None and metric.better is not None and not method.control
            low, high = _interval(logs, metric.name, resamples)
            raw[metric.name, method] = Value(
                value=means[method],
                low=low,
                high=high,
                rank=rank.get(method, 0),
                paired=paired,
                p=paired.p if tested and paired else math.nan,
                std=_std(runs[method]),
            )
    p_values = [value.p for value in raw.values()]
    corrected, levels = statistics.holm(p_values), statistics.holm_levels(p_values)
    values = Values({method: {} for method in methods})
    for ((metric_name, method), value), p, level in zip(raw.items(), corrected, levels, strict=True):
        values[method][metric_name] = replace(value, p_holm=p, paired=value.paired and value.paired.at(level))
    return values


def _std(values: Sequence[float]) -> float:
    """Return the sample standard deviation over seeds; NaN for a single seed."""
    return stdev(values) if len(values) > 1 and not any(map(math.isnan, values)) else math.nan


def _terms(logs: Sequence[Log], metric: str) -> list[list[statistics.Terms]] | None:
    """Return the terms of a metric by stratum and run; None if it is neither a ratio nor a mean of ratios."""
    runs = [_scores(log) for log in logs]
    strata = [statistics.strata(metric, scores.metrics[metric], scores.per_item) for scores in runs]
    if not strata[0] or any(names != strata[0] for names in strata):
        return None
    return [[scores.per_item[name] for scores in runs] for name in strata[0]]


def _interval(logs: Sequence[Log], metric: str, resamples: int) -> tuple[float, float]:
    interval = _scores(logs[0]).intervals[metric] if len(logs) == 1 else None
    if len(logs) > 1 and (terms := _terms(logs, metric)) and min(len(runs[0]) for runs in terms) > 1:
        interval = statistics.mean_interval(terms, resamples=resamples)
    return (interval.low, interval.high) if interval else (math.nan, math.nan)


def _paired(base: Sequence[Log], logs: Sequence[Log], metric: str, resamples: int) -> statistics.Paired | None:
    ours, theirs = _terms(logs, metric), _terms(base, metric)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    return statistics.paired_runs(theirs, ours, resamples=resamples)


def ranks(values: Sequence[float], metric: Metric) -> list[int]:
    """Rank printed values: 1 for the best, 2 for the next, ties share a rank; 0 without a direction or a value."""
    if metric.better is None:
        return [0] * len(values)
    sign = -1 if metric.better == "higher" else 1
    printed = [math.nan if math.isnan(v) else sign * float(metric.text(v)) for v in values]
    order = sorted({p for p in printed if not math.isnan(p)})[:2]
    if len(order) < 2:  # one value, or all equal: there is no best
        return [0] * len(values)
    return [order.index(p) + 1 if p in order else 0 for p in printed]
