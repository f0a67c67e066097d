"""Ablations of ReVisiT: the paper's four panels, on any benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from revisit.decoding.method_id import MethodId
from revisit.eval.benchmarks.base import Metric
from revisit.eval.config import EvalConfig
from revisit.eval.log import Log
from revisit.eval.report.comparisons import heading, ranked
from revisit.eval.report.document import Block, Cell, Section, Table
from revisit.eval.report.figures import Plot, Series, curves
from revisit.eval.run import Reporter, run
from revisit.io.files import inside, slug, write_json
from revisit.io.records import Fields, read_json
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.paper.study import Stored, command, provenance

FILE = "ablation.json"
ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
INTRODUCTION = "Each panel varies some settings of ReVisiT and keeps the others at the main configuration."
SWEPT = ("CHAIRi", "F1", "accuracy", "macro", "token_max", "qAcc")  # metrics drawn over alpha


class Panel(NamedTuple):
    """One table of an ablation: the settings that vary, and the methods to compare."""

    title: str
    columns: tuple[str, ...]
    methods: tuple[ReVisiT, ...]


def paper_panels(base: ReVisiT) -> dict[str, Panel]:
    """Return panels (a) to (d) of the paper's ablation table around a main configuration."""
    vary = base.replace
    selections = (vary(select="max"), vary(select="random", neighbors=1), base, vary(vocabulary="full"))
    thresholds = tuple(vary(layers=layers, alpha=alpha) for layers in ("last", "all") for alpha in ALPHAS)
    fusions = [("interpolation", w) for w in (0.25, 0.5, 0.75)] + [("poe", w) for w in (0.25, 0.5, 1.0, 2.0)]
    return {
        "a": Panel("Vocabulary constraint × token selection", ("vocabulary", "select"), selections),
        "b": Panel("Layer scope × threshold α", ("layers", "alpha"), thresholds),
        "c": Panel("Selection metric", ("divergence",), tuple(vary(divergence=d) for d in ("kl", "cosine", "jsd"))),
        "d": Panel("Fusion design", ("fusion", "weight"), tuple(vary(fusion=f, weight=w) for f, w in fusions)),
    }


def with_panels(config: EvalConfig, panels: Mapping[str, Panel]) -> EvalConfig:
    """Return a configuration with other methods: plain decoding and those of the panels, once each."""
    methods = [Greedy(), *(method for panel in panels.values() for method in panel.methods)]
    return config.replace(method=tuple(dict.fromkeys(methods)))


def ablate(config: EvalConfig, panels: Mapping[str, Panel], base: ReVisiT, reporter: Reporter) -> list[Log]:
    """Run panels around a main configuration in place of the configured methods; return the logs."""
    logs = run(with_panels(config, panels), reporter)
    stored = [panel for panel in read_panels(Path(config.out)) if panel["key"] not in panels]  # of other commands
    settings = {name: getattr(config, name) for name in ("limit", "batch_size", "max_new_tokens")}
    about = {"main": str(MethodId.of(base)), "command": command(), "settings": settings}
    for key, (title, columns, methods) in panels.items():
        rows = {str(MethodId.of(method)): [_cell(getattr(method, name)) for name in columns] for method in methods}
        stored.append({"key": key, "title": title, "columns": columns, "rows": rows, **about})
    write_json(inside(config.out, FILE), stored)
    return logs


def _cell(value: object) -> str:
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def read_panels(folder: Path) -> list[Fields]:
    """Return the panels that were run in a folder."""
    panels: list[Fields] = read_json(folder / FILE) if (folder / FILE).exists() else []
    return panels


def ablation_sections(panels: Sequence[Stored], logs: Sequence[Log], name: str) -> list[Section]:
    """Return every panel of an ablation, for each of its models, benchmarks and decoding settings."""
    groups: dict[tuple[str, str, str], dict[MethodId | str, Log]] = {}
    for log in logs:
        if log.scores is not None:
            decoding = ", ".join(f"{key} {value}" for key, value in log.spec.decoding.items() if value is not None)
            groups.setdefault((log.spec.model, log.spec.benchmark, decoding), {})[log.spec.method] = log
    sections = []
    for (model, benchmark, decoding), found in groups.items():
        several = sum(key[:2] == (model, benchmark) for key in groups) > 1
        names = [benchmark, model, *([decoding] if several else [])]
        for panel in panels:
            if panel["rows"].keys() <= found.keys():
                blocks = _blocks(panel, found, "-".join([name, *map(slug, (panel["key"], *names))]))
                title = " · ".join([f"({panel['key']}) {panel['title']}", *names])
                sections.append(Section(title, [*blocks, provenance(panel)], level=3))
    return sections


def _blocks(panel: Stored, logs: Mapping[MethodId | str, Log], name: str) -> list[Block]:
    compared = [logs[method] for method in panel["rows"]]
    assert compared[0].scores is not None
    metrics = [metric for name, metric in compared[0].scores.shown.items() if "/" not in name and metric.better]
    columns = [ranked(compared, metric, intervals=True) for metric in metrics]
    lines: list[list[Cell | str]] = [
        [*cells, *(column[n] for column in columns)] for n, cells in enumerate(panel["rows"].values())
    ]
    if "greedy" in logs:
        values = [ranked([logs["greedy"]], metric)[0] for metric in metrics]
        lines.append(["greedy", *[""] * (len(panel["columns"]) - 1), *values])
    caption = f"Best in bold, second underlined, 95 % intervals in brackets; {compared[0].answered} items."
    if panel["main"] in panel["rows"]:
        caption += f" Main configuration: {' '.join(panel['rows'][panel['main']])}."
    table = Table(
        (*panel["columns"], *(heading(m) for m in metrics)),
        lines,
        caption,
        marked=frozenset(row for row, method in enumerate(panel["rows"]) if method == panel["main"]),
        left=len(panel["columns"]),
    )
    return [table, *([_sweep(panel, logs, metrics, name)] if "alpha" in panel["columns"] else [])]


def _sweep(panel: Stored, logs: Mapping[MethodId | str, Log], metrics: Sequence[Metric], name: str) -> Block:
    """Draw curves over alpha, one for each value of the other settings."""
    column = panel["columns"].index("alpha")
    lines: dict[str, list[tuple[str, float]]] = {}  # other settings -> methods with their alpha
    for method, cells in panel["rows"].items():
        others = ", ".join(cells[:column] + cells[column + 1 :])
        lines.setdefault(others, []).append((method, float(cells[column])))
    scores = {method: log.scores for method, log in logs.items() if log.scores is not None}
    plots = []
    for metric in ([m for m in metrics if m.name in SWEPT] or metrics)[:3]:
        series = []
        for others, methods in lines.items():
            y, low, high = zip(*(scores[method].value(metric.name) for method, _ in methods), strict=True)
            series.append(Series(others, y, [alpha for _, alpha in methods], low, high))
        greedy = scores["greedy"].value(metric.name)[0] if "greedy" in scores else None
        plots.append(Plot(series, heading(metric), "α", log=True, baseline=greedy))
    return curves(name, f"{panel['title']}; with 95 % intervals, the dashed line is plain decoding.", plots)
