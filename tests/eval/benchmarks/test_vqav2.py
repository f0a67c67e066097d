"""VQAv2 against the published evaluation's outputs and against cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from golden_files import golden
from revisit.eval.benchmarks import get, vqav2
from revisit.eval.benchmarks.base import ratio


def test_every_golden_string():
    cases = golden("vqav2")["normalisation"]
    for case in cases:
        text = vqav2.one_line(case["raw"])
        assert text == case["prepared"]
        assert vqav2.strip_punctuation(text) == case["after_punct"], case
        assert vqav2.normalize(text) == case["normalised"], case
        assert vqav2.plain_words(text) == case["digit_article_only"], case
    assert len(cases) > 100


def test_every_golden_accuracy():
    for case in golden("vqav2")["cases"]:
        said, answers = case["prediction"], case["answers"]
        compared = [vqav2.one_line(text) for text in (said, *answers)]
        if len(set(compared[1:])) > 1:
            compared = [vqav2.normalize(text) for text in compared]
        assert compared == [case["normalised_prediction"], *case["normalised_answers"]]
        got = {
            "official_acc": vqav2.official_accuracy(said, answers),
            "official_acc_pct2": round(100 * vqav2.official_accuracy(said, answers), 2),
            "paper_token_max_min_rule_always_normalised": vqav2.token_max(said, answers),
        }
        for name, value in got.items():
            assert value == pytest.approx(case[name], abs=1e-9), (name, case)


def test_rules_of_the_official_script():
    for matches, score in ((0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)):
        assert vqav2.ten_fold([i < matches for i in range(10)]) == pytest.approx(score)
    assert vqav2.official_accuracy("Yes", ["yes"] * 10) == 0.0  # unanimous answers are compared as they are
    assert vqav2.official_accuracy("Yes", ["yes"] * 9 + ["yeah"]) == 1.0
    assert vqav2.strip_punctuation("." * 40) == "." * 8  # only 32 periods are removed


def test_totals_by_type():
    rows = [
        ("1", "two", ["2"] * 9 + ["3"], "number", "how many"),
        ("2", "a red dog", ["red"] * 2 + ["blue"] * 8, "other", "what color is the"),
    ]
    scores = vqav2.score_answers(rows)
    assert scores.metrics["accuracy"] == pytest.approx(50.0)
    assert scores.metrics["token_max"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert scores.metrics["answer_type/number/accuracy"] == 100.0
    assert scores.metrics["question_type/what color is the/accuracy"] == 0.0
    for name, units in scores.per_item.items():
        assert ratio(units.values()) == pytest.approx(scores.metrics[name])


def test_load_and_score(tmp_path: Path):
    (tmp_path / "vqav2").mkdir()
    (tmp_path / "val2014").mkdir()
    (tmp_path / "val2014/COCO_val2014_000000000007.png").write_bytes(b"")
    question = {"question_id": 70, "image_id": 7, "question": "What?"}
    note = {"question_id": 70, "answers": [{"answer": "cat"}] * 10, "answer_type": "other", "question_type": "what"}
    (tmp_path / "vqav2" / vqav2.QUESTIONS).write_text(json.dumps({"questions": [question]}))
    (tmp_path / "vqav2" / vqav2.ANNOTATIONS).write_text(json.dumps({"annotations": [note]}))
    bench = get("vqav2")
    items = bench.load(tmp_path)
    assert items[0].prompt == "What?\nAnswer the question using a single word or phrase."
    assert items[0].images[0].name == "COCO_val2014_000000000007.png"
    assert bench.score(items, {"70": "cat"}).metrics["accuracy"] == 100.0


def test_totals_are_summed_before_the_conversion_to_percent():
    """16 questions, 10.9 points: 68.125 in exact arithmetic, which the official sum puts above the tie."""
    matches = [10] * 7 + [3] * 4 + [1]  # 1.0, 0.9 and 0.3 each
    rows = [(str(n), "x", ["x"] * k + ["y"] * (10 - k), "other", "what") for n, k in enumerate(matches + [0] * 4)]
    points = [vqav2.official_accuracy(said, truth) for _, said, truth, *_ in rows]
    assert len(set(points)) > 2
    scores = vqav2.score_answers(rows)
    assert scores.metrics["accuracy"] == 100 * float(sum(points)) / len(points)
    assert scores.metrics["answer_type/other/accuracy"] == scores.metrics["accuracy"]
