"""Methods side by side: one table per model and benchmark, ranked, and tested against a baseline.

Only cells that answered the same questions meet in a table: same benchmark version, same decoding, same items with the
same prompts and pictures. Anything else is refused, or cut down to the common items on request, and said.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from revisit.benchmarks.base import Metric, ratio
from revisit.errors import RevisitError, unknown
from revisit.evaluation import statistics
from revisit.evaluation.store import read_results, read_scores

Test = Literal["permutation", "bootstrap"]


@dataclass(frozen=True)
class Value:
    """One number of a table; `rank` is 1 for the best, 2 for the second best, 0 otherwise."""

    value: float
    low: float = math.nan
    high: float = math.nan
    rank: int = 0
    paired: statistics.Paired | None = None
    p: float = math.nan
    p_holm: float = math.nan


@dataclass(frozen=True)
class Row:
    """A method's numbers, by metric."""

    method: str
    values: Mapping[str, Value]
    seconds: float
    tokens: int


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
    notes: tuple[str, ...] = ()
    variant: str = ""  # what tells it from other tables of the same benchmark and model

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
    notes: list[str] = field(default_factory=list)


def compare_folder(
    output: Path,
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    intersect: bool = False,
    test: Test = "permutation",
    resamples: int = statistics.RESAMPLES,
    problems: list[str] | None = None,
    keys: Collection[str] | None = None,
) -> list[Table]:
    """The tables of a `revisit eval` folder; the baseline is `greedy`, or the first method, unless named.

    A table that cannot be made is an error, or a sentence in `problems` where that is given; `keys` names the cells to compare.
    """
    results = read_results(output)
    groups: dict[tuple[str, ...], list[Scored]] = {}
    for entry in results["cells"]:
        if entry["status"] == "complete" and (keys is None or entry["key"] in keys):
            groups.setdefault(_group(entry), []).append(_scored(output, entry))
    if not groups:
        raise RevisitError(f"{output} holds no finished cell yet; run `revisit eval` with this --out to the end.")
    if baseline is not None:
        known = {cell.label for cells in groups.values() for cell in cells}
        known |= {cell.entry["method"]["name"] for cells in groups.values() for cell in cells}
        if baseline not in known:
            raise unknown("method", baseline, known)
    tables = []
    for group, cells in groups.items():
        try:
            table = _table(cells, baseline, metrics, intersect, test, resamples)
        except RevisitError as error:
            if problems is None:
                raise
            problems.append(str(error))
            continue
        tables.append(replace(table, variant=_variant(group, list(groups))))
    if metrics and not any(table.metrics for table in tables):
        raise unknown("metric", metrics[0], {name for cells in groups.values() for c in cells for name in c.values})
    return [table for table in tables if table.metrics]


def _group(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """What two cells must share to stand in one table."""
    benchmark = entry["benchmark"]
    return (
        entry["model"]["name"],
        benchmark["name"],
        benchmark["version"],
        f"weights {str(entry['model'].get('fingerprint'))[:8]}",
        str(entry["model"].get("dtype")),
        *(f"{name} {value}" for name, value in sorted(entry["decoding"].items())),
        f"seed {entry['seed']}" if entry["decoding"].get("temperature") is not None else "",
    )


def _variant(group: tuple[str, ...], groups: Sequence[tuple[str, ...]]) -> str:
    """What tells a group from the others of its model and benchmark."""
    alike = [other for other in groups if other[:3] == group[:3]]
    return ", ".join(part for n, part in enumerate(group) if len({other[n] for other in alike}) > 1 and part)


def _scored(output: Path, entry: Mapping[str, Any]) -> Scored:
    stored = read_scores(output / entry["path"])
    return Scored(
        entry=entry,
        items=stored.items,
        per_item=stored.per_item,
        values={k: math.nan if m["value"] is None else m["value"] for k, m in entry["metrics"].items()},
        label=entry["method"]["label"],
    )


def _table(
    cells: list[Scored], baseline: str | None, wanted: Sequence[str], intersect: bool, test: Test, resamples: int
) -> Table:
    entry = cells[0].entry
    notes = _same_items(cells, intersect)
    metrics = _metrics(cells, wanted)
    base = _baseline(cells, baseline)
    rows = _rows(cells, metrics, base, test, resamples)
    if base is not None and len(cells) > 1:
        notes += _about_tests(rows, base.label, test)
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
        notes=tuple(notes),
    )


def _about_tests(rows: Sequence[Row], baseline: str, test: Test) -> list[str]:
    values = [(name, value) for row in rows for name, value in row.values.items() if not math.isnan(value.p)]
    notes = [
        f"Differences are to {baseline} on the same items; p-values: {test} test, two-sided, Holm-corrected over the "
        f"{len(values)} tests of this table; * below 0.05, ** below 0.01, *** below 0.001."
    ]
    means = sorted({name for name, value in values if value.paired and math.isnan(value.paired.p_permutation)})
    if means and test == "permutation":
        notes.append(f"Means over settings ({', '.join(means)}) are tested by the bootstrap.")
    return notes


