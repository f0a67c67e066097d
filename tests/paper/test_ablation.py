"""Panels: the paper's four, and grids from YAML; refusals that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from revisit import ReVisiT, RevisitError
from revisit.evaluation.config import EvalConfig
from revisit.methods.greedy import Greedy
from revisit.paper import published
from revisit.paper.ablation import ablate, all_methods, paper_panels, yaml_panels

BASE = ReVisiT(layers="all")


def test_the_papers_panels_have_the_papers_rows() -> None:
    panels = paper_panels(BASE)
    for key, rows in published.table("ablation")["panels"].items():
        settings = panels[key].settings
        mine = {tuple(getattr(method, name) for name in settings) for method in panels[key].methods}
        assert mine == {tuple(row[name] for name in settings) for row in rows}
        (main,) = [row for row in panels[key].to_json()["rows"] if row["main"]]
        assert main["values"] == [BASE.settings()[name] for name in settings]


def test_every_method_is_run_once() -> None:
    panels = paper_panels(BASE)
    methods = all_methods(panels)
    assert methods[0] == Greedy()
    assert len(set(methods)) == len(methods) == 1 + 4 + 12 + 3 + 7 - 3  # the main configuration is in every panel


def test_a_grid_and_rows_from_yaml() -> None:
    import yaml

    text = """
    alpha: {title: Threshold, base: {fusion: interpolation}, grid: {layers: [last, [0, 2]], alpha: [1e-1, 0.001]}}
    odd: {rows: [{vocabulary: full}, {select: max, norm: final}]}
    """
    panels = yaml_panels(yaml.safe_load(text), BASE, "grid.yaml")
    grid = panels["alpha"]
    assert grid.title == "Threshold"
    assert [(m.layers, m.alpha) for m in grid.methods] == [
        ("last", 0.1),
        ("last", 0.001),
        ((0, 2), 0.1),
        ((0, 2), 0.001),
    ]
    assert {(m.fusion, m.weight) for m in grid.methods} == {("interpolation", 0.5)}  # that fusion's own weight
    assert panels["odd"].settings == ("vocabulary", "select", "norm")
    assert [m.layers for m in panels["odd"].methods] == ["all", "all"]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({}, "`panels` must map"),
        ({"x": {}}, "needs either a `grid`"),
        ({"x": {"gird": {}}}, "Did you mean 'grid'"),
        ({"x": {"grid": {"alpha": 0.1}}}, "lists of values"),
        ({"x": {"grid": {"alhpa": [0.1]}}}, "Did you mean 'alpha'"),
        ({"x": {"rows": [{"alpha": 2}]}}, "panel 'x'.*alpha must be"),
        ({"x": {"rows": []}}, "no rows"),
    ],
)
def test_bad_grids_are_refused_in_one_sentence(described: object, message: str) -> None:
    with pytest.raises(RevisitError, match=message):
        yaml_panels(described, BASE, "grid.yaml")


def test_seeds_are_refused_before_anything_runs(tmp_path: Path) -> None:
    settings = {
        "benchmark": ["pope"],
        "data": "scenes:unusual:2",
        "sample": True,
        "seeds": "0,1",
        "out": str(tmp_path),
    }
    with pytest.raises(RevisitError, match=r"they have no seeds: leave `seeds` out"):
        ablate(EvalConfig(**settings).plan(), paper_panels(BASE))
    assert list(tmp_path.iterdir()) == []
