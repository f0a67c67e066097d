"""Ablations of ReVisiT: the paper's four panels, on any benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Metric
from revisit.eval.config import EvalConfig
from revisit.eval.log import Log
from revisit.eval.report.comparisons import heading, ranked
from revisit.eval.report.document import Block, Cell, Section, Table
from revisit.eval.run import Reporter, run
from revisit.eval.spec import label
from revisit.explain.files import slug, write_json
from revisit.explain.records import read_json
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.paper.figures import Plot, Series, curves
from revisit.paper.studies import provenance
from revisit.paper.study import Stored, command

FILE = "ablation.json"
ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class Panel:
    """One table of an ablation: which settings vary, and the methods that have them."""

    key: str
    title: str
    settings: tuple[str, ...]
    methods: tuple[ReVisiT, ...]
    main: ReVisiT  # the configuration that the others vary

    def to_json(self) -> dict[str, Any]:
        """Return the panel as the report reads it: rows name their method by its label."""
        return {
            "key": self.key,
            "title": self.title,
            "settings": list(self.settings),
            "rows": [
                {
                    "method": label(method),
                    "cells": [shown(getattr(method, name)) for name in self.settings],
                    "values": [method.settings()[name] for name in self.settings],
                    "main": method == self.main,
                }
                for method in self.methods
            ],
        }


def shown(value: object) -> str:
    """Return a setting's value as a table prints it."""
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def paper_panels(base: ReVisiT) -> dict[str, Panel]:
    """Return panels (a) to (d) of the paper's ablation table around a main configuration."""

    vary = base.replace

    def panel(key: str, title: str, settings: tuple[str, ...], methods: Sequence[ReVisiT]) -> Panel:
        return Panel(key, title, settings, tuple(dict.fromkeys(methods)), base)

    fusions = [("interpolation", w) for w in (0.25, 0.5, 0.75)] + [("poe", w) for w in (0.25, 0.5, 1.0, 2.0)]
    return {
        "a": panel(
            "a",
            "Vocabulary constraint × token selection",
            ("vocabulary", "select"),
            [vary(select="max"), vary(select="random", neighbors=1), base, vary(vocabulary="full")],
        ),
        "b": panel(
            "b",
            "Layer scope × threshold α",
            ("layers", "alpha"),
            [vary(layers=layers, alpha=alpha) for layers in ("last", "all") for alpha in ALPHAS],
        ),
        "c": panel(
            "c",
            "Selection metric",
            ("divergence",),
            [vary(divergence=divergence) for divergence in ("kl", "cosine", "jsd")],
        ),
        "d": panel(
            "d",
            "Fusion design",
            ("fusion", "weight"),
            [vary(fusion=fusion, weight=weight) for fusion, weight in fusions],
        ),
    }


def with_panels(config: EvalConfig, panels: Mapping[str, Panel]) -> EvalConfig:
    """Return a configuration with other methods: plain decoding and those of the panels, once each."""
    methods = [Greedy(), *(method for panel in panels.values() for method in panel.methods)]
    return config.replace(method=tuple(dict.fromkeys(methods)))


def ablate(config: EvalConfig, panels: Mapping[str, Panel], reporter: Reporter) -> list[Log]:
    """Run the panels in place of the configured methods; return the logs."""
    logs = run(with_panels(config, panels), reporter)
    path = Path(config.out) / FILE
    made = [
        {**panel.to_json(), "command": command(), "settings_of_run": _settings(config)} for panel in panels.values()
    ]
    earlier = read_panels(path.parent) if path.exists() else []
    kept = [panel for panel in earlier if panel["key"] not in panels]  # of other commands on the same output
    write_json(path, [*kept, *made])
    return logs


def _settings(config: EvalConfig) -> dict[str, Any]:
    names = ("limit", "batch_size", "max_new_tokens")
    return {name: value for name in names if (value := getattr(config, name)) is not None}


def read_panels(folder: Path) -> list[dict[str, Any]]:
    """Return the panels in the ablation.json of a folder; raise RevisitError if it is damaged."""
    panels = read_json(folder / FILE)
    needed = {"key", "title", "settings", "rows", "command", "settings_of_run"}
    if not isinstance(panels, list) or not all(isinstance(panel, dict) and needed <= panel.keys() for panel in panels):
        raise RevisitError(f"{folder / FILE} does not list the panels of an ablation; run `revisit ablate` again.")
    return panels


