"""DASH-B, NaturalBench and PhD: short answers of every kind as the released scorers read them, and metrics by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from golden_files import golden
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get, naturalbench, phd, pope

GOLDEN = golden("short_answers")
ANSWERS = GOLDEN["answers"]


def test_dash_b_reads_every_answer_as_released() -> None:
    words = {"y": "yes", "n": "no", "-": "unknown"}
    for answer, read in zip(ANSWERS, GOLDEN["dash_b"]["read"], strict=True):
        assert pope.PARSERS["dash_b"](answer, "") == words[read], answer


def test_dash_b_gives_the_released_results() -> None:
    names = {"accuracy": "ACC", "TPR": "TPR", "TNR": "TNR", "harmonic": "Harmonic Mean"}
    for run in GOLDEN["dash_b"]["runs"]:
        labels = ({"y": "yes", "n": "no"}[label] for label in run["labels"])
        rows = [(str(n), answer, label) for n, (answer, label) in enumerate(zip(ANSWERS, labels, strict=True))]
        scores = pope.score_recalls(rows)
        assert scores.metrics == pytest.approx(
            {ours: run["results"][theirs] for ours, theirs in names.items()}, abs=1e-12
        )


def test_dash_b_without_anything_right_has_no_harmonic_mean() -> None:
    scores = pope.score_recalls([("1", "no", "yes"), ("2", "yes", "no"), ("3", "perhaps", "yes")])
    assert scores.metrics["accuracy"] == 0
    assert math.isnan(scores.metrics["harmonic"])


@pytest.mark.parametrize("kind", ["yes_no", "multiple_choice"])
def test_naturalbench_reads_every_answer_as_released(kind: str) -> None:
    said = {"1": True, "0": False, "-": None}
    for answer, read in zip(ANSWERS, GOLDEN["naturalbench"][kind], strict=True):
        assert naturalbench.parse(answer, kind) is said[read], answer


def test_naturalbench_gives_the_released_results() -> None:
    said = {"1": True, "0": False, "-": None}
    cells = [(0, 0), (0, 1), (1, 0), (1, 1)]
    for run in GOLDEN["naturalbench"]["runs"]:
        groups = {str(n): dict(zip(cells, map(said.get, group), strict=True)) for n, group in enumerate(run["cells"])}
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


def phd_folder(root: Path) -> Path:
    (root / "phd").mkdir()
    rows = []
    for number, task in enumerate(("object recognition", "counting"), 11):
        asked = {"task": task, "yes_question": f"Two {number}?", "no_question": f"Three {number}?"}
        rows.append({"image_id": str(number), "context": {"iac": "It rains.", "icc": "There are three."}, **asked})
    rows.append(
        {"image_id": 0, "ccs_description": "x", "task": "counting", "yes_question": "One?", "no_question": "No?"}
    )
    (root / "phd/data.json").write_text(json.dumps(rows))
    (root / "val2014").mkdir()
    (root / "val2014/COCO_val2014_000000000012.jpg").write_bytes(b"")
    return root


def test_phd_asks_in_four_modes(tmp_path: Path) -> None:
    items = {item.id: item for item in get("phd").load(phd_folder(tmp_path))}
    assert len(items) == 2 * 2 * 3 + 2
    assert items["base/0/yes"].prompt == "Two 11?"
    told = "In case there is an inconsistency between the context and the image content, you should follow the image."
    assert items["icc/1/no"].prompt == f"There are three. {told} Three 12?"
    assert items["iac/1/no"].images == (tmp_path / "val2014/COCO_val2014_000000000012.jpg",)
    assert items["ccs/2/no"].images == (tmp_path / "phd/CCS_images/0.png",)
    assert {item.meta["label"] for name, item in items.items() if name.endswith("/no")} == {"no"}
    assert [item.id for item in get("phd", modes="ccs").load(tmp_path)] == ["ccs/2/yes", "ccs/2/no"]
    with pytest.raises(RevisitError, match="mode"):
        get("phd", modes="base,ccx")


def test_the_phd_index_is_the_harmonic_mean_of_both_recalls(tmp_path: Path) -> None:
    bench = phd.PhD(modes=("base", "ccs"))
    items = bench.load(phd_folder(tmp_path))
    said = {
        "base/0/yes": "Yes",
        "base/0/no": "Yes",
        "base/1/yes": "Yes",
        "base/1/no": "No",
        "ccs/2/yes": "?",
        "ccs/2/no": "no",
    }
    metrics = bench.score(items, said).metrics
    assert metrics["base/TPR"] == 1
    assert metrics["base/TNR"] == 0.5
    assert metrics["base/harmonic"] == pytest.approx(2 / 3)
    assert metrics["base/counting/harmonic"] == 1
    assert metrics["base/object recognition/harmonic"] == 0
    assert metrics["ccs/TPR"] == 0
    assert metrics["accuracy"] == pytest.approx((0.75 + 0.5) / 2)
    assert bench.metric("base/counting/harmonic").show == 100
