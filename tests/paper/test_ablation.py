"""The paper's four panels."""

from __future__ import annotations

from revisit import ReVisiT
from revisit.eval.config import EvalConfig
from revisit.methods.greedy import Greedy
from revisit.paper import published
from revisit.paper.ablation import paper_panels, with_panels

BASE = ReVisiT(layers="all")


def test_the_papers_panels_have_the_papers_rows() -> None:
    panels = paper_panels(BASE)
    for key, rows in published.table("ablation")["panels"].items():
        settings = panels[key].columns
        mine = {tuple(getattr(method, name) for name in settings) for method in panels[key].methods}
        assert mine == {tuple(row[name] for name in settings) for row in rows}
        assert BASE in panels[key].methods


def test_every_method_is_run_once() -> None:
    panels = paper_panels(BASE)
    methods = with_panels(EvalConfig(), panels).methods_for("tiny")
    assert methods[0] == Greedy()
    assert len(set(methods)) == len(methods) == 1 + 4 + 12 + 3 + 7 - 3  # the main configuration is in every panel
