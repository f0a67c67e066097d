"""Methods side by side: one table per model and benchmark, ranked, and tested against a baseline.

A table only has cells that answered the same questions: same benchmark version, same decoding, same items with the same prompts
and pictures. Anything else raises RevisitError.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Any

from revisit.benchmarks.base import Metric
from revisit.decoding.method import value_text
from revisit.errors import RevisitError, did_you_mean, unknown
from revisit.evaluation import statistics
from revisit.evaluation.store import partial_text, read_results, read_scores, unfinished


@dataclass(frozen=True)
class Value:
    """One number of a table; `rank` is 1 for the best, 2 for the second best, 0 otherwise.

    With several seeds it is their mean, and `std` their standard deviation. `paired` has its interval at the level at which
    Holm's correction tests `p`, so that the interval and the corrected p-value agree.
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
class Row:
    """A method's numbers, by metric; `runs` has them by seed where there are several."""

    method: str
    values: Mapping[str, Value]
    runs: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """The methods on one benchmark with one model."""

    model: str
    benchmark: str
    version: str
    n: int
    metrics: tuple[Metric, ...]
    rows: tuple[Row, ...]
    baseline: str | None
    headline: str = ""  # name of the benchmark's main metric
    notes: tuple[str, ...] = ()
    variant: str = ""  # the settings in which it differs from other tables of the same benchmark and model

    @property
    def title(self) -> str:
        """The model, and what is special about the run."""
        return f"{self.model}, {self.variant}" if self.variant else self.model


@dataclass
class Scored:
    """A cell of results.json with the terms of its metrics."""

    entry: Mapping[str, Any]
    items: dict[str, str]
    per_item: dict[str, dict[str, tuple[float, float]]]
    values: dict[str, float]
    label: str


@dataclass(frozen=True)
class Runs:
    """The cells of one method: one, or one for each seed of sampling."""

    label: str
    cells: tuple[Scored, ...]

    def values(self, metric: str) -> list[float]:
        """The metric's value in every run."""
        return [cell.values[metric] for cell in self.cells]

    def terms(self, metric: str) -> list[list[Mapping[str, tuple[float, float]]]] | None:
        """The terms of the metric by stratum and run; None if it is neither a ratio nor a mean of ratios."""
        parts = [statistics.strata(metric, cell.values[metric], cell.per_item) for cell in self.cells]
        if not parts[0] or any(names != parts[0] for names in parts):
            return None
        return [[cell.per_item[name] for cell in self.cells] for name in parts[0]]


def compare_folder(
    output: Path,
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    resamples: int = statistics.RESAMPLES,
    problems: list[str] | None = None,
    keys: Collection[str] | None = None,
) -> list[Table]:
    """The tables of a `revisit eval` folder; the baseline is `greedy`, or the first method, unless named.

    If cells cannot be compared, raises RevisitError, or adds its message to `problems` if that is a list. `keys` selects cells.
    """
    results = read_results(output)
    groups: dict[tuple[tuple[str, str], ...], list[Scored]] = {}
    partial: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for entry in results["cells"]:
        if keys is not None and entry["key"] not in keys:
            continue
        if entry["status"] == "complete":
            groups.setdefault(_group(entry), []).append(_scored(output, entry))
        else:
            partial.setdefault(_group(entry), []).append(partial_text(entry))
    if not groups:
        todo = unfinished(results) or "Run `revisit eval` with this --out."
        raise RevisitError(f"{output} has no finished method yet. {todo}")
    if baseline is not None:
        known = {cell.label for cells in groups.values() for cell in cells}
        known |= {cell.entry["method"]["name"] for cells in groups.values() for cell in cells}
        if baseline not in known:
            raise RevisitError(
                f"{baseline} was not run in {output}.{did_you_mean(baseline, known)} Its methods: {', '.join(sorted(known))}."
            )
    tables = []
    for group, cells in groups.items():
        try:
            table = _table(cells, baseline, metrics, resamples)
        except RevisitError as error:
            if problems is None:
                raise
            problems.append(str(error))
            continue
        notes = [f"Partial, not in this table: {'; '.join(partial[group])}."] if group in partial else []
        tables.append(replace(table, variant=_variant(group, list(groups)), notes=(*notes, *table.notes)))
    if metrics and not any(table.metrics for table in tables):
        raise unknown("metric", metrics[0], {name for cells in groups.values() for c in cells for name in c.values})
    return [table for table in tables if table.metrics]


