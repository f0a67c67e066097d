"""Ablations of ReVisiT: the paper's four panels and any grid from a YAML file, over any benchmark of the runner.

    panels:
      alpha:
        title: Layers and threshold
        base: {divergence: jsd}
        grid: {layers: [last, all], alpha: [0.1, 0.001]}
      odd ones:
        rows: [{vocabulary: full}, {select: max}]
    benchmark: pope
    data: scenes:unusual:200

A panel is a `grid` (all combinations) or a list of `rows`; both change the settings of `base`. Every other key is one of
`revisit eval`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisit.decoding.method import Method
from revisit.errors import RevisitError, unknown
from revisit.evaluation.engines.base import BadImage, decode_images
from revisit.evaluation.plan import Plan, label
from revisit.evaluation.records import AblationRecord
from revisit.evaluation.runner import GridCell, Reporter, run
from revisit.evaluation.store import read_record, write_record
from revisit.methods.greedy import Greedy
from revisit.methods.revisit import SELECTIONS_WITHOUT_COUNT, ReVisiT
from revisit.paper.shared import SharingEngine

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


def shown(value: Any) -> str:
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


def yaml_panels(described: Any, base: ReVisiT, where: str) -> dict[str, Panel]:
    """The panels of a YAML file's `panels` key."""
    if not isinstance(described, Mapping) or not described:
        raise RevisitError(f"{where}: `panels` must map names to panels, each with a `grid` or with `rows`.")
    panels = {}
    for name, about in described.items():
        place = f"{where}, panel {name!r}"
        if not isinstance(about, Mapping):
            raise RevisitError(f"{place} must have a `grid` or `rows`, not {about!r}.")
        for key in about:
            if key not in ("title", "base", "grid", "rows"):
                raise unknown(f"key in {place}:", str(key), ("title", "base", "grid", "rows"))
        if ("grid" in about) == ("rows" in about):
            raise RevisitError(f"{place} needs either a `grid` (lists to combine) or `rows` (settings one by one).")
        own = _replaced(base, about.get("base") or {}, place)
        rows = _combined(about["grid"], place) if "grid" in about else list(about["rows"] or [])
        if not rows or not all(isinstance(row, Mapping) for row in rows):
            raise RevisitError(f"{place} has no rows; each row is a mapping such as {{alpha: 0.01}}.")
        settings = tuple(dict.fromkeys(str(key) for row in rows for key in row))
        methods = tuple(dict.fromkeys(_replaced(own, row, place) for row in rows))
        panels[str(name)] = Panel(str(name), str(about.get("title", name)), settings, methods, own)
    return panels


def _combined(grid: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(grid, Mapping) or not all(isinstance(values, list) and values for values in grid.values()):
        raise RevisitError(f"{place}: `grid` maps settings to lists of values, such as {{alpha: [0.1, 0.01]}}.")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _replaced(base: ReVisiT, settings: Mapping[Any, Any], place: str) -> ReVisiT:
    # YAML 1.1 reads 1e-5 as text: strings are read by the setting's type, as on a command line
    parsed = {str(key): value for key, value in settings.items()}
    if "fusion" in parsed and "weight" not in parsed and parsed["fusion"] != base.fusion:
        parsed["weight"] = None  # each fusion's own default
    if parsed.get("select") in SELECTIONS_WITHOUT_COUNT:
        parsed.setdefault("neighbors", 1)
    try:
        return base.replace(**parsed)
    except RevisitError as error:
        raise RevisitError(f"{place}: {error}") from error


def all_methods(panels: Mapping[str, Panel]) -> tuple[Method, ...]:
    """Plain decoding and every method of the panels, once each."""
    return tuple(dict.fromkeys([Greedy(), *(method for panel in panels.values() for method in panel.methods)]))


def ablate(
    plan: Plan, panels: Mapping[str, Panel], reporter: Reporter | None = None, command: str = ""
) -> dict[str, Any]:
    """Runs all panels of a plan whose methods are `all_methods(panels)`; returns what results.json then holds."""
    reporter = reporter or Reporter()
    if plan.seeds:
        raise RevisitError(
            "The panels of an ablation hold one value for each setting, so they have no seeds: leave `seeds` out, or compare settings over "
            "seeds with `revisit eval --sample --seeds`."
        )
    if plan.engine == "local":
        results = run(plan, reporter, lambda model: SharingEngine(model, **plan.engine_options), fill)
    else:
        results = run(plan, reporter)
    about = {"command": command, "settings": results["settings"], "environment": results["environment"]}
    made = [{**panel.to_json(), "made": about} for panel in panels.values()]
    earlier = read_ablation(plan.output)["panels"] if (plan.output / FILE).exists() else []
    kept = [panel for panel in earlier if panel["key"] not in panels]  # of other commands on the same output
    write_record(plan.output / FILE, {**about, "panels": [*kept, *made]}, AblationRecord)
    return results


def fill(grid: Sequence[GridCell], reporter: Reporter) -> None:
    """Answers what the cells of one model and benchmark lack, batch by batch, all methods of a batch from one prefill.

    The runner then finds them answered: a killed ablation resumes.
    """
    engine, questions, decoding = grid[0].engine, grid[0].questions, grid[0].decoding
    assert isinstance(engine, SharingEngine)
    cells = {cell.method: cell.store.open() for cell in grid}
    try:
        missing = sum(
            store.get(question.item.id, question.content) is None
            for store in cells.values()
            for question in questions.ready
        )
        total = len(cells) * len(questions.ready)
        model, _, benchmark = grid[0].names
        reporter.start(f"{model} · {len(cells)} settings · {benchmark}", total, total - missing)
        for batch in grid[0].batches:
            decoded = [(job, decode_images(job)) for job in batch]
            good = [
                (job, found) for job, found in decoded if not isinstance(found, BadImage)
            ]  # the runner names the others
            asked, images = [job for job, _ in good], [found for _, found in good]
            todo = [cell.method for cell in grid if cell.missing(asked)]
            for method, answers in engine.answer_all(todo, decoding, asked, images) if todo else ():
                reporter.advance(cells[method].append(answers))
    finally:
        for cell in cells.values():
            cell.close()


def read_ablation(folder: Path) -> dict[str, Any]:
    """The ablation.json of a folder as plain data; raises RevisitError if it is damaged."""
    return read_record(folder / FILE, AblationRecord).model_dump(mode="json", by_alias=True)
