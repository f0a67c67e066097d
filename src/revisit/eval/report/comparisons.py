"""A comparison of methods: its tables (values, differences to the baseline), and the files of `revisit compare`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from revisit.eval import benchmarks
from revisit.eval.benchmarks.base import Metric
from revisit.eval.compare import Comparison, Value, ranks
from revisit.eval.controls import is_blind
from revisit.eval.log import Log
from revisit.eval.report.document import (
    SUPERSCRIPT,
    Block,
    Cell,
    Document,
    Section,
    Table,
    Text,
    to_latex,
    to_markdown,
)
from revisit.explain.records import plain_cell

CSV_COLUMNS = (
    *("model", "benchmark", "scorer", "variant", "n", "method", "metric", "better", "value", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p_bootstrap", "p_permutation", "p", "p_holm"),
    *("level", "std"),
)

READING = (
    "Best in bold, second underlined. Brackets: 95 % intervals. Differences are to the baseline on the same items: a two-sided "
    "permutation test, p-values corrected by Holm over the tests of a table, and bootstrap intervals widened by the same correction. "
    "With few items the two can disagree; the test takes precedence. * p below 0.05, ** below 0.01, "
    "*** below 0.001. `revisit compare --out FILE.csv` also writes the uncorrected p."
)
LONGEST_NAME = 24  # characters of a method in a table; longer settings become a footnote


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """Return the names of methods in tables: `revisit¹` for one with long settings."""
    names: dict[str, str] = {}
    for label in labels:
        long = len(label) > LONGEST_NAME and "(" in label
        mark = str(sum(name != other for other, name in names.items()) + 1).translate(SUPERSCRIPT) if long else ""
        names[label] = label.partition("(")[0] + mark if long else label
    return names


def footnotes(names: Mapping[str, str]) -> str:
    """Return the settings that `short_names` left out."""
    return "".join(
        f" {name.removeprefix(label.partition('(')[0])} {label.partition('(')[2].removesuffix(')')}."
        for label, name in names.items()
        if name != label
    )


def headline_metric(table: Comparison) -> Metric:
    """Return the benchmark's main metric, or the first that the table has."""
    return next((metric for metric in table.metrics if metric.name == table.headline), table.metrics[0])


def verdict(table: Comparison) -> str:
    """Summarize a comparison's main metric in one sentence."""
    metric, short = headline_metric(table), [method.partition("(")[0] for method in table.values]
    base = table.baseline or next(iter(table.values))
    was = metric.text(table.values[base][metric.name].value)
    parts = []
    for (method, values), name in zip(table.values.items(), short, strict=True):
        value, called = values[metric.name], name if short.count(name) == 1 else method
        if method == base or is_blind(method):
            continue
        if value.paired is None or math.isnan(value.p_holm):
            parts.append(f"{called} has {metric.name} {metric.text(value.value)}, not tested")
            continue
        found = f"({signed(metric, value.paired.difference)}, p = {p_value(value.p_holm)})"
        if value.p_holm < 0.05:
            better = (value.paired.difference > 0) == (metric.better == "higher")
            pair = f"from {was} to {metric.text(value.value)}"
            parts.append(f"{called} {'improves' if better else 'worsens'} {metric.name} {pair} {found}")
        else:
            parts.append(f"{called} shows no significant difference in {metric.name} {found}")
    alone = f"{base} has {metric.name} {was}"
    return f"{benchmarks.title(table.benchmark)} ({table.title}, n = {table.n}): {'; '.join(parts) or alone}."


def finding(tables: Iterable[Comparison]) -> str:
    """Return the significant changes of the main metrics in one line, as the title of a page."""
    found, compared = [], []
    for table in tables:
        metric = headline_metric(table)
        for method, values in table.values.items():
            value = values[metric.name]
            if value.paired is None or is_blind(method):
                continue
            compared.append(metric.name)
            if value.p_holm < 0.05:
                better = (value.paired.difference > 0) == (metric.better == "higher")
                found.append(f"{method.partition('(')[0]} {'improves' if better else 'worsens'} {metric.name}")
    if compared and not found:
        return f"No significant difference in {' or '.join(dict.fromkeys(compared))}"
    return "; ".join(dict.fromkeys(found)) or "Results"


def heading(metric: Metric) -> str:
    """Return a metric's name with the direction that is better."""
    return metric.name + {"higher": " ↑", "lower": " ↓", None: ""}[metric.better]


