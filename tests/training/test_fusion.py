"""The rule by which the study of adaptive fusion chooses, and its tables."""

from __future__ import annotations

from revisit.eval.benchmarks.base import Scores
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