def _group(entry: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What two cells must share to be in one table, by name."""
    model, benchmark = entry["model"], entry["benchmark"]
    shared = {
        "model": model["name"],
        "benchmark": benchmark["name"],
        "version": benchmark["version"],
        **benchmark["options"],
        "weights": str(model.get("fingerprint"))[:8],
        "dtype": model.get("dtype"),
        "engine": model.get("engine"),
        **entry["decoding"],
    }
    return tuple((name, value_text(value)) for name, value in shared.items())


def _variant(group: tuple[tuple[str, str], ...], groups: Sequence[tuple[tuple[str, str], ...]]) -> str:
    """The settings in which a group differs from others of its model and benchmark, without the version, which tables show."""
    alike = [dict(other) for other in groups if other[:2] == group[:2]]
    return ", ".join(f"{name} {value}" for name, value in group[3:] if any(other.get(name) != value for other in alike))


def _scored(output: Path, entry: Mapping[str, Any]) -> Scored:
    stored = read_scores(output / entry["path"])
    return Scored(
        entry=entry,
        items=stored.items,
        per_item=stored.per_item,
        values={k: math.nan if m["value"] is None else m["value"] for k, m in entry["metrics"].items()},
        label=entry["method"]["label"],
    )


def _table(cells: list[Scored], baseline: str | None, wanted: Sequence[str], resamples: int) -> Table:
    entry = cells[0].entry
    _check_items(cells)
    methods, seeds = _by_method(cells)
    notes = []
    metrics = _metrics(cells, wanted)
    base = _baseline(methods, baseline)
    rows = _rows(methods, metrics, base, resamples)
    if len(seeds) > 1:
        notes.append(
            f"Mean ± standard deviation over the seeds {', '.join(map(str, seeds))}; intervals and tests resample items, an item with its "
            "answers under all seeds together."
        )
    if base is not None and len(methods) > 1:
        notes += _about_tests(rows)
    notes += list(dict.fromkeys(note for cell in cells for note in cell.entry.get("notes", [])))
    skipped = sorted({s["id"] for cell in cells for s in cell.entry["skipped"]})
    if skipped:
        more = "…" if len(skipped) > 5 else "."
        items = "1 item was" if len(skipped) == 1 else f"{len(skipped)} items were"
        notes.append(f"{items} skipped because an image cannot be read: {', '.join(skipped[:5])}{more}")
    return Table(
        model=entry["model"]["name"],
        benchmark=entry["benchmark"]["name"],
        version=entry["benchmark"]["version"],
        n=len(cells[0].items),
        metrics=metrics,
        rows=rows,
        baseline=base.label if base else None,
        headline=entry["benchmark"]["headline"],
        notes=tuple(notes),
    )


def _by_method(cells: Sequence[Scored]) -> tuple[list[Runs], list[int]]:
    """The cells method by method, each with the same seeds, and those seeds."""
    found: dict[str, dict[int, Scored]] = {}
    for cell in cells:
        found.setdefault(cell.label, {})[cell.entry["seed"]] = cell
    seeds = sorted(next(iter(found.values())))
    if any(sorted(runs) != seeds for runs in found.values()):
        listed = "; ".join(f"{label}: {', '.join(map(str, sorted(runs)))}" for label, runs in found.items())
        name = cells[0].entry["benchmark"]["name"]
        raise RevisitError(
            f"The methods were not run with the same seeds on {name} ({listed}): run the same command for all of them."
        )
    return [Runs(label, tuple(runs[seed] for seed in seeds)) for label, runs in found.items()], seeds


def _about_tests(rows: Sequence[Row]) -> list[str]:
    values = [(row.method, name, value) for row in rows for name, value in row.values.items()]
    tested = [(method, name, value) for method, name, value in values if not math.isnan(value.p)]
    family = "1 test" if len(tested) == 1 else f"{len(tested)} tests"
    notes = [f"Holm's correction covers the {family} of this table (metrics with a better direction)."]
    means = sorted({name for _, name, value in tested if value.paired and math.isnan(value.paired.p_permutation)})
    if means:
        notes.append(f"Means over settings ({', '.join(means)}) are tested by the bootstrap.")
    split = [f"{name} of {method}" for method, name, value in tested if _at_odds(value)]
    if split:
        notes.append(f"The test and the interval disagree for {', '.join(split)}; the test counts.")
    return notes


def _at_odds(value: Value) -> bool:
    """Whether the corrected test finds a difference and the corrected interval does not, or the other way round."""
    pair = value.paired
    if pair is None or math.isnan(pair.low) or pair.low == pair.high:
        return False
    return (value.p_holm < 0.05) != (pair.low > 0 or pair.high < 0)


def _check_items(cells: Sequence[Scored]) -> None:
    """Raises RevisitError unless the cells hold the same items with the same questions."""
    common = set(cells[0].items)
    for cell in cells[1:]:
        common &= set(cell.items)
        changed = next((i for i in cell.items if cells[0].items.get(i, cell.items[i]) != cell.items[i]), None)
        if changed is not None:
            raise RevisitError(
                f"{cells[0].label} and {cell.label} answered different questions with the same id {changed!r} of "
                f"{cell.entry['benchmark']['name']} (another prompt or picture): run both on the same data."
            )
    if any(set(cell.items) != common for cell in cells):
        listed = ", ".join(f"{cell.label} {len(cell.items)}" for cell in cells)
        name = cells[0].entry["benchmark"]["name"]
        raise RevisitError(
            f"The methods were not run on the same items of {name} ({listed}; {len(common)} in common): run the same "
            "command for all of them."
        )


def _metrics(cells: Sequence[Scored], wanted: Sequence[str]) -> tuple[Metric, ...]:
    """The metrics that all cells have: the wanted ones (names or patterns such as `coco_*/F1`), or all but sub-settings."""
    cell = cells[0]
    names = [
        name
        for name in cell.values
        if all(name in other.values for other in cells)
        if (any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted) if wanted else "/" not in name)
    ]
    return tuple(Metric.from_record(name, cell.entry["metrics"][name]) for name in names)


def _baseline(methods: Sequence[Runs], named: str | None) -> Runs | None:
    """The named method, by label or else by name; without a name `greedy`, or the first."""
    for attribute in (lambda m: m.label, lambda m: m.cells[0].entry["method"]["name"]):
        for method in methods:
            if attribute(method) == (named or "greedy"):
                return method
    return methods[0] if named is None else None


def _rows(methods: Sequence[Runs], metrics: Sequence[Metric], base: Runs | None, resamples: int) -> tuple[Row, ...]:
    found: dict[tuple[str, str], Value] = {}
    for metric in metrics:
        means = [sum(method.values(metric.name)) / len(method.cells) for method in methods]
        places = ranks(means, metric)
        for method, mean, rank in zip(methods, means, places, strict=True):
            pair = None if base is None or method is base else _paired(base, method, metric.name, resamples)
            tested = pair is not None and metric.better is not None
            low, high = _interval(method, metric, resamples)
            found[method.label, metric.name] = Value(
                value=mean,
                low=low,
                high=high,
                rank=rank,
                paired=pair,
                p=_p(pair) if tested and pair else math.nan,
                std=_std(method.values(metric.name)),
            )
    raw = [value.p for value in found.values()]
    corrected, levels = statistics.holm(raw), statistics.holm_levels(raw)
    found = {
        key: replace(value, p_holm=p, paired=value.paired and value.paired.at(level))
        for (key, value), p, level in zip(found.items(), corrected, levels, strict=True)
    }
    return tuple(
        Row(
            method.label,
            {metric.name: found[method.label, metric.name] for metric in metrics},
            {cell.entry["seed"]: {metric.name: cell.values[metric.name] for metric in metrics} for cell in method.cells}
            if len(method.cells) > 1
            else {},
        )
        for method in methods
    )


def _std(values: Sequence[float]) -> float:
    """The sample standard deviation over seeds; NaN for a single one."""
    return stdev(values) if len(values) > 1 and not any(map(math.isnan, values)) else math.nan


def _interval(method: Runs, metric: Metric, resamples: int) -> tuple[float, float]:
    cell = method.cells[0]
    stored = cell.entry["metrics"][metric.name]
    if len(method.cells) == 1:
        low, high = (math.nan if stored[end] is None else stored[end] for end in ("low", "high"))
        return low, high
    terms = method.terms(metric.name)
    if terms is None or min(len(runs[0]) for runs in terms) < 2:
        return math.nan, math.nan
    found = statistics.mean_interval(terms, resamples=resamples)
    return found.low, found.high


def _paired(base: Runs, method: Runs, metric: str, resamples: int) -> statistics.Paired | None:
    ours, theirs = method.terms(metric), base.terms(metric)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return None
    return statistics.paired_runs(theirs, ours, resamples=resamples)


def _p(paired: statistics.Paired) -> float:
    """The permutation test's p-value; a mean over settings has only the bootstrap's."""
    return paired.p_bootstrap if math.isnan(paired.p_permutation) else paired.p_permutation


def ranks(values: Sequence[float], metric: Metric) -> list[int]:
    """1 for the best printed value, 2 for the next, ties sharing a rank; 0 where no direction or no value is better."""
    if metric.better is None:
        return [0] * len(values)
    sign = -1 if metric.better == "higher" else 1
    printed = [math.nan if math.isnan(v) else sign * float(metric.text(v)) for v in values]
    order = sorted({p for p in printed if not math.isnan(p)})[:2]
    if len(order) < 2:  # alone, or all alike: there is no best
        return [0] * len(values)
    return [order.index(p) + 1 if p in order else 0 for p in printed]
