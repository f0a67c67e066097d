"""MME against the official script, and paired accuracy by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, mme
from revisit.eval.benchmarks.base import ratio


@pytest.mark.parametrize(
    ("text", "label"),
    [("Yes, it is", "yes"), ("yes\n", "yes"), ("No.", "no"), ("None", "no"), ("I say no", "other"), ("", "other")],
)
def test_first_four_characters_decide(text, label):
    assert mme.parse(text) == label


def test_scores_by_hand():
    rows = [
        ("existence", "1", "Yes", "Yes"),
        ("existence", "1", "No", "No"),
        ("existence", "2", "Yes", "Yes"),
        ("existence", "2", "Yes", "No"),
        ("code_reasoning", "a", "No", "Yes"),
        ("code_reasoning", "a", "No", "No"),
    ]
    scores = mme.score_answers([*rows, ("existence", "3", "Yes", "Yes")])
    assert scores.counts == {"images": 3, "left_out": 1}
    assert scores.metrics["existence/acc"] == 75.0
    assert scores.metrics["existence/acc_plus"] == 50.0
    assert scores.metrics["existence/score"] == scores.metrics["perception"] == 125.0
    assert scores.metrics["cognition"] == 50.0
    assert scores.metrics["acc"] == pytest.approx(200 / 3)
    assert "missing: count" in scores.notes[0]
    for name, units in scores.per_item.items():
        assert ratio(units.values()) == pytest.approx(scores.metrics[name])


def test_load_with_questions_in_their_own_folder(tmp_path: Path):
    folder = tmp_path / "mme/count"
    (folder / "questions_answers_YN").mkdir(parents=True)
    (folder / "questions_answers_YN/0001.txt").write_text("Two dogs? Please answer.\tYes\nSix dogs?\tNo\n")
    (folder / "0001.png").write_bytes(b"")
    bench = get("mme", categories="count")
    items = bench.load(tmp_path)
    assert [item.id for item in items] == ["count/0001/1", "count/0001/2"]
    assert items[0].prompt == "Two dogs? Please answer."
    assert items[0].images == (folder / "0001.png",)


def test_wrong_input_raises(tmp_path: Path):
    with pytest.raises(RevisitError, match="count/1 has 1"):  # question
        mme.score_answers([("count", "1", "yes", "yes")])
    (tmp_path / "own/mme/count").mkdir(parents=True)
    (tmp_path / "own/mme/count/1.txt").write_text("Two dogs? Maybe\n")
    with pytest.raises(RevisitError, match="line 1 is not"):
        get("mme").load(tmp_path / "own")
    with pytest.raises(RevisitError, match="category folders not found"):
        get("mme").load(tmp_path)
    with pytest.raises(RevisitError, match="Did you mean 'count'"):
        get("mme", categories="counts")


def test_agrees_with_the_official_script():
    for run in golden("mme")["runs"]:
        metrics = mme.score_answers([tuple(row) for row in run["rows"]]).metrics
        expected = {f"{category}/score": value for category, value in run["scores"].items()}
        expected |= {total: run[total] for total in ("perception", "cognition")}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)
