"""A comparison of methods: its tables (values, differences to the baseline, seeds), and the files of `revisit compare`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from revisit.benchmarks import registry
from revisit.benchmarks.base import Metric
from revisit.evaluation.comparison import Table as Compared
from revisit.evaluation.comparison import Value, ranks
from revisit.evaluation.records import Stored
from revisit.report.document import (
    SUPERSCRIPT,
    Block,
    Cell,
    Document,
    Section,
    Table,
    Text,
    to_html,
    to_latex,
    to_markdown,
)

CSV_COLUMNS = (
    *("model", "benchmark", "version", "variant", "n", "method", "metric", "better", "value", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p_bootstrap", "p_permutation", "p", "p_holm"),
    *("level", "seed", "std"),
)

READING = (
    "Best in bold, second underlined. Brackets: 95 % intervals. Differences are to the baseline on the same items: a two-sided "
    "permutation test, p-values corrected by Holm over the tests of a table, and bootstrap intervals widened by the same correction. "
    "With few items the two can disagree; then a note names the cells, and the test counts. * p below 0.05, ** below 0.01, "
    "*** below 0.001. The CSV also has the uncorrected p."
)
LONGEST_NAME = 24  # characters of a method in a table; longer settings become a footnote


def short_names(labels: Iterable[str]) -> dict[str, str]:
    """What tables call methods: `revisit¹` for one with long settings."""
    names: dict[str, str] = {}
    for label in labels:
        long = len(label) > LONGEST_NAME and "(" in label
        mark = str(sum(name != other for other, name in names.items()) + 1).translate(SUPERSCRIPT) if long else ""
        names[label] = label.partition("(")[0] + mark if long else label
    return names


def footnotes(names: Mapping[str, str]) -> str:
    """The settings that `short_names` left out."""
    return "".join(
        f" {name.removeprefix(label.partition('(')[0])} {label.partition('(')[2].removesuffix(')')}."
        for label, name in names.items()
        if name != label
    )


def headline_metric(table: Compared) -> Metric:
    """The benchmark's main metric, or the first that the table has."""
    return next((metric for metric in table.metrics if metric.name == table.headline), table.metrics[0])


def verdict(table: Compared) -> str:
    """What a table says about its main metric, as one sentence."""
    metric, short = headline_metric(table), [row.method.partition("(")[0] for row in table.rows]
    base = next((row for row in table.rows if row.method == table.baseline), table.rows[0])
    parts = []
    for row, name in zip(table.rows, short, strict=True):
        value, called = row.values[metric.name], name if short.count(name) == 1 else row.method
        if row is base:
            continue
        if value.paired is None or math.isnan(value.p_holm):
            parts.append(f"{called} has {metric.name} {metric.text(value.value)}, not tested")
            continue
        found = f"({signed(metric, value.paired.difference)}, p (Holm) {p_value(value.p_holm)})"
        if value.p_holm < 0.05:
            better = (value.paired.difference > 0) == (metric.better == "higher")
            pair = f"from {metric.text(base.values[metric.name].value)} to {metric.text(value.value)}"
            parts.append(f"{called} {'improves' if better else 'worsens'} {metric.name} {pair} {found}")
        else:
            parts.append(f"{called} shows no significant difference in {metric.name} {found}")
    alone = f"{base.method} has {metric.name} {metric.text(base.values[metric.name].value)}"
    return f"{registry.title(table.benchmark)} ({table.title}, n = {table.n}): {'; '.join(parts) or alone}."


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


def p_value(p: float | None) -> str:
    """A p-value as papers print it, or a dash."""
    if p is None or math.isnan(p):
        return "–"
    if p == 0:
        return "<1e-300"
    return f"{p:.2f}" if p >= 0.01 else f"{p:.2e}"


def stored_value(cell: Stored, metric: Metric) -> tuple[float, float, float]:
    """(value, low, high) of a cell of results.json on the printed scale; NaN where undefined."""
    found = cell["metrics"][metric.name]
    value, low, high = (math.nan if found[k] is None else found[k] * metric.show for k in ("value", "low", "high"))
    return value, low, high


def ranked(cells: Sequence[Stored], metric: Metric, intervals: bool = False) -> list[Cell]:
    """The value of a metric in each cell of results.json: best in bold, second underlined."""
    digits, found = f".{metric.decimals}f", []
    raw = [math.nan if (value := cell["metrics"][metric.name]["value"]) is None else value for cell in cells]
    for cell, value, rank in zip(cells, raw, ranks(raw, metric), strict=True):
        _, low, high = stored_value(cell, metric)
        bounds = f"[{low:{digits}}, {high:{digits}}]" if intervals and not math.isnan(low) else ""
        found.append(Cell(metric.text(value), rank, bounds))
    return found


