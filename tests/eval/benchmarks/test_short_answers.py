"""DASH-B, NaturalBench and PhD: short answers of every kind as the released scorers read them, and metrics by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, naturalbench, yes_no

GOLDEN = golden("short_answers")
ANSWERS = GOLDEN["answers"]


def test_dash_b_as_released() -> None:
    words = {"y": "yes", "n": "no", "-": "unknown"}
    for answer, read in zip(ANSWERS, GOLDEN["dash_b"]["read"], strict=True):
        assert yes_no.PARSERS["dash_b"](answer, "") == words[read], answer
    names = {"accuracy": "ACC", "TPR": "TPR", "TNR": "TNR", "harmonic": "Harmonic Mean"}
    for run in GOLDEN["dash_b"]["runs"]:
        labels = ({"y": "yes", "n": "no"}[label] for label in run["labels"])
        rows = [(str(n), answer, label) for n, (answer, label) in enumerate(zip(ANSWERS, labels, strict=True))]
        scores = yes_no.score_recalls(rows)
        assert scores.metrics == pytest.approx(
            {ours: run["results"][theirs] for ours, theirs in names.items()}, abs=1e-12
        )
    # with nothing right there is no harmonic mean
    scores = yes_no.score_recalls([("1", "no", "yes"), ("2", "yes", "no"), ("3", "perhaps", "yes")])
    assert scores.metrics["accuracy"] == 0
    assert math.isnan(scores.metrics["harmonic"])


def test_naturalbench_as_released() -> None:
    parsed = {"1": True, "0": False, "-": None}
    for kind in ("yes_no", "multiple_choice"):
        for answer, read in zip(ANSWERS, GOLDEN["naturalbench"][kind], strict=True):
            assert naturalbench.parse(answer, kind) is parsed[read], answer
    cells = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for run in GOLDEN["naturalbench"]["runs"]:
        groups = {str(n): dict(zip(cells, map(parsed.get, group), strict=True)) for n, group in enumerate(run["cells"])}
        assert naturalbench.score_groups(groups).metrics == pytest.approx(run["results"], abs=1e-12)


def test_naturalbench_counts_whole_groups_only(tmp_path: Path) -> None:
    home = tmp_path / "naturalbench"
    home.mkdir()
    group = {"index": 3, "type": "yes_no", "questions": ["A dog?", "A cat?"], "images": ["a.jpg", "b.jpg"]}
    (home / "questions.jsonl").write_text(json.dumps(group))
    bench = get("naturalbench")
    items = bench.load(tmp_path)
    assert [item.id for item in items] == ["3/q0_i0", "3/q0_i1", "3/q1_i0", "3/q1_i1"]
    assert items[1].prompt == "A dog?Please answer Yes or No."
    assert items[1].images == (home / "b.jpg",)
    with pytest.raises(RevisitError, match="no group is complete"):
        bench.score(items[:3], {item.id: "yes" for item in items[:3]})


def test_phd(tmp_path: Path) -> None:
    (tmp_path / "phd").mkdir()
    rows = []
    for number, task in enumerate(("object recognition", "counting"), 11):
        asked = {"task": task, "yes_question": f"Two {number}?", "no_question": f"Three {number}?"}
        rows.append({"image_id": str(number), "context": {"iac": "It rains.", "icc": "There are three."}, **asked})
    generated = {"task": "counting", "yes_question": "One?", "no_question": "No?"}
    rows.append({"image_id": 0, "ccs_description": "x", **generated})
    (tmp_path / "phd/data.json").write_text(json.dumps(rows))
    (tmp_path / "val2014").mkdir()
    (tmp_path / "val2014/COCO_val2014_000000000012.jpg").write_bytes(b"")
    items = {item.id: item for item in get("phd").load(tmp_path)}
    assert len(items) == 2 * 2 * 3 + 2
    assert items["base/0/yes"].prompt == "Two 11?"
    rule = "In case there is an inconsistency between the context and the image content, you should follow the image."
    assert items["icc/1/no"].prompt == f"There are three. {rule} Three 12?"
    assert items["iac/1/no"].images == (tmp_path / "val2014/COCO_val2014_000000000012.jpg",)
    assert items["ccs/2/no"].images == (tmp_path / "phd/CCS_images/0.png",)
    assert {item.meta["label"] for name, item in items.items() if name.endswith("/no")} == {"no"}
    assert [item.id for item in get("phd", modes="ccs").load(tmp_path)] == ["ccs/2/yes", "ccs/2/no"]
    with pytest.raises(RevisitError, match="mode"):
        get("phd", modes="base,ccx")
    # the PhD index is the harmonic mean of both recalls
    bench = get("phd", modes="base,ccs")
    texts = ("Yes", "Yes", "Yes", "No", "?", "no")
    answers = {item.id: text for item, text in zip(bench.load(tmp_path), texts, strict=True)}
    metrics = bench.score(bench.load(tmp_path), answers).metrics
    assert metrics["base/TPR"] == 1
    assert metrics["base/TNR"] == 0.5
    assert metrics["base/harmonic"] == pytest.approx(2 / 3)
    assert metrics["base/counting/harmonic"] == 1
    assert metrics["base/object recognition/harmonic"] == 0
    assert metrics["ccs/TPR"] == 0
    assert metrics["accuracy"] == pytest.approx((0.75 + 0.5) / 2)
    assert bench.metric("base/counting/harmonic").show == 100
