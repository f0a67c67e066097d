"""CHAIR against the published scorer's outputs, and against small cases worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from golden_files import golden
from revisit.embedded import scenes, text
from revisit.embedded.dice import Dice
from revisit.errors import RevisitError
from revisit.eval.benchmarks import chair, get, language
from revisit.eval.benchmarks.base import ratio


def test_every_golden_caption(nltk_data):
    cases = golden("chair")["cases"]
    for case in cases:
        score, where = chair.score_caption(case["caption"], case["gt"]), case["caption"]
        assert list(score.parse.tokens) == case["tokens"], where
        assert [tag for _, tag in language.tagged(case["caption"].lower())] == case["tags"], where
        assert list(score.parse.merged) == case["merged"], where
        assert list(score.parse.words) == case["words"], where
        assert list(score.parse.nodes) == case["nodes"], where
        assert [list(pair) for pair in score.hallucinated] == case["hallucinated"], where
        mentions = max(1, len(score.parse.nodes))
        assert len(score.hallucinated) / mentions == pytest.approx(case["CHAIRi"], abs=1e-12), where
        assert score.recall == pytest.approx(case["Recall"], abs=1e-12), where
    assert len(cases) > 100


def test_golden_totals(nltk_data):
    found = golden("chair")
    scores = chair.score_captions((str(n), case["caption"], case["gt"]) for n, case in enumerate(found["cases"]))
    for metric, value in found["totals"].items():
        assert scores.metrics[metric] == pytest.approx(value, abs=1e-12)
    for metric, units in scores.per_item.items():
        assert ratio(units.values()) == pytest.approx(scores.metrics[metric], abs=1e-12)


def test_ground_truth_is_built_as_published(nltk_data):
    for case in golden("chair")["ground_truth"]:
        captions, instances = [(1, text) for text in case["captions"]], [(1, name) for name in case["instances"]]
        assert chair.build_ground_truth([], captions)[1] == set(case["from_captions"])
        assert chair.build_ground_truth(instances, captions)[1] == set(case["truth"])


def test_worked_by_hand(nltk_data):
    scores = chair.score_captions(
        [("1", "A dog and a dog and a cat.", ["dog", "person"]), ("2", "The sky is blue.", ["kite"])]
    )
    assert scores.metrics["CHAIRs"] == 0.5
    assert scores.metrics["CHAIRi"] == pytest.approx(1 / 3)
    assert scores.metrics["Recall"] == pytest.approx(1 / 3)
    assert scores.metrics["F1"] == pytest.approx((2 * (2 / 3) * 0.5 / (2 / 3 + 0.5)) / 2)
    assert scores.metrics["Len"] == pytest.approx(0.01 * (9 + 5) / 2)
    scores = chair.score_captions([("1", "", ["dog"])])  # no mention at all: undefined, not zero
    assert math.isnan(scores.metrics["CHAIRi"])
    assert scores.metrics["CHAIRs"] == 0.0
    assert "undefined" in scores.notes[0]


def test_toilet_seat_and_pairs(nltk_data):
    assert chair.parse_caption("the seat of the toilet").nodes == ("toilet",)
    assert chair.merge_pairs(("hot", "dog", "baby", "cat", "wine")) == (("hot dog", "cat", "wine"), (0, 2, 4))


def _coco_folder(root: Path) -> Path:
    (root / "annotations").mkdir()
    images = [{"id": i, "file_name": f"COCO_val2014_{i:012d}.png"} for i in (2, 1)]
    notes = {"categories": [{"id": 18, "name": "dog"}], "annotations": [{"image_id": 1, "category_id": 18}]}
    (root / "annotations/instances_val2014.json").write_text(json.dumps({"images": images, **notes}))
    captions = [{"image_id": 1, "caption": "A cat."}, {"image_id": 2, "caption": "A kite."}]
    (root / "annotations/captions_val2014.json").write_text(json.dumps({"images": images, "annotations": captions}))
    return root


def test_load_from_coco_files(tmp_path: Path, nltk_data):
    bench = get("chair")
    items = bench.load(_coco_folder(tmp_path))
    assert [item.id for item in items] == ["1", "2"]
    assert items[0].meta["ground_truth"] == ["cat", "dog"]
    assert items[1].images == (tmp_path / "val2014/COCO_val2014_000000000002.png",)
    scores = bench.score(items, {"1": "a dog", "2": "a dog"})
    assert scores.metrics["CHAIRs"] == 0.5
    ids = tmp_path / "ids.txt"
    ids.write_text("2\n1\n")
    assert [item.id for item in get("chair", ids=str(ids)).load(tmp_path)] == ["2", "1"]
    assert len(set(chair.samples()["seed42-500"])) == 500
    for name, message in (("seed42-500", "not in the annotations"), ("seed42_500", "Did you mean 'seed42-500'")):
        with pytest.raises(RevisitError, match=message):
            get("chair", ids=name).load(tmp_path)


def test_missing_and_damaged_annotation_files_raise(tmp_path: Path):
    with pytest.raises(
        RevisitError, match=r"instances_val2014\.json is missing: use --data download.* or put it at .*cocodataset"
    ):
        get("chair").load(tmp_path)
    _coco_folder(tmp_path)
    for content in ([], {"images": [{"id": 1}]}):
        (tmp_path / "annotations" / "instances_val2014.json").write_text(json.dumps(content))
        with pytest.raises(RevisitError, match=r"instances_val2014\.json is not a COCO .* file"):
            get("chair", ids="all").load(tmp_path)


def test_repetition_by_hand(nltk_data):
    captions = [
        ("1", "A dog, a dog and the dog by a cat.", ["dog", "person"]),  # names two objects, one of them right
        ("2", "A dog and a cat and the dog.", ["dog", "cat"]),
        ("3", "A blue sky.", ["kite"]),
    ]
    metrics = chair.score_captions(captions).metrics
    assert metrics["Rep"] == 1 / 3
    assert metrics["DistinctP"] == 3 / 4
    assert metrics["DistinctF1"] == 2 * 3 / (4 + 5)
    assert metrics["CHAIRi"] == 1 / 7


def test_captions_of_scenes_are_parsed_without_nltk_as_with_it(nltk_data, monkeypatch: pytest.MonkeyPatch):
    captions = [text.caption(scenes.scene("unusual", 0, n), Dice(str(n)), assume=0.5) for n in range(30)]
    expected = [chair.parse_caption(caption) for caption in captions]
    assert sum(len(parse.words) for parse in expected) > 90
    monkeypatch.setattr(language, "missing_packages", lambda: ["wordnet"])
    monkeypatch.setattr(language, "tagged", None)  # not called
    for caption, parse in zip(captions, expected, strict=True):
        found = chair.parse_caption(caption)
        assert (found.tokens, found.nodes, len(found.merged)) == (parse.tokens, parse.nodes, len(parse.merged)), caption
    assert language.parse_scene_caption("two dalmatians on a couch.") is None  # other captions need NLTK
