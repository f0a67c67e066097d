"""MMMU's parsers and totals against the published script's outputs."""

from __future__ import annotations

import math

import pytest

from golden_files import golden
from revisit.eval.benchmarks import mmmu
from revisit.eval.benchmarks.base import ratio
from revisit.io.records import Record


def test_every_golden_choice():
    for case in golden("mmmu")["mc"]:
        response, options = case["response"], case["options"]
        read = mmmu.read_choice(response, options)
        assert (read is None) == case["random_fallback"], case
        assert read in (None, case["parsed"]), case


def _stored(reading: str | float) -> str:
    """Non-finite floats are stored as text in the golden file."""
    return f"float:{reading}" if isinstance(reading, float) and not math.isfinite(reading) else reading


def test_every_golden_open_answer():
    cases = golden("mmmu")
    for case in cases["open"] + cases["eval_open"]:
        readings = mmmu.parse_open(case["response"])
        assert sorted(map(repr, map(_stored, readings))) == sorted(map(repr, case["parsed"])), case
    for case in cases["eval_open"]:
        assert mmmu.open_is_correct(case["gold"], mmmu.parse_open(case["response"])) == case["correct"], case


def test_seeded_guesses():
    guess = mmmu.seeded_guess()
    assert [guess("ABCD") for _ in range(20)] == golden("mmmu")["rng_seed42"]["n4"]


def test_golden_run():
    run = golden("mmmu")["run"]
    rows = [{**row, "options": list(row.get("index2ans", {}).values())} for row in run["items"]]
    questions = [mmmu.question(Record(row, "here")) for row in rows]
    scores = mmmu.score_responses(questions, {row["id"]: row["response"] for row in run["items"]})
    assert {item: bool(n) for item, (n, _) in scores.per_item["micro"].items()} == run["correct"]
    for subject, accuracy in run["accuracy"].items():
        assert scores.metrics[f"{subject}/accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert scores.metrics["micro"] == pytest.approx(sum(run["correct"].values()) / len(questions))
    for name, units in scores.per_item.items():
        assert ratio(units.values()) == pytest.approx(scores.metrics[name])


def test_guesses_follow_the_scoring_order():
    options = {letter: letter * 3 for letter in "ABCD"}
    questions = [mmmu.Question(f"validation_{s}_1", s, ("A",), options) for s in ("Math", "Art")]
    scores = mmmu.score_responses(questions, {q.id: "?" for q in questions})
    # Art is scored before Math whatever the order given; the first two seeded draws are A and A.
    assert list(scores.per_item["micro"]) == ["validation_Art_1", "validation_Math_1"]
    assert scores.metrics["micro"] == 1.0
    assert "2 multiple-choice responses could not be read" in scores.notes[0]


def test_macro_differs_from_micro():
    questions = [mmmu.Question(f"v_{s}_{n}", s, ("red",)) for s, n in (("Art", 1), ("Art", 2), ("Math", 1))]
    scores = mmmu.score_responses(questions, {"v_Art_1": "red", "v_Art_2": "red", "v_Math_1": "blue"})
    assert scores.metrics["micro"] == pytest.approx(2 / 3)
    assert scores.metrics["macro"] == pytest.approx(1 / 2)


def test_prompts():
    assert mmmu.prompt("Which <image 1>?", {"A": "red", "B": "blue"}) == (
        "Which <image 1>?\n(A) red\n(B) blue\n\nAnswer with the option's letter from the given choices directly."
    )
    assert mmmu.prompt("How many?", {}) == "How many?\nAnswer the question using a single word or phrase."


def test_answers_that_look_like_lists():
    def right(answer: str, said: str) -> bool:
        row = Record({"id": "validation_Math_1", "question_type": "open", "answer": answer}, "here")
        return mmmu.question(row).is_correct(said, mmmu.seeded_guess())

    assert right("['red', 'blue']", "blue")
    assert not right("[1, 2]", "1")
    assert right("[0, 1)", "[0, 1)")
    assert right("[abc]", "it is [abc]")


def test_printed_like_the_official_script():
    assert mmmu.MMMU().metric("micro").text(39 / 80) == "48.7"
    assert mmmu.MMMU().metric("Art/accuracy").text(37 / 80) == "46.3"
