"""Ablations of ReVisiT: the paper's four panels, over any benchmark of the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revisit.benchmarks.base import Metric
from revisit.decoding.method import Method
from revisit.evaluation.plan import Plan, label
from revisit.evaluation.records import AblationRecord, Stored
from revisit.evaluation.runner import Reporter, run
from revisit.evaluation.store import read_record, slug, write_record
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT
from revisit.paper.figures import Plot, Series, curves
from revisit.paper.studies import provenance
from revisit.report.comparisons import heading, ranked, stored_value
from revisit.report.document import Block, Cell, Section, Table

FILE = "ablation.json"
ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class Panel:
    """One table of an ablation: which settings vary, and the methods that have them."""

    key: str
    title: str
    settings: tuple[str, ...]
    methods: tuple[ReVisiT, ...]
    main: ReVisiT  # the configuration that the others depart from

    def to_json(self) -> dict[str, Any]:
        """As the report reads it: rows name their method by its label."""
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
    """A setting's value as a table prints it."""
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def paper_panels(base: ReVisiT) -> dict[str, Panel]:
    """Panels (a) to (d) of the paper's ablation table around a main configuration."""

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


def panel_plan(plan: Plan, panels: Mapping[str, Panel]) -> Plan:
    """The plan with other methods: plain decoding and those of the panels, once each."""
    methods: list[Method] = [Greedy(), *(method for panel in panels.values() for method in panel.methods)]
    return replace(plan, methods=dict.fromkeys(plan.methods, tuple(dict.fromkeys(methods))))


def ablate(plan: Plan, panels: Mapping[str, Panel], reporter: Reporter, command: str) -> dict[str, Any]:
    """Runs the panels in place of the plan's methods; returns the results of the run."""
    plan = panel_plan(plan, panels)
    results = run(plan, reporter)
    about = {"command": command, "settings": results["settings"], "environment": results["environment"]}
    made = [{**panel.to_json(), "made": about} for panel in panels.values()]
    earlier = read_ablation(plan.output)["panels"] if (plan.output / FILE).exists() else []
    kept = [panel for panel in earlier if panel["key"] not in panels]  # of other commands on the same output
    write_record(plan.output / FILE, {**about, "panels": [*kept, *made]}, AblationRecord)
    return results


def read_ablation(folder: Path) -> dict[str, Any]:
    """The ablation.json of a folder as plain data; raises RevisitError if it is damaged."""
    return read_record(folder / FILE, AblationRecord).model_dump(mode="json", by_alias=True)


# -- drawing -------------------------------------------------------------------------------------------------------

INTRODUCTION = "Each panel varies some settings of ReVisiT and keeps the others at the main configuration."


def ablation_sections(about: Stored, results: Stored, name: str) -> list[Section]:
    """Every panel of an ablation, for each model, benchmark and decoding it was run with."""
    groups: dict[tuple[str, str, str], dict[str, Stored]] = {}
    for cell in results["cells"]:
        if cell["status"] == "complete":
            decoding = ", ".join(f"{key} {value}" for key, value in cell["decoding"].items() if value is not None)
            key = (cell["model"]["name"], cell["benchmark"]["label"], decoding)
            groups.setdefault(key, {})[cell["method"]["label"]] = cell
    sections = []
    for (model, benchmark, decoding), cells in groups.items():
        several = sum(key[:2] == (model, benchmark) for key in groups) > 1
        names = [benchmark, model, *([decoding] if several else [])]
        for panel in about["panels"]:
            if not all(row["method"] in cells for row in panel["rows"]):
                continue
            blocks = _blocks(panel, cells, "-".join([name, *map(slug, (panel["key"], *names))]))
            named = panel["title"] if panel["title"] == panel["key"] else f"({panel['key']}) {panel['title']}"
            title = " · ".join([named, *names])
            sections.append(Section(title, [*blocks, provenance(panel["made"])], level=3))
    return sections


def _blocks(panel: Stored, cells: Mapping[str, Stored], name: str) -> list[Block]:
    rows = panel["rows"]
    own = [cells[row["method"]] for row in rows]
    records = {name: about for name, about in own[0]["metrics"].items() if "/" not in name and about["better"]}
    metrics = [Metric.from_record(name, about) for name, about in records.items()]
    columns = [ranked(own, metric, intervals=True) for metric in metrics]
    lines: list[list[Cell | str]] = [[*row["cells"], *(c[n] for c in columns)] for n, row in enumerate(rows)]
    greedy = cells.get("greedy")
    if greedy is not None:
        values = [ranked([greedy], metric)[0] for metric in metrics]
        lines.append(["greedy", *[""] * (len(panel["settings"]) - 1), *values])
    main = [" ".join(row["cells"]) for row in rows if row["main"]]
    caption = f"Best in bold, second underlined, 95 % intervals in brackets; {own[0]['answers']} items."
    table = Table(
        (*panel["settings"], *(heading(m) for m in metrics)),
        lines,
        caption + (f" Main configuration: {main[0]}." if main else ""),
        marked=frozenset(place for place, row in enumerate(rows) if row["main"]),
        left=len(panel["settings"]),
    )
    swept = "alpha" in panel["settings"] and len(rows) > 3
    return [table, *([_sweep(panel, cells, metrics, name)] if swept else [])]


def _sweep(panel: Stored, cells: Mapping[str, Stored], metrics: Sequence[Metric], name: str) -> Block:
    """Curves over alpha, one for each value of the other settings."""
    at = panel["settings"].index("alpha")
    lines: dict[str, list[Stored]] = {}
    for row in panel["rows"]:
        others = ", ".join(text for place, text in enumerate(row["cells"]) if place != at)
        lines.setdefault(others or "ReVisiT", []).append(row)
    panels = []
    known = [m for m in metrics if m.name in ("CHAIRi", "F1", "accuracy", "macro", "token_max", "qAcc")]
    for metric in (known or metrics)[:3]:
        series = []
        for name_of_line, rows in lines.items():
            found = [stored_value(cells[row["method"]], metric) for row in rows]
            y, low, high = ([values[place] for values in found] for place in range(3))
            series.append(Series(name_of_line, y, [float(row["values"][at]) for row in rows], low, high))
        greedy = stored_value(cells["greedy"], metric)[0] if "greedy" in cells else None
        panels.append(Plot(series, heading(metric), "α", log=True, baseline=greedy))
    return curves(name, f"{panel['title']}; with 95 % intervals, the dashed line is plain decoding.", panels)