def value_table(tables: Sequence[Compared]) -> Table:
    """Methods as rows, models as groups of columns; all tables are of one benchmark and protocol."""
    names = short_names(row.method for table in tables for row in table.rows)
    lines: list[list[Cell | str]] = []
    for method, name in names.items():
        line: list[Cell | str] = [name]
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
    about = first.title if len(tables) == 1 else first.variant
    notes = " ".join(dict.fromkeys(note for table in tables for note in table.notes))
    return Table(
        ("Method", *(heading(m) for table in tables for m in table.metrics)),
        lines,
        f"{registry.title(first.benchmark)}{about and f', {about}'} ({first.version}{_size(tables)}). {notes}".strip()
        + footnotes(names),
        groups=[] if len(tables) == 1 else [(_group_title(table, tables), len(table.metrics)) for table in tables],
    )


def _size(tables: Sequence[Compared]) -> str:
    return f", n = {tables[0].n}" if len({table.n for table in tables}) == 1 else ""


def _group_title(table: Compared, tables: Sequence[Compared]) -> str:
    return table.model if _size(tables) else f"{table.model} (n = {table.n})"


def difference_tables(tables: Sequence[Compared]) -> list[Table]:
    """What each method adds to the baseline, with the tests."""
    found = []
    for table in tables:
        compared = [row for row in table.rows if row.method != table.baseline]
        names = short_names(row.method for row in table.rows)
        if table.baseline is None or not compared:
            continue
        lines: list[list[Cell | str]] = []
        for row in compared:
            line: list[Cell | str] = [names[row.method]]
            for metric in table.metrics:
                test = row.values[metric.name].paired
                if test is None or math.isnan(test.difference):
                    line.append("–")
                    continue
                low, high = (signed(metric, x) for x in (test.low, test.high))
                p = row.values[metric.name].p_holm
                tested = "" if math.isnan(p) else f"\np (Holm) {p_value(p)}{stars(p)}"
                line.append(Cell(signed(metric, test.difference), small=f"[{low}, {high}]{tested}"))
            lines.append(line)
        found.append(
            Table(
                (f"minus {names[table.baseline]}", *(heading(m) for m in table.metrics)),
                lines,
                f"{registry.title(table.benchmark)}, {table.title}: difference to {table.baseline}.",
            )
        )
    return found


def comparison_section(table: Compared) -> Section:
    """The verdict and all tables of one model and benchmark."""
    tables: list[Block] = [value_table([table]), *difference_tables([table])]
    return Section(f"{table.benchmark} · {table.title}", [Text(verdict(table), kind="verdict"), *tables])


def comparison_sections(tables: Sequence[Compared]) -> list[Section]:
    """A comparison as a terminal prints it: how to read the tables comes last, once."""
    return [*map(comparison_section, tables), *([Section("How to read this", [Text(READING)])] if tables else [])]


def document(tables: Sequence[Compared]) -> Document:
    """A comparison as a document."""
    return Document("Comparison of decoding methods", READING, [comparison_section(table) for table in tables])


def to_csv(tables: Sequence[Compared]) -> str:
    """One line per model, benchmark, method and metric, unrounded, on the metric's own scale."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        about = (table.model, table.benchmark, table.version, table.variant, table.n)
        for row in table.rows:
            for metric in table.metrics:
                value = row.values[metric.name]
                writer.writerow(
                    [
                        *(*about, row.method, metric.name, metric.better or ""),
                        *map(_number, (value.value, value.low, value.high)),
                        *_csv_test(table, value),
                        *("", _number(value.std)),
                    ]
                )
                for seed, values in row.runs.items():
                    own = [*about, row.method, metric.name, metric.better or "", _number(values[metric.name])]
                    writer.writerow([*own, *[""] * (len(CSV_COLUMNS) - len(own) - 2), seed, ""])
    return out.getvalue()


def _csv_test(table: Compared, value: Value) -> list[str]:
    test = value.paired
    if test is None:
        return [""] * 9
    numbers = (test.difference, test.low, test.high, test.p_bootstrap, test.p_permutation, value.p, value.p_holm)
    return [table.baseline or "", *map(_number, (*numbers, test.level))]


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


WRITERS: dict[str, Callable[[Sequence[Compared]], str]] = {
    ".md": lambda tables: to_markdown(document(tables)),
    ".csv": to_csv,
    ".tex": lambda tables: to_latex(document(tables)),
    ".html": lambda tables: to_html(document(tables)),
}
