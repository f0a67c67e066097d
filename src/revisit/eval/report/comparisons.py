"""The tables of a comparison (values, differences to the baseline), and the files of `revisit compare`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from revisit.decoding.method_id import MethodId, assignments
from revisit.eval import benchmarks
from revisit.eval.benchmarks.base import Metric
from revisit.eval.compare import Comparison, Value, ranks
from revisit.eval.log import Log
from revisit.eval.report.document import (
    SUPERSCRIPT,
    Block,
    Cell,
    Document,
    Section,
    Table,
    Text,
    anchor,
    fragment,
    to_latex,
    to_markdown,
)
from revisit.io.records import plain_cell

CSV_COLUMNS = (
    *("model", "benchmark", "scorer", "variant", "n", "method", "metric", "better", "value", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p_bootstrap", "p_permutation", "p", "p_holm"),
    *("level", "std"),
)

LEGEND = (
    "Bold: significantly better than the baseline. Brackets: 95% intervals. Differences are to the baseline on the same items: a two-sided "
    "permutation test, p-values corrected by Holm over the tests of a table, and bootstrap intervals widened by the same correction. "
    "With few items the two can disagree; the test takes precedence. * p below 0.05, ** below 0.01, "
    "*** below 0.001. `revisit compare --out FILE.csv` also writes the uncorrected p."
)
LONGEST_NAME = 24  # characters of a method in a table; longer settings become a footnote


def short_names(methods: Iterable[MethodId]) -> dict[MethodId, str]:
    """Return the names of methods in tables: `revisit¹` instead of a text with long settings."""
    names: dict[MethodId, str] = {}
    for method in methods:
        long = len(str(method)) > LONGEST_NAME and method.settings
        mark = str(sum(other != name for other, name in names.items()) + 1).translate(SUPERSCRIPT)
        names[method] = method.short + mark if long else str(method)
    return names


def footnotes(names: Mapping[MethodId, str]) -> str:
    """Return the settings that `short_names` removed."""
    return "".join(
        f" {name.removeprefix(method.short)} {', '.join(assignments(method.settings))}."
        for method, name in names.items()
        if name != method
    )


def headline_metric(table: Comparison) -> Metric:
    """Return the benchmark's main metric, or else the first one of the table."""
    return next((metric for metric in table.metrics if metric.name == table.headline), table.metrics[0])


def change(metric: Metric, value: Value) -> str:
    """Return "improves" or "worsens" for a significant difference from the baseline, and an empty text for any other."""
    if value.paired is None or not value.p_holm < 0.05:
        return ""
    return "improves" if (value.paired.difference > 0) == (metric.better == "higher") else "worsens"


def verdict(table: Comparison) -> str:
    """Summarize a comparison's main metric in one sentence."""
    metric, names = headline_metric(table), [method.short for method in table.values]
    base = table.baseline or next(iter(table.values))
    base_value = metric.text(table.values[base][metric.name].value)
    clauses = []
    for (method, values), name in zip(table.values.items(), names, strict=True):
        if method == base or method.control:
            continue
        value, label = values[metric.name], name if names.count(name) == 1 else method
        if value.paired is None or math.isnan(value.p_holm):
            clauses.append(f"{label} has {metric.name} {metric.text(value.value)}, not tested")
            continue
        test = f"({signed(metric, value.paired.difference)}, p = {p_value(value.p_holm)})"
        if verb := change(metric, value):
            clauses.append(f"{label} {verb} {metric.name} from {base_value} to {metric.text(value.value)} {test}")
        else:
            clauses.append(f"{label} shows no significant difference in {metric.name} {test}")
    summary = "; ".join(clauses) or f"{base} has {metric.name} {base_value}"
    return f"{benchmarks.title(table.benchmark)} ({table.title}, n = {table.n}): {summary}."


def finding(tables: Iterable[Comparison]) -> str:
    """Return the significant changes of the main metrics in one line, as the title of a page."""
    changes, compared = [], []
    for table in tables:
        metric = headline_metric(table)
        for method, values in table.values.items():
            if values[metric.name].paired is not None and not method.control:
                compared.append(metric.name)
                if verb := change(metric, values[metric.name]):
                    changes.append(f"{method.short} {verb} {metric.name}")
    if compared and not changes:
        return f"No significant difference in {' or '.join(dict.fromkeys(compared))}"
    return "; ".join(dict.fromkeys(changes)) or "Results"


def heading(metric: Metric) -> str:
    """Return a metric's name with an arrow for the better direction."""
    return metric.name + {"higher": " ↑", "lower": " ↓", None: ""}[metric.better]


def signed(metric: Metric, value: float) -> str:
    """Format a difference on the printed scale; a dash if it is undefined."""
    return "–" if math.isnan(value) else f"{value * metric.show:+.{metric.decimals}f}".replace("-", "−")


def stars(p: float) -> str:
    """Mark a corrected p-value: * below 0.05, ** below 0.01, *** below 0.001."""
    return "" if math.isnan(p) else "*" * sum(p < bound for bound in (0.05, 0.01, 0.001))


def p_value(p: float | None) -> str:
    """Format a p-value as papers print it; a dash if it is undefined."""
    if p is None or math.isnan(p):
        return "–"
    if p == 0:
        return "<1e-300"
    return f"{p:.2f}" if p >= 0.01 else f"{p:.2e}"


