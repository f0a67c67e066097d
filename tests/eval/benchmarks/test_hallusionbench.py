"""HallusionBench's accuracies against the official code's outputs on all 1,129 questions."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden_files import golden
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks import hallusionbench as hb
from revisit.eval.benchmarks.base import ratio

FIVE = ("qAcc", "fAcc", "aAcc", "easy_aAcc", "hard_aAcc")
NAMES = ("category", "subcategory", "set_id", "figure_id", "question_id", "visual_input", "gt_answer")


def test_every_golden_label_set():
    found = golden("hallusionbench")
    rows = [dict(zip(NAMES, row, strict=True)) for row in found["rows"]]
    for case in found["sets"]:
        labels = dict(zip(map(hb.item_key, rows), case["labels"], strict=True))
        scores = hb.score_labels(rows, labels)
        for part, want in case["official"].items():
            prefix = "" if part == "all" else f"{part}/"
            for name in FIVE:
                assert round(scores.metrics[prefix + name], 4) == want[name]
                assert scores.counts[f"{prefix}{name}_total"] == want["totals"][name]
            for name in ("fig_inconsistent", "fig_wrong", "fig_score"):
                assert scores.counts[prefix + name] == pytest.approx(want[name], abs=1e-9)
        for name, units in scores.per_item.items():
            assert ratio(units.values()) == pytest.approx(scores.metrics[name], abs=1e-9)


def test_golden_extraction():
    for case in golden("hallusionbench")["yesno_extraction"]:
        assert hb.parse_vlmevalkit(case["answer"]).capitalize() == case["vlmevalkit"]


def test_labels():
    for answer, gold, label in (("Yes.", "1", "1"), ("No", 1, "0"), ("no", "0", "1"), ("Maybe", "0", "2")):
        assert hb.rule_label(answer, gold) == label
    for reply, label in (("Incorrect.", "0"), ("It is CORRECT", "1"), ("unclear", "2")):
        assert hb.judge_label(reply) == label


def test_model_judge(stub_judge, tmp_path: Path):
    stub_judge.replies = ["This is correct.", "incorrect"]
    bench = get("hallusionbench", judge="model", judge_url=stub_judge.url, judge_cache=str(tmp_path / "judge.jsonl"))
    base = {"category": "VD", "subcategory": "scene", "set_id": "0", "question_id": "0", "gt_answer_details": "-"}
    original = base | {"figure_id": "0", "visual_input": "1", "gt_answer": "1", "question": "Is it red?"}
    rows = [original, original | {"figure_id": "1", "visual_input": "2", "gt_answer": "0"}]
    items = [hb.Item(hb.item_key(row), row["question"], (), {"row": row}) for row in rows]
    answers = {"VD_scene_0_0_0": "It is.", "VD_scene_0_1_0": "It is still."}
    scores = bench.score(items, answers)
    assert scores.metrics["aAcc"] == 50.0
    assert scores.notes == ("By gpt-4.",)
    assert "It is still." in stub_judge.prompts[1]
    assert bench.score(items, answers).metrics == scores.metrics
    assert len(stub_judge.prompts) == 2  # the second time, replies come from the cache
