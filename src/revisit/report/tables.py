"""A comparison as markdown, CSV, LaTeX, or one self-contained HTML page: best in bold, second underlined."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Callable, Sequence

from revisit.benchmarks.base import Metric
from revisit.evaluation.comparison import Row, Table, Value
from revisit.pages.document import static_page
from revisit.report.comparisons import heading, seed_tables, signed, stars, value_text
from revisit.report.document import block_markdown, escape_markdown, markdown_table

CSV_COLUMNS = (
    *("model", "benchmark", "version", "variant", "n", "method", "metric", "better", "value", "low", "high"),
    *("baseline", "difference", "difference_low", "difference_high", "p_bootstrap", "p_permutation", "p_holm"),
    *("level", "seed", "std"),
)


def _difference(metric: Metric, value: Value) -> str:
    """`+1.20 [0.30, 2.10]`, on the scale that is printed."""
    if value.paired is None or math.isnan(value.paired.difference):
        return ""
    difference, low, high = (signed(metric, x) for x in (value.paired.difference, value.paired.low, value.paired.high))
    return f"{difference} [{low}, {high}]"


def to_markdown(tables: Sequence[Table]) -> str:
    """GitHub-flavoured tables, differences and p-values in a second table where there is a baseline."""
    blocks = []
    for table in tables:
        blocks.append(f"### {table.benchmark} · {table.title} (n = {table.n}, {table.version})")
        heads = ["method", *(heading(m) for m in table.metrics)]
        rows = [
            [escape_markdown(r.method), *(_markdown_value(m, r.values[m.name]) for m in table.metrics)]
            for r in table.rows
        ]
        blocks.append(markdown_table(heads, rows))
        compared = [row for row in table.rows if row.method != table.baseline]
        if table.baseline is not None and compared:
            heads = [f"minus {escape_markdown(table.baseline)}", *(m.name for m in table.metrics)]
            rows = [
                [escape_markdown(r.method), *(_markdown_test(m, r.values[m.name]) for m in table.metrics)]
                for r in compared
            ]
            blocks.append(markdown_table(heads, rows))
        for seeds in seed_tables([table]):
            blocks.append(block_markdown(seeds))
        if table.notes:
            notes = (note.replace("*", "\\*") for note in table.notes)
            blocks.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(blocks) + "\n"


def _markdown_test(metric: Metric, value: Value) -> str:
    p = "" if math.isnan(value.p_holm) else f", p {value.p_holm:.2g}"
    return _difference(metric, value) + p + stars(value.p_holm).replace("*", "\\*")


def _markdown_value(metric: Metric, value: Value) -> str:
    text = value_text(metric, value)
    return {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(value.rank, text)


def to_csv(tables: Sequence[Table]) -> str:
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


def _csv_test(table: Table, value: Value) -> list[str]:
    test = value.paired
    if test is None:
        return [""] * 8
    numbers = (test.difference, test.low, test.high, test.p_bootstrap, test.p_permutation, value.p_holm, test.level)
    return [table.baseline or "", *map(_number, numbers)]


def _number(value: float) -> str:
    return "" if math.isnan(value) else repr(float(value))


def to_latex(tables: Sequence[Table]) -> str:
    """booktabs tables as in the paper: best in bold, second underlined."""
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(map(_latex_table, tables)) + "\n"


def _latex_table(table: Table) -> str:
    arrows = {"higher": r" $\uparrow$", "lower": r" $\downarrow$", None: ""}
    heads = " & ".join(_latex(m.name) + arrows[m.better] for m in table.metrics)
    caption = (
        f"{_latex(table.benchmark)} with {_latex(table.title)} ($n={table.n}$; {_latex(table.version)}). "
        "Best in bold, second underlined."
    )
    if table.baseline:
        marks = ", ".join(rf"$^{{{'*' * n}}}p<{bound}$" for n, bound in ((1, 0.05), (2, 0.01), (3, 0.001)))
        caption += f" {marks} against {_latex(table.baseline)}, Holm-corrected."
    if table.seeds:
        caption += f" Mean $\\pm$ standard deviation over {len(table.seeds)} seeds."
    rows = []
    for row in table.rows:
        values = " & ".join(_latex_value(m, row.values[m.name]) for m in table.metrics)
        rows.append(rf"{_latex(row.method)} & {values} \\")
        for seed, own in row.runs.items():
            values = " & ".join(rf"{{\footnotesize {m.text(own[m.name])}}}" for m in table.metrics)
            rows.append(rf"\quad{{\footnotesize seed {seed}}} & {values} \\")
    return "\n".join(
        [
            *(f"% {note}" for note in table.notes),
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'r' * len(table.metrics)}}}",
            r"\toprule",
            rf"Method & {heads} \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, "\\" + c if c in "&%$#_{}" else c) for c in text)


def _latex_value(metric: Metric, value: Value) -> str:
    text = metric.text(value.value)
    text = {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(value.rank, text)
    if not math.isnan(value.std):
        text += rf"\,{{\footnotesize$\pm${value.std * metric.show:.{metric.decimals}f}}}"
    mark = stars(value.p_holm)
    return rf"{text}$^{{{mark}}}$" if mark else text


def to_html(tables: Sequence[Table], title: str = "Comparison of decoding methods") -> str:
    """One self-contained page: values with intervals, differences to the baseline with corrected p-values."""
    e = html.escape
    body = [f"<h1>{e(title)}</h1>", '<p class="sub">Best in bold, second underlined. Brackets: 95 % intervals.</p>']
    for table in tables:
        body.append(f"<h2>{e(table.benchmark)} · {e(table.title)}</h2>")
        body.append(f'<p class="sub">{table.n} items · {e(table.version)}</p>')
        heads = "".join(f'<th scope="col">{e(heading(m))}</th>' for m in table.metrics)
        rows = "".join(_html_row(table, row) for row in table.rows)
        body.append(
            f'<div class="scroll"><table><thead><tr><th scope="col">method</th>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
        if table.notes:
            body.append('<ul class="notes">' + "".join(f"<li>{e(note)}</li>" for note in table.notes) + "</ul>")
    return static_page(title, "\n".join(body), "tables.css")


def _html_row(table: Table, row: Row) -> str:
    cells = []
    for metric in table.metrics:
        value = row.values[metric.name]
        text = html.escape(value_text(metric, value))
        text = {1: f"<b>{text}</b>", 2: f"<u>{text}</u>"}.get(value.rank, text)
        if not math.isnan(value.low):
            text += f"<small>[{metric.text(value.low)}, {metric.text(value.high)}]</small>"
        if difference := _difference(metric, value):
            p = "" if math.isnan(value.p_holm) else f", p = {value.p_holm:.2g}{stars(value.p_holm)}"
            text += f"<small>{html.escape(difference)}{p}</small>"
        cells.append(f"<td{' class=best' if value.rank == 1 else ''}>{text}</td>")
    return f"<tr><td>{html.escape(row.method)}</td>{''.join(cells)}</tr>"


WRITERS: dict[str, Callable[[Sequence[Table]], str]] = {
    "markdown": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
    "html": to_html,
}
SUFFIXES = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".html": "html"}