def value_text(metric: Metric, value: Value) -> str:
    """Format a value, with its standard deviation if there are several seeds."""
    text = metric.text(value.value)
    return text if math.isnan(value.std) else f"{text} ± {value.std * metric.show:.{metric.decimals}f}"


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
    """Return the value of a metric in each complete log: best in bold, second underlined."""
    digits, found = f".{metric.decimals}f", []
    raw = [math.nan if log.scores is None else log.scores.metrics[metric.name] for log in logs]
    for log, value, rank in zip(logs, raw, ranks(raw, metric), strict=True):
        _, low, high = log.scores.value(metric.name) if log.scores else (math.nan,) * 3
        bounds = f"[{low:{digits}}, {high:{digits}}]" if intervals and not math.isnan(low) else ""
        found.append(Cell(metric.text(value), rank, bounds))
    return found


def value_table(table: Comparison) -> Table:
    """Build the table of methods by metrics."""
    names = short_names(table.values)
    lines: list[list[Cell | str]] = []
    for method, values in table.values.items():
        line: list[Cell | str] = [names[method]]
        for metric in table.metrics:
            value = values[metric.name]
            bounds = "" if math.isnan(value.low) else f"[{metric.text(value.low)}, {metric.text(value.high)}]"
            line.append(Cell(value_text(metric, value), value.rank, bounds))
        lines.append(line)
    about = f"{benchmarks.title(table.benchmark)}, {table.title} ({table.scorer}, n = {table.n})."
    caption = " ".join((about, *table.notes)) + footnotes(names)
    return Table(("Method", *map(heading, table.metrics)), lines, caption)


def difference_table(table: Comparison) -> list[Table]:
    """Build the table of the differences to the baseline, with the tests; empty if there is nothing to compare."""
    compared = {method: values for method, values in table.values.items() if method != table.baseline}
    if table.baseline is None or not compared:
        return []
    names = short_names(table.values)
    lines: list[list[Cell | str]] = []
    for method, values in compared.items():
        line: list[Cell | str] = [names[method]]
        for metric in table.metrics:
            test = values[metric.name].paired
            if test is None or math.isnan(test.difference):
                line.append("–")
                continue
            low, high = (signed(metric, x) for x in (test.low, test.high))
            p = values[metric.name].p_holm
            tested = "" if math.isnan(p) else f"\np {p_value(p)}{stars(p)}"
            line.append(Cell(signed(metric, test.difference), small=f"[{low}, {high}]{tested}"))
        lines.append(line)
    caption = (
        f"{benchmarks.title(table.benchmark)}, {table.title}: difference to {table.baseline}; p corrected by Holm."
    )
    return [Table((f"minus {names[table.baseline]}", *map(heading, table.metrics)), lines, caption)]


def tables_of(table: Comparison) -> list[Block]:
    """Build all tables of one model and benchmark."""
    return [value_table(table), *difference_table(table)]


def comparison_section(table: Comparison) -> Section:
    """Build the section of one model and benchmark: a verdict and all tables."""
    return Section(f"{table.benchmark} · {table.title}", [Text(verdict(table), kind="verdict"), *tables_of(table)])


def comparison_sections(tables: Sequence[Comparison]) -> list[Section]:
    """Build a section per comparison; how to read the tables comes last, once."""
    return [*map(comparison_section, tables), *([Section("How to read this", [Text(READING)])] if tables else [])]


def to_csv(tables: Sequence[Comparison]) -> str:
    """Write one line per model, benchmark, method and metric, unrounded, on the scale of the printed tables."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        about = (table.model, table.benchmark, table.scorer, table.variant, table.n)
        for method, values in table.values.items():
            for metric in table.metrics:
                own = [plain_cell(str(text)) for text in (*about, method, metric.name, metric.better or "")]
                value, scale = values[metric.name], metric.show
                numbers = [_number(x * scale) for x in (value.value, value.low, value.high)]
                writer.writerow([*own, *numbers, *_csv_test(table, value, scale), _number(value.std * scale)])
    return out.getvalue()


def _csv_test(table: Comparison, value: Value, scale: float) -> list[str]:
    test = value.paired
    if test is None:
        return [""] * 9
    differences = [_number(x * scale) for x in (test.difference, test.low, test.high)]
    tests = (test.p_bootstrap, test.p_permutation, value.p, value.p_holm, test.level)
    return [plain_cell(table.baseline or ""), *differences, *map(_number, tests)]


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


WRITERS: dict[str, Callable[[Sequence[Comparison]], str]] = {
    ".md": lambda tables: to_markdown(Document(finding(tables), "", comparison_sections(tables))),
    ".csv": to_csv,
    ".tex": lambda tables: to_latex(Document(finding(tables), "", comparison_sections(tables))),
}
