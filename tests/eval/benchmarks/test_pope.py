"""POPE's parsers against every published one, and its metrics against counts done by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, pope, yes_no
from revisit.eval.benchmarks.base import ratio

SETTINGS = [questions.setting for questions in pope.Pope.question_files]


def test_every_golden_answer():
    cases = golden("pope")["cases"]
    for case in cases:
        text = case["answer"]
        assert yes_no.parse_official(text) == case["official"], text
        assert yes_no.parse_opera(text) == case["opera_recorder"], text
        assert (yes_no.parse_vcd(text, "yes") == "yes") == case["vcd_correct_if_label_yes"], text
        assert (yes_no.parse_vcd(text, "no") == "no") == case["vcd_correct_if_label_no"], text
        assert yes_no.parse_harness(text) == case["lmms_eval_pred"], text
        assert yes_no.parse_vlmevalkit(text).capitalize() == case["vlmevalkit"], text
    assert len(cases) > 150


def test_golden_metrics():
    found = golden("pope")
    for case in found["metrics"]:
        rows = [
            (str(n), found["said"][said], {"y": "yes", "n": "no"}[label])
            for n, (said, label) in enumerate(zip(case["answers"], case["labels"], strict=True))
        ]
        scores = yes_no.score_answers(rows)
        assert [scores.counts[kind] for kind in ("TP", "FP", "TN", "FN")] == case["counts"]
        assert scores.metrics == {name: case[name] for name in ("accuracy", "precision", "recall", "F1", "yes_ratio")}


def test_metrics_by_hand():
    rows = [("1", "Yes", "yes"), ("2", "yes.", "no"), ("3", "No", "no"), ("4", "no", "yes"), ("5", "Yes!", "yes")]
    scores = yes_no.score_answers(rows)
    assert scores.counts == {"TP": 2, "FP": 1, "TN": 1, "FN": 1, "other": 0}
    assert scores.metrics == pytest.approx(
        {"accuracy": 3 / 5, "precision": 2 / 3, "recall": 2 / 3, "F1": 2 / 3, "yes_ratio": 3 / 5}
    )
    harness = yes_no.score_answers(rows, "harness")
    # "yes." and "Yes!" are no answers there; recall leaves them out, the yes-ratio is one of labels.
    assert harness.metrics == pytest.approx(
        {"accuracy": 2 / 5, "precision": 1.0, "recall": 1 / 2, "F1": 2 / 3, "yes_ratio": 3 / 5}
    )
    assert harness.counts["other"] == 2


def test_parsers_differ_in_answers_that_are_neither_yes_nor_no():
    scores = yes_no.score_answers([("1", "I know", "no"), ("2", "I know", "yes"), ("3", "Perhaps", "no")], "vcd")
    assert scores.counts == {"TP": 0, "FP": 1, "TN": 1, "FN": 1, "other": 0}
    rows = [("1", "Maybe", "yes"), ("2", "Yes", "yes"), ("3", "Maybe", "no"), ("4", "No", "no")]
    kit = yes_no.score_answers(rows, "vlmevalkit")
    assert kit.metrics["accuracy"] == 0.5
    assert kit.metrics["recall"] == 0.5
    repope = yes_no.score_answers(rows, "repope")
    assert repope.metrics["accuracy"] == 1.0  # answers without yes or no are not counted at all
    assert repope.metrics["recall"] == 1.0
    with pytest.raises(RevisitError, match="must be yes or no"):
        yes_no.score_answers([("1", "yes", "maybe")])


def test_precision_without_a_yes_is_undefined():
    scores = yes_no.score_answers([("1", "No", "yes"), ("2", "No", "no")])
    assert math.isnan(scores.metrics["precision"])
    assert scores.metrics["recall"] == 0.0
    assert yes_no.score_answers([("1", "no", "yes")], "harness").metrics["precision"] == 0.0


def test_settings_are_averaged_or_pooled():
    rows = [("1", "yes", "yes", "a"), ("2", "no", "no", "b"), ("3", "yes", "no", "b")]
    scores = yes_no.score_settings(rows)
    assert scores.metrics["accuracy"] == pytest.approx((1 + 0.5) / 2)
    assert scores.metrics["b/accuracy"] == 0.5
    for metric in ("accuracy", "yes_ratio"):
        assert ratio(scores.per_item[metric].values()) == pytest.approx(scores.metrics[metric])
    rows = [("1", "yes", "yes", "a"), ("2", "yes", "yes", "a"), ("3", "no", "yes", "b"), ("4", "no", "no", "b")]
    scores = yes_no.score_settings(rows, "vlmevalkit")
    assert scores.metrics["F1"] == 2 * 1 * (2 / 3) / (1 + 2 / 3)
    assert scores.metrics["b/precision"] == scores.metrics["b/F1"] == 0
    assert scores.metrics["accuracy"] == 0.75
    assert set(scores.per_item["F1"]) == {"1", "2", "3", "4"}


def test_nine_settings_and_options(tmp_path: Path):
    """Load nine files with six questions each, in the two official layouts."""
    (tmp_path / "pope").mkdir()
    for setting in SETTINGS:
        source, kind = setting.split("_")
        image = "COCO_val2014_000000000007.jpg" if source != "gqa" else "2400007.jpg"
        rows = [
            {"question_id": n, "image": image, "text": f"Is there a thing {n} in the image?", "label": label}
            for n, label in enumerate(("yes", "no") * 3, 1)
        ]
        if source == "coco":
            (tmp_path / f"pope/coco_pope_{kind}.json").write_text("\n".join(map(json.dumps, rows)))
        else:
            (tmp_path / f"pope/{source}_pope_seem_{kind}.json").write_text(json.dumps(rows, indent=2))
    items = get("pope").load(tmp_path)
    assert len(items) == 54
    assert {item.meta["setting"] for item in items} == set(SETTINGS)
    scores = get("pope").score(items, {item.id: "Yes" for item in items})
    assert scores.metrics["accuracy"] == pytest.approx(0.5)
    assert scores.metrics["F1"] == pytest.approx(2 / 3)
    bench = get("pope", settings="coco_random,gqa_popular", parser="opera", suffix="one-word")
    assert bench.version == "pope-opera-1"
    items = bench.load(tmp_path)
    assert len(items) == 12
    assert items[0].id == "coco_random/1"
    assert items[0].prompt.endswith("in the image? Please answer this question with one word.")
    assert items[-1].images[0].parent.name == "gqa"
    with pytest.raises(RevisitError, match="Did you mean 'official'"):
        get("pope", parser="oficial")


def test_repope_agrees_with_the_official_script():
    found = golden("repope")
    for text, said in found["answers"]:
        assert yes_no.PARSERS["repope"](text, "yes") == said, text
    for run in found["runs"]:
        rows = [(str(n), text, label) for n, (label, text) in enumerate(run["rows"])]
        scores = yes_no.score_answers(rows, "repope")
        assert {name: scores.metrics[name] for name in run["metrics"]} == pytest.approx(run["metrics"])
        assert {name: scores.counts[name] for name in run["counts"]} == run["counts"]


ENTRY = """
from revisit.eval.benchmarks.yes_no import ImageSource, Questions, YesNo

