"""The rule by which the study of adaptive fusion chooses, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from revisit import ReVisiT
from revisit.eval.benchmarks.base import Scores
from revisit.io.files import write_json
from training import fusion


def outcome(f1: float, recall: float = 75.0, presence: float = 92.0, repetition_rate: float = 0.0) -> fusion.Outcome:
    chair = Scores({"CHAIRs": 0.8, "CHAIRi": 0.3, "Recall": recall / 100, "F1": f1 / 100}, {})
    return fusion.Outcome(chair, Scores({"accuracy": presence / 100}, {}), repetition_rate, None)


GREEDY = outcome(71.0)


def test_the_best_f1_is_chosen_among_those_that_lose_nothing() -> None:
    tried = [
        ("repeats", outcome(80, repetition_rate=1.5)),
        ("forgets", outcome(79, recall=74.9)),
        ("misjudges", outcome(78, presence=91.4)),
        ("sound", outcome(74)),
        ("better", outcome(75)),
    ]
    assert fusion.pick(GREEDY, tried) == "better"
    assert fusion.pick(GREEDY, [("simple", outcome(74.85)), ("best", outcome(75.0))]) == "simple"  # within 0.2 points
    assert fusion.pick(GREEDY, [("simple", outcome(74.75)), ("best", outcome(75.0))]) == "best"


def test_nothing_is_chosen_where_nothing_passes() -> None:
    assert fusion.pick(GREEDY, [("repeats", outcome(80, repetition_rate=12.0))]) is None
    stutters = outcome(70, repetition_rate=12.0)
    assert fusion.pick(stutters, [("repeats", outcome(80, repetition_rate=12.0))]) == "repeats"
    assert fusion.pick(stutters, [("repeats more", outcome(80, repetition_rate=12.5))]) is None
    rows = [fusion.row("greedy", GREEDY)]
    assert "Chosen: none, because no candidate passes" in fusion.markdown({"rows": rows, "chosen": None})


def test_validation_and_test_share_no_scene() -> None:
    plan = fusion.Plan(validation=5, test=5, usual=5)
    keys = [{drawn.key for drawn in plan.scenes(part)} for part in ("validation", "test", "usual")]
    assert [len(part) for part in keys] == [5, 5, 5]
    assert len(set.union(*keys)) == 15


def test_the_test_compares_the_choice_with_its_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[ReVisiT | None] = []

    def run_all(plan: Any, scenes: Any, methods: Sequence[ReVisiT | None], **_: Any) -> list[fusion.Outcome]:
        tried.extend(methods)
        terms = {name: {"1": (1.0, 2.0), "2": (1.0, 3.0)} for name in (*GREEDY.chair.metrics, "accuracy")}
        scores = Scores({**GREEDY.chair.metrics, "accuracy": 0.9}, per_item=terms)
        return [fusion.Outcome(scores, scores, 0.0, None) for _ in methods]

    monkeypatch.setattr(fusion, "run_all", run_all)
    write_json(tmp_path / "choice.json", {"chosen": "agreement", "weight": 0.4321})
    assert "fixed 0.432 (same mean weight)" in fusion.report("test", fusion.Plan(test=2, usual=2), tmp_path)
    assert {method.alpha for method in tried if method} >= set(fusion.ALPHAS)
    assert ReVisiT(weight="agreement", layers="all") in tried
