"""A comparison of methods as tables of a document: values, differences to the baseline, and values by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from revisit.benchmarks import registry
from revisit.benchmarks.base import Metric
from revisit.evaluation.comparison import Table as Compared
from revisit.evaluation.comparison import Value
from revisit.report.document import Cell, Table, rows_of


def heading(metric: Metric) -> str:
    """A metric's name with the direction that is better."""
    return metric.name + {"higher": " ↑", "lower": " ↓", None: ""}[metric.better]


def value_text(metric: Metric, value: Value) -> str:
    """The value as it is printed, with its standard deviation over seeds where there are several."""
    text = metric.text(value.value)
    return text if math.isnan(value.std) else f"{text} ± {value.std * metric.show:.{metric.decimals}f}"


def signed(metric: Metric, value: float) -> str:
    """A difference on the printed scale, or a dash."""
    return "–" if math.isnan(value) else f"{value * metric.show:+.{metric.decimals}f}"


def stars(p: float) -> str:
    """* below 0.05, ** below 0.01, *** below 0.001, after correction."""
    return "" if math.isnan(p) else "*" * sum(p < bound for bound in (0.05, 0.01, 0.001))


def p_value(p: float | str | None) -> str:
    """A p-value as papers print it."""
    if p is None or isinstance(p, str):
        return p or "–"
    if math.isnan(p):
        return "–"
    if p == 0:
        return "<1e-300"
    return f"{p:.2f}" if p >= 0.01 else f"{p:.2e}"


def value_table(tables: Sequence[Compared]) -> Table:
    """Methods as rows, models as groups of columns, as the paper prints it."""
    methods = list(dict.fromkeys(row.method for table in tables for row in table.rows))
    lines: list[list[Cell | str]] = []
    for method in methods:
        line: list[Cell | str] = [method]
        for table in tables:
            row = next((row for row in table.rows if row.method == method), None)
            for metric in table.metrics:
                if row is None:
                    line.append("")
                    continue
                value = row.values[metric.name]
                bounds = "" if math.isnan(value.low) else f"[{metric.text(value.low)}, {metric.text(value.high)}]"
                line.append(Cell(value_text(metric, value), value.rank, bounds))
        lines.append(line)
    first = tables[0]
    notes = " ".join(dict.fromkeys(note for table in tables for note in table.notes))
    return Table(
        ("Method", *(heading(m) for table in tables for m in table.metrics)),
        rows_of(lines),
        f"{registry.title(first.benchmark)} ({first.version}{_size(tables)}). {notes}".strip(),
        groups=tuple((_group_title(table, tables), len(table.metrics)) for table in tables),
    )


def _size(tables: Sequence[Compared]) -> str:
    return f", n = {tables[0].n}" if len({table.n for table in tables}) == 1 else ""


def _group_title(table: Compared, tables: Sequence[Compared]) -> str:
    return table.title if _size(tables) else f"{table.title} (n = {table.n})"


def difference_tables(tables: Sequence[Compared]) -> list[Table]:
    """What each method adds to the baseline, with the tests."""
    found = []
    for table in tables:
        compared = [row for row in table.rows if row.method != table.baseline]
        if table.baseline is None or not compared:
            continue
        lines: list[list[Cell | str]] = []
        for row in compared:
            line: list[Cell | str] = [row.method]
            for metric in table.metrics:
                test = row.values[metric.name].paired
                if test is None or math.isnan(test.difference):
                    line.append("–")
                    continue
                low, high = (signed(metric, x) for x in (test.low, test.high))
                p = row.values[metric.name].p_holm
                tested = "" if math.isnan(p) else f"\np {p_value(p)}{stars(p)}"
                line.append(Cell(signed(metric, test.difference), small=f"[{low}, {high}]{tested}"))
            lines.append(line)
        found.append(
            Table(
                (f"minus {table.baseline}", *(heading(m) for m in table.metrics)),
                rows_of(lines),
                f"{registry.title(table.benchmark)}, {table.title}: difference to {table.baseline}.",
            )
        )
    return found


def seed_tables(tables: Sequence[Compared]) -> list[Table]:
    """The values of every seed, where there are several."""
    found = []
    for table in tables:
        if not table.seeds:
            continue
        lines = [
            [row.method, str(seed), *(metric.text(values[metric.name]) for metric in table.metrics)]
            for row in table.rows
            for seed, values in row.runs.items()
        ]
        found.append(
            Table(
                ("Method", "Seed", *(heading(m) for m in table.metrics)),
                rows_of(lines),
                f"{registry.title(table.benchmark)}, {table.title}: every seed.",
                left=2,
                folded=len(lines) > 12,
            )
        )
    return found