def _same_items(cells: list[Scored], intersect: bool) -> list[str]:
    """Makes the cells hold the same items or refuses; returns what a reader must know."""
    common = set(cells[0].items)
    for cell in cells[1:]:
        common &= set(cell.items)
        changed = next((i for i in cell.items if cells[0].items.get(i, cell.items[i]) != cell.items[i]), None)
        if changed is not None:
            raise RevisitError(
                f"{cells[0].label} and {cell.label} answered different questions under the same id {changed!r} of "
                f"{cell.entry['benchmark']['name']} (another prompt or picture): run both on the same data."
            )
    sizes = [(cell.label, len(cell.items)) for cell in cells]
    if {size for _, size in sizes} == {len(common)}:
        return []
    listed = ", ".join(f"{name} {n}" for name, n in sizes)
    name = cells[0].entry["benchmark"]["name"]
    if not intersect or not common:
        raise RevisitError(
            f"The methods were not run on the same items of {name} ({listed}; {len(common)} in common): run the same "
            "command for all of them, or add --intersect to compare on the common items."
        )
    dropped: set[str] = set()
    for cell in cells:
        dropped |= _restrict(cell, common)
    note = f"Only the {len(common)} items that all methods answered are compared ({listed})."
    left_out = f" Left out, because they are not counted item by item: {', '.join(sorted(dropped))}." if dropped else ""
    return [note + left_out]


def _restrict(cell: Scored, items: set[str]) -> set[str]:
    """Cuts a cell down to `items`; returns the metrics that cannot be: those that count groups of items."""
    kept = {}
    for name, terms in cell.per_item.items():
        if terms.keys() <= cell.items.keys():
            kept[name] = {unit: term for unit, term in terms.items() if unit in items}
    dropped = cell.values.keys() - kept.keys()
    cell.per_item = kept
    cell.values = {name: ratio(kept[name].values()) for name in cell.values if name in kept}
    cell.items = {i: h for i, h in cell.items.items() if i in items}
    return set(dropped)


def _metrics(cells: Sequence[Scored], wanted: Sequence[str]) -> tuple[Metric, ...]:
    """Those asked for (names or patterns such as `coco_*/F1`), else all that are not of a sub-setting; of all cells."""
    cell = cells[0]
    names = [
        name
        for name in cell.values
        if all(name in other.values for other in cells)
        if (any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted) if wanted else "/" not in name)
    ]
    entries = cell.entry["metrics"]
    return tuple(
        Metric(n, e["better"], e["show"], e["decimals"], e.get("rounded")) for n in names for e in [entries[n]]
    )


def _baseline(cells: Sequence[Scored], named: str | None) -> Scored | None:
    """The named method, by label or else by name; without a name `greedy`, or the first."""
    for attribute in (lambda c: c.label, lambda c: c.entry["method"]["name"]):
        for cell in cells:
            if attribute(cell) == (named or "greedy"):
                return cell
    return cells[0] if named is None else None


def _rows(
    cells: Sequence[Scored], metrics: Sequence[Metric], base: Scored | None, test: Test, resamples: int
) -> tuple[Row, ...]:
    found: dict[tuple[int, str], Value] = {}
    for metric in metrics:
        ranks = _ranks([cell.values[metric.name] for cell in cells], metric)
        for number, cell in enumerate(cells):
            whole = len(cell.items) == cell.entry["metrics"][metric.name]["n"]
            paired = None if base is None or cell is base else _paired(base, cell, metric.name, resamples)
            found[number, metric.name] = Value(
                value=cell.values[metric.name],
                **_interval(cell, metric, whole),
                rank=ranks[number],
                paired=paired,
                p=math.nan if paired is None else _p(paired, test),
            )
    corrected = statistics.holm([value.p for value in found.values()])
    found = {
        key: Value(v.value, v.low, v.high, v.rank, v.paired, v.p, p)
        for (key, v), p in zip(found.items(), corrected, strict=True)
    }
    return tuple(
        Row(
            cell.label,
            {metric.name: found[number, metric.name] for metric in metrics},
            cell.entry["seconds"],
            cell.entry["new_tokens"],
        )
        for number, cell in enumerate(cells)
    )


def _interval(cell: Scored, metric: Metric, whole: bool) -> dict[str, float]:
    if whole:
        stored = cell.entry["metrics"][metric.name]
        return {k: math.nan if stored[k] is None else stored[k] for k in ("low", "high")}
    found = statistics.interval(cell.per_item[metric.name], full=100 / metric.show)
    return {"low": found.low, "high": found.high}


def _paired(base: Scored, cell: Scored, metric: str, resamples: int) -> statistics.Paired | None:
    if metric in base.per_item and metric in cell.per_item:
        return statistics.paired(base.per_item[metric], cell.per_item[metric], resamples=resamples)
    parts = statistics.strata(metric, base.values[metric], base.per_item)
    if parts and parts == statistics.strata(metric, cell.values[metric], cell.per_item):
        return statistics.paired_strata(
            [base.per_item[p] for p in parts], [cell.per_item[p] for p in parts], resamples=resamples
        )
    return None


def _p(paired: statistics.Paired, test: Test) -> float:
    if test == "bootstrap" or math.isnan(paired.p_permutation):
        return paired.p_bootstrap
    return paired.p_permutation


def _ranks(values: Sequence[float], metric: Metric) -> list[int]:
    """1 for the best printed value, 2 for the next, ties sharing a rank; 0 where no direction is better."""
    if metric.better is None or len(values) < 2:
        return [0] * len(values)
    sign = -1 if metric.better == "higher" else 1
    printed = [math.nan if math.isnan(v) else sign * float(metric.text(v)) for v in values]
    order = sorted({p for p in printed if not math.isnan(p)})[:2]
    return [order.index(p) + 1 if p in order else 0 for p in printed]