SOURCE_OF_IMAGES = ImageSource(("images",), ("https://example.org/images",))


class Shapes(YesNo):
    parser: str = "vlmevalkit"

    name = "shapes"
    title = "Shapes"
    source = "its authors"
    license = "MIT"
    question_files = (
        Questions("near miss", ("near_miss.json",), SOURCE_OF_IMAGES),
        Questions("other", ("other.json",), SOURCE_OF_IMAGES),
    )
"""


def test_a_benchmark_in_this_form_is_one_class(tmp_path: Path):
    """Load and score a new one; the name of a setting need not look like POPE's."""
    (tmp_path / "mine.py").write_text(ENTRY)
    (tmp_path / "shapes").mkdir()
    for name, label in (("near_miss", "no"), ("other", "yes")):
        row = {"question_id": 1, "image": "7.jpg", "text": f"Is there a {name}?", "label": label}
        (tmp_path / f"shapes/{name}.json").write_text(json.dumps(row))
    bench = get(f"{tmp_path / 'mine.py'}:Shapes")
    items = bench.load(tmp_path)
    assert [(item.id, item.meta["label"]) for item in items] == [("near miss/1", "no"), ("other/1", "yes")]
    assert bench.score(items, {item.id: "Yes." for item in items}).metrics["near miss/accuracy"] == 0.0
    assert bench.version == "shapes-vlmevalkit-1"
    assert {r.urls for r in bench.image_files(tmp_path)} == {("https://example.org/images/7.jpg",)}
    with pytest.raises(RevisitError, match="Did you mean 'other'"):
        get(f"{tmp_path / 'mine.py'}:Shapes", settings="othr")
