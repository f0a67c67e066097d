"""Methods side by side: one comparison per model and benchmark, ranked, and tested against a baseline.

A comparison only has logs with the same items: same benchmark version, same decoding, same prompts and images.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import stdev
from typing import Any, TypeAlias

from revisit.decoding.method import value_text
from revisit.errors import RevisitError, did_you_mean, unknown
from revisit.eval import statistics
from revisit.eval.benchmarks.base import Metric, Scores
from revisit.eval.controls import about_controls, is_blind
from revisit.eval.log import Log, unfinished

logger = logging.getLogger(__name__)

Group: TypeAlias = "tuple[tuple[str, str], ...]"  # what logs of one comparison share, by name


@dataclass(frozen=True)
class Value:
    """One number of a comparison; `rank` is 1 for the best, 2 for the second best, 0 otherwise.

    With several seeds it is their mean, and `std` their standard deviation. `paired` has its interval at the level at which Holm's
    correction tests `p`, so that the interval and the corrected p-value agree.
    """

    value: float
    low: float = math.nan
    high: float = math.nan
    rank: int = 0
    paired: statistics.Paired | None = None
    p: float = math.nan
    p_holm: float = math.nan
    std: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """The methods on one benchmark with one model.

    Attributes:
        values: Method -> metric -> its number.
        headline: The benchmark's main metric.
        variant: The settings in which it differs from other comparisons of the same benchmark and model.
        logs: What was compared.
    """

    model: str
    benchmark: str
    scorer: str
    n: int
    metrics: tuple[Metric, ...]
    values: Mapping[str, Mapping[str, Value]]
    baseline: str | None
    headline: str = ""
    notes: tuple[str, ...] = ()
    variant: str = ""
    logs: tuple[Log, ...] = ()

    @property
    def title(self) -> str:
        """The model, and what is special about the run."""
        return f"{self.model}, {self.variant}" if self.variant else self.model


def compare(
    logs: Sequence[Log],
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    resamples: int = statistics.RESAMPLES,
) -> list[Comparison]:
    """Compare the methods of complete logs; the baseline is `greedy`, or the first method, unless named.

    Logs that cannot be compared are left out with a warning; raise RevisitError if there are no others.
    """
    if isinstance(logs, (str, Path)):
        raise RevisitError(f"compare takes logs, not a folder: compare(revisit.read_logs({str(logs)!r})).")
    groups: dict[Group, list[Log]] = {}
    partial: dict[Group, list[str]] = {}
    for log in logs:
        if log.scores is not None:
            groups.setdefault(_group(log), []).append(log)
        else:
            partial.setdefault(_group(log), []).append(log.state)
    if not groups:
        raise RevisitError(f"No method is finished yet. {unfinished(logs) or 'Run `revisit eval` with this --out.'}")
    complete = [log for group in groups.values() for log in group]
    if baseline is not None:
        known = {name for log in complete for name in (log.spec.method, log.spec.method_name)}
        if baseline not in known:
            raise RevisitError(
                f"{baseline} was not run.{did_you_mean(baseline, known)} Methods: {', '.join(sorted(known))}."
            )
    variants, found, problems = variants_of(logs), [], []
    for group, same in groups.items():
        if all(is_blind(log.spec.method) for log in same):  # that chose the items of a subset
            continue
        try:
            made = _compare(same, baseline, metrics, resamples)
        except RevisitError as error:
            logger.warning("%s", error)
            problems.append(error)
            continue
        notes = [f"Partial, not in this table: {'; '.join(partial[group])}."] if group in partial else []
        found.append(replace(made, variant=variants[same[0].path], notes=(*notes, *made.notes)))
    if problems and not found:
        raise problems[0]
    if metrics and not any(made.metrics for made in found):
        raise unknown("metric", metrics[0], {name for log in complete for name in _scores(log).metrics})
    return [made for made in found if made.metrics]


def _group(log: Log) -> Group:
    """Return what two logs must share to be compared, by name."""
    spec = log.spec
    shared: dict[str, Any] = {
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


def variants_of(logs: Sequence[Log]) -> dict[Any, str]:
    """Return for each log's path the settings in which it differs from others of its model and benchmark, but for the method.

    The scorer is left out: tables show it.
    """
    groups = {log.path: _group(log) for log in logs}
    found = {}
    for path, group in groups.items():
        alike = [dict(other) for other in groups.values() if other[:2] == group[:2]]
        own = [(name, value) for name, value in group[3:] if any(other.get(name) != value for other in alike)]
        found[path] = ", ".join(f"{name} {value}" for name, value in own)
    return found


def control_notes(logs: Sequence[Log]) -> list[str]:
    """Return the sentences about controls of all comparisons, from the scores alone."""
    rows: dict[Group, dict[str, float]] = {}
    metrics: dict[Group, Metric] = {}
    for log in logs:
        if log.scores is not None and not log.spec.subset:
            metric = metrics.setdefault(_group(log), log.scores.shown[log.scores.headline])
            rows.setdefault(_group(log), {}).setdefault(log.spec.method, log.scores.metrics[metric.name])
    return [
        f"{dict(group)['benchmark']}, {dict(group)['model']}: {note}"
        for group, values in rows.items()
        for note in about_controls(values, metrics[group], "greedy")
    ]


def about_added(before: Sequence[Log], tables: Sequence[Comparison]) -> list[str]:
    """Return a sentence for every table with tests to which a run added methods; `before` is what was there."""
    known, notes = {log.path for log in before if log.scores is not None}, []
    for table in tables:
        earlier = {log.spec.method for log in table.logs if log.path in known and not is_blind(log.spec.method)}
        added = [method for method in table.values if method not in earlier and not is_blind(method)]
        if added and len(earlier) > 1:
            notes.append(
                f"{table.benchmark}, {table.title}: {', '.join(added)} added. Holm's correction covers the tests of all methods, so the "
                f"corrected p-values of {', '.join(sorted(earlier - {table.baseline}))} have changed."
            )
    return notes


def _scores(log: Log) -> Scores:
    assert log.scores is not None
    return log.scores


def _compare(logs: list[Log], baseline: str | None, wanted: Sequence[str], resamples: int) -> Comparison:
    _check_items(logs)
    methods, seeds = _by_method(logs)
    metrics = _metrics(logs, wanted)
    base = _baseline(methods, baseline)
    values = _values(methods, metrics, base, resamples)
    notes = []
    if len(seeds) > 1:
        notes.append(
            f"Mean ± standard deviation over the seeds {', '.join(map(str, seeds))}; intervals and tests resample items, an item with its "
            "answers under all seeds together."
        )
    if base is not None and len(methods) > 1:
        notes += _about_tests(values)
    main = next((metric for metric in metrics if metric.name == _scores(logs[0]).headline), None)
    if left_out := logs[0].request.left_out:
        notes.append(
            f"Subset {logs[0].spec.subset}: {left_out} of {left_out + len(_scores(logs[0]).items)} items, which greedy decoding answers "
            "correctly without the image, are left out."
        )
    elif base is not None and main is not None:
        notes += about_controls({row: own[main.name].value for row, own in values.items()}, main, base)
    notes += list(dict.fromkeys(note for log in logs for note in _scores(log).notes))
    spec = logs[0].spec
    return Comparison(
        model=spec.model,
        benchmark=spec.benchmark_name,
        scorer=spec.scorer,
        n=len(_scores(logs[0]).items),
        metrics=metrics,
        values=values,
        baseline=base,
        headline=_scores(logs[0]).headline,
        notes=tuple(notes),
        logs=tuple(logs),
    )


def _by_method(logs: Sequence[Log]) -> tuple[dict[str, list[Log]], list[int]]:
    """Return the logs of every method, each with the same seeds in the same order, and those seeds."""
    found: dict[str, dict[int, Log]] = {}
    for log in logs:
        found.setdefault(log.spec.method, {})[log.spec.seed] = log
    seeds = sorted(next(iter(found.values())))
    if any(sorted(runs) != seeds for runs in found.values()):
        listed = "; ".join(f"{method}: {', '.join(map(str, sorted(runs)))}" for method, runs in found.items())
        raise RevisitError(
            f"The methods were not run with the same seeds on {logs[0].spec.benchmark_name} ({listed}): run the same command for "
            "all of them."
        )
    return {method: [runs[seed] for seed in seeds] for method, runs in found.items()}, seeds


def _about_tests(values: Mapping[str, Mapping[str, Value]]) -> list[str]:
    tested = [(name, value) for own in values.values() for name, value in own.items() if not math.isnan(value.p)]
    family = "1 test" if len(tested) == 1 else f"{len(tested)} tests"
    notes = [f"Holm's correction covers the {family} of this table (metrics with a better direction)."]
    means = sorted({name for name, value in tested if value.paired and math.isnan(value.paired.p_permutation)})
    if means:
        notes.append(f"Means over settings ({', '.join(means)}) are tested by the bootstrap.")
    return notes


def _check_items(logs: Sequence[Log]) -> None:
    """Raise RevisitError unless the logs have the same items with the same questions."""
    items = [_scores(log).items for log in logs]
    common, name = set(items[0]), logs[0].spec.benchmark_name
    for log, own in zip(logs[1:], items[1:], strict=True):
        common &= set(own)
        changed = next((i for i in own if items[0].get(i, own[i]) != own[i]), None)
        if changed is not None:
            raise RevisitError(
                f"{logs[0].spec.method} and {log.spec.method} answered different questions with the same id {changed!r} of "
                f"{name} (another prompt or image): run both on the same data."
            )
    if any(set(own) != common for own in items):
        listed = ", ".join(f"{log.spec.method} {len(own)}" for log, own in zip(logs, items, strict=True))
        raise RevisitError(
            f"The methods were not run on the same items of {name} ({listed}; {len(common)} in common): run the same "
            "command for all of them."
        )


def _metrics(logs: Sequence[Log], wanted: Sequence[str]) -> tuple[Metric, ...]:
    """Return the metrics that all logs have: the wanted ones (names or patterns such as `coco_*/F1`), or all but sub-settings."""
    first = _scores(logs[0])
    return tuple(
        metric
        for name, metric in first.shown.items()
        if all(name in _scores(log).metrics for log in logs)
        if (any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted) if wanted else "/" not in name)
    )


def _baseline(methods: Mapping[str, list[Log]], named: str | None) -> str | None:
    """Return the named method, by label or else by name; without a name `greedy`, or the first."""
    wanted = named or "greedy"
    if wanted in methods:
        return wanted
    default = next(iter(methods)) if named is None else None
    return next((method for method, logs in methods.items() if logs[0].spec.method_name == wanted), default)


def _values(
    methods: Mapping[str, list[Log]], metrics: Sequence[Metric], base: str | None, resamples: int
) -> dict[str, dict[str, Value]]:
    found: dict[tuple[str, str], Value] = {}
    for metric in metrics:
        own = {method: [_scores(log).metrics[metric.name] for log in logs] for method, logs in methods.items()}
        means = {method: sum(values) / len(values) for method, values in own.items()}
        ranked = {method: value for method, value in means.items() if not is_blind(method)}
        places = dict(zip(ranked, ranks(list(ranked.values()), metric), strict=True))
        for method, logs in methods.items():
            pair = None if base is None or method == base else _paired(methods[base], logs, metric.name, resamples)
            tested = pair is not None and metric.better is not None and not is_blind(method)
            low, high = _interval(logs, metric.name, resamples)
            found[method, metric.name] = Value(
                value=means[method],
                low=low,
                high=high,
                rank=places.get(method, 0),
                paired=pair,
                p=_p(pair) if tested and pair else math.nan,
                std=_std(own[method]),
            )
    raw = [value.p for value in found.values()]
    corrected, levels = statistics.holm(raw), statistics.holm_levels(raw)
    found = {
        key: replace(value, p_holm=p, paired=value.paired and value.paired.at(level))
        for (key, value), p, level in zip(found.items(), corrected, levels, strict=True)
    }
    return {method: {metric.name: found[method, metric.name] for metric in metrics} for method in methods}


def _std(values: Sequence[float]) -> float:
    """Return the sample standard deviation over seeds; NaN for a single one."""
    return stdev(values) if len(values) > 1 and not any(map(math.isnan, values)) else math.nan


def _terms(logs: Sequence[Log], metric: str) -> list[list[statistics.Terms]] | None:
    """Return the terms of a metric by stratum and run; None if it is neither a ratio nor a mean of ratios."""
    scores = [_scores(log) for log in logs]
    parts = [statistics.strata(metric, own.metrics[metric], own.per_item) for own in scores]
    if not parts[0] or any(names != parts[0] for names in parts):
        return None
    return [[own.per_item[name] for own in scores] for name in parts[0]]


def _interval(logs: Sequence[Log], metric: str, resamples: int) -> tuple[float, float]:
    if len(logs) == 1:
        found = _scores(logs[0]).intervals[metric]
    else:
        terms = _terms(logs, metric)
        enough = terms is not None and min(len(runs[0]) for runs in terms) > 1
        found = statistics.mean_interval(terms, resamples=resamples) if terms and enough else None
    return (found.low, found.high) if found else (math.nan, math.nan)


def _paired(base: Sequence[Log], logs: Sequence[Log], metric: str, resamples: int) -> statistics.Paired | None:
    ours, theirs = _terms(logs, metric), _terms(base, metric)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    return statistics.paired_runs(theirs, ours, resamples=resamples)


def _p(paired: statistics.Paired) -> float:
    """Return the permutation test's p-value; a mean over settings has only the bootstrap's."""
    return paired.p_bootstrap if math.isnan(paired.p_permutation) else paired.p_permutation


def ranks(values: Sequence[float], metric: Metric) -> list[int]:
    """Rank printed values: 1 for the best, 2 for the next, ties share a rank; 0 without a direction or a value."""
    if metric.better is None:
        return [0] * len(values)
    sign = -1 if metric.better == "higher" else 1
    printed = [math.nan if math.isnan(v) else sign * float(metric.text(v)) for v in values]
    order = sorted({p for p in printed if not math.isnan(p)})[:2]
    if len(order) < 2:  # alone, or all alike: there is no best
        return [0] * len(values)
    return [order.index(p) + 1 if p in order else 0 for p in printed]