# -- drawing -------------------------------------------------------------------------------------------------------

INTRODUCTION = "Each panel varies some settings of ReVisiT and keeps the others at the main configuration."


def ablation_sections(panels: Sequence[Stored], logs: Sequence[Log], name: str) -> list[Section]:
    """Return every panel of an ablation, for each model, benchmark and decoding it was run with."""
    groups: dict[tuple[str, str, str], dict[str, Log]] = {}
    for log in logs:
        if log.scores is not None:
            decoding = ", ".join(f"{key} {value}" for key, value in log.spec.decoding.items() if value is not None)
            groups.setdefault((log.spec.model, log.spec.benchmark, decoding), {})[log.spec.method] = log
    sections = []
    for (model, benchmark, decoding), found in groups.items():
        several = sum(key[:2] == (model, benchmark) for key in groups) > 1
        names = [benchmark, model, *([decoding] if several else [])]
        for panel in panels:
            if not all(row["method"] in found for row in panel["rows"]):
                continue
            blocks = _blocks(panel, found, "-".join([name, *map(slug, (panel["key"], *names))]))
            named = panel["title"] if panel["title"] == panel["key"] else f"({panel['key']}) {panel['title']}"
            title = " · ".join([named, *names])
            about = {"command": panel["command"], "settings": panel["settings_of_run"]}
            sections.append(Section(title, [*blocks, provenance(about)], level=3))
    return sections


def _blocks(panel: Stored, logs: Mapping[str, Log], name: str) -> list[Block]:
    rows = panel["rows"]
    own = [logs[row["method"]] for row in rows]
    assert own[0].scores is not None
    metrics = [metric for name, metric in own[0].scores.shown.items() if "/" not in name and metric.better]
    columns = [ranked(own, metric, intervals=True) for metric in metrics]
    lines: list[list[Cell | str]] = [[*row["cells"], *(c[n] for c in columns)] for n, row in enumerate(rows)]
    if "greedy" in logs:
        values = [ranked([logs["greedy"]], metric)[0] for metric in metrics]
        lines.append(["greedy", *[""] * (len(panel["settings"]) - 1), *values])
    main = [" ".join(row["cells"]) for row in rows if row["main"]]
    caption = f"Best in bold, second underlined, 95 % intervals in brackets; {own[0].answered} items."
    table = Table(
        (*panel["settings"], *(heading(m) for m in metrics)),
        lines,
        caption + (f" Main configuration: {main[0]}." if main else ""),
        marked=frozenset(place for place, row in enumerate(rows) if row["main"]),
        left=len(panel["settings"]),
    )
    swept = "alpha" in panel["settings"] and len(rows) > 3
    return [table, *([_sweep(panel, logs, metrics, name)] if swept else [])]


def _sweep(panel: Stored, logs: Mapping[str, Log], metrics: Sequence[Metric], name: str) -> Block:
    """Draw curves over alpha, one for each value of the other settings."""
    at = panel["settings"].index("alpha")
    lines: dict[str, list[Stored]] = {}
    for row in panel["rows"]:
        others = ", ".join(text for place, text in enumerate(row["cells"]) if place != at)
        lines.setdefault(others or "ReVisiT", []).append(row)
    scores = {method: log.scores for method, log in logs.items() if log.scores is not None}
    panels = []
    known = [m for m in metrics if m.name in ("CHAIRi", "F1", "accuracy", "macro", "token_max", "qAcc")]
    for metric in (known or metrics)[:3]:
        series = []
        for name_of_line, rows in lines.items():
            found = [scores[row["method"]].value(metric.name) for row in rows]
            y, low, high = ([values[place] for values in found] for place in range(3))
            series.append(Series(name_of_line, y, [float(row["values"][at]) for row in rows], low, high))
        greedy = scores["greedy"].value(metric.name)[0] if "greedy" in scores else None
        panels.append(Plot(series, heading(metric), "α", log=True, baseline=greedy))
    return curves(name, f"{panel['title']}; with 95 % intervals, the dashed line is plain decoding.", panels)
