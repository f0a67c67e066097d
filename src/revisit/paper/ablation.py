"""Ablations of ReVisiT: the paper's four panels, over any benchmark of the runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from revisit.decoding.method import Method
from revisit.evaluation.plan import Plan, label
from revisit.evaluation.records import AblationRecord
from revisit.evaluation.runner import Reporter, run
from revisit.evaluation.store import read_record, write_record
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import ReVisiT

FILE = "ablation.json"
ALPHAS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
NAMES = {
    "vocabulary": "Vocab",
    "select": "Selection",
    "layers": "Layer scope",
    "alpha": "α",
    "divergence": "Selection metric",
    "fusion": "Fusion",
    "weight": "Weight",
}
VALUES = {"poe": "Product-of-Experts", "interpolation": "Interpolation", "jsd": "JSD", "kl": "KL", "cosine": "Cosine"}


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
            "columns": [NAMES.get(name, name) for name in self.settings],
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
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return VALUES.get(str(value), str(value))


def paper_panels(base: ReVisiT) -> dict[str, Panel]:
    """Panels (a) to (d) of the paper's ablation table around a main configuration."""

    def vary(**settings: Any) -> ReVisiT:
        return base.replace(**settings)

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


def all_methods(panels: Mapping[str, Panel]) -> tuple[Method, ...]:
    """Plain decoding and every method of the panels, once each."""
    return tuple(dict.fromkeys([Greedy(), *(method for panel in panels.values() for method in panel.methods)]))


def ablate(plan: Plan, panels: Mapping[str, Panel], reporter: Reporter, command: str) -> dict[str, Any]:
    """Runs the panels in place of the plan's methods; returns what results.json then holds."""
    plan = replace(plan, methods=all_methods(panels), tuned={})
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