def ranked(logs: Sequence[Log], metric: Metric, intervals: bool = False) -> list[Cell]:
    """Return the value of a metric in each complete log with its rank, and its interval if wanted."""
    digits, cells = f".{metric.decimals}f", []
    values = [math.nan if log.scores is None else log.scores.metrics[metric.name] for log in logs]
    for log, value, rank in zip(logs, values, ranks(values, metric), strict=True):
        _, low, high = log.scores.value(metric.name) if log.scores else (math.nan,) * 3
        bounds = f"[{low:{digits}}, {high:{digits}}]" if intervals and not math.isnan(low) else ""
        cells.append(Cell(metric.text(value), rank, bounds))
    return cells


def tables_of(table: Comparison) -> list[Block]:
    """Build the tables of a comparison: the values, and the differences to the baseline with their tests.

    Values that are significantly better than the baseline's have rank 1.
    """
    title, names = f"{benchmarks.title(table.benchmark)}, {table.title}", short_names(table.values)
    heads, base = [heading(metric) for metric in table.metrics], table.baseline
    caption = " ".join((f"{title} ({table.scorer}, n = {table.n}).", *table.notes)) + footnotes(names)
    lines: list[list[Cell | str]] = [
        [names[method], *(_value_cell(metric, values[metric.name]) for metric in table.metrics)]
        for method, values in table.values.items()
    ]
    differences: list[list[Cell | str]] = [
        [names[method], *(_difference_cell(metric, values[metric.name]) for metric in table.metrics)]
        for method, values in table.values.items()
        if method != base
    ]
    tables: list[Block] = [Table(("Method", *heads), lines, caption)]
    if base is not None and differences:
        caption = f"{title}: difference from {base}; p corrected by Holm."
        tables.append(Table((f"minus {names[base]}", *heads), differences, caption))
    return tables


def published_tables(table: Comparison) -> list[Block]:
    """Build the tables of a comparison as papers print them: metrics with a better direction, values without intervals."""
    metrics = tuple(metric for metric in table.metrics if metric.better) or table.metrics
    values, *differences = (block for block in tables_of(replace(table, metrics=metrics)) if isinstance(block, Table))
    label = "tab:" + anchor(f"{table.benchmark} {table.title}")
    title, names = f"{benchmarks.title(table.benchmark)}, {table.title}", short_names(table.values)
    rows: list[list[Cell | str]] = [
        [names[method], *(replace(_value_cell(m, found[m.name]), small="", rank=found[m.name].rank) for m in metrics)]
        for method, found in table.values.items()
    ]
    caption = f"{title}: {table.n} items; best in bold, second underlined.{footnotes(names)}"
    note = f"{title}: difference from {table.baseline}, with intervals and p-values corrected by Holm."
    return [
        replace(values, rows=rows, caption=caption, label=label),
        *(replace(block, caption=note, label=f"{label}-difference") for block in differences),
    ]


def _value_cell(metric: Metric, value: Value) -> Cell:
    """Format a value with its interval, and its standard deviation if there are several seeds."""
    std = "" if math.isnan(value.std) else f" ± {value.std * metric.show:.{metric.decimals}f}"
    bounds = "" if math.isnan(value.low) else f"[{metric.text(value.low)}, {metric.text(value.high)}]"
    return Cell(metric.text(value.value) + std, int(change(metric, value) == "improves"), bounds)


def _difference_cell(metric: Metric, value: Value) -> Cell:
    """Format a difference from the baseline with its interval and its corrected p-value; a dash if it is undefined."""
    test, p = value.paired, value.p_holm
    if test is None or math.isnan(test.difference):
        return Cell("–")
    tested = "" if math.isnan(p) else f"\np {p_value(p)}{stars(p)}"
    bounds = f"[{signed(metric, test.low)}, {signed(metric, test.high)}]"
    return Cell(signed(metric, test.difference), small=bounds + tested)


def comparison_sections(tables: Sequence[Comparison]) -> list[Section]:
    """Build a section per comparison with a verdict and its tables, and a legend for all."""
    sections = [
        Section(f"{table.benchmark} · {table.title}", [Text(verdict(table), kind="verdict"), *tables_of(table)])
        for table in tables
    ]
    return [*sections, *([Section("How to read this", [Text(LEGEND)])] if tables else [])]


def notebook_html(table: Comparison) -> str:
    """Write a comparison as HTML for a notebook, without the legend."""
    return fragment(Document("", "", comparison_sections([table])[:1]))


def to_csv(tables: Sequence[Comparison]) -> str:
    """Write one line per model, benchmark, method and metric, unrounded, on the scale of the printed tables."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        names = (table.model, table.benchmark, table.scorer, table.variant, str(table.n))
        for method, values in table.values.items():
            for metric in table.metrics:
                value, test, scale = values[metric.name], values[metric.name].paired, metric.show
                texts = (*names, str(method), metric.name, metric.better or "")
                numbers = [value.value * scale, value.low * scale, value.high * scale]
                tested: list[object] = [""] * 9
                if test is not None:
                    differences = (test.difference * scale, test.low * scale, test.high * scale)
                    p_values = (test.p_bootstrap, test.p_permutation, value.p, value.p_holm)
                    tested = [plain_cell(str(table.baseline or "")), *differences, *p_values, test.level]
                row = [*map(plain_cell, texts), *numbers, *tested, value.std * scale]
                writer.writerow("" if isinstance(x, float) and math.isnan(x) else x for x in row)
    return out.getvalue()


WRITERS: dict[str, Callable[[Sequence[Comparison]], str]] = {
    ".md": lambda tables: to_markdown(Document(finding(tables), "", comparison_sections(tables))),
    ".csv": to_csv,
    ".tex": lambda tables: to_latex(Document("", "", [Section("", published_tables(table)) for table in tables])),
}
