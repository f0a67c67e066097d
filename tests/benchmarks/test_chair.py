"""CHAIR against the published scorer's outputs, and against small cases worked out by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from revisit.benchmarks import chair, get, language
from revisit.benchmarks.base import ratio
from revisit.benchmarks.chair_words import CATEGORIES, PAIRS, WORDS
from revisit.errors import RevisitError


def test_every_golden_caption(golden, nltk_data):
    cases = golden("chair")["cases"]
    for case in cases:
        want, score = case["nltk"], chair.score_caption(case["caption"], case["gt_objects"])
        where = case["caption"]
        assert list(score.parse.tokens) == want["tokens"], where
        assert list(score.parse.tags) == want["pos_tags"], where
        assert list(score.parse.merged) == want["double_words"], where
        assert list(score.parse.words) == want["words"], where
        assert list(score.parse.nodes) == want["node_words"], where
        assert list(score.parse.places) == want["idxs"], where
        assert [list(pair) for pair in score.hallucinated] == want["hallucinated"], where
        assert int(bool(score.hallucinated)) == want["metrics"]["CHAIRs"], where
        mentions = max(1, len(score.parse.nodes))
        assert len(score.hallucinated) / mentions == pytest.approx(want["metrics"]["CHAIRi"], abs=1e-12), where
        assert score.recall == pytest.approx(want["metrics"]["Recall"], abs=1e-12), where
        assert score.precision == pytest.approx(case["paper"]["precision"], abs=1e-12), where
        assert score.f1 == pytest.approx(case["paper"]["f1"], abs=1e-12), where
    assert len(cases) > 100


def test_ground_truth_is_built_as_published(golden, nltk_data):
    for case in golden("chair_gt_build"):
        image = case["image_id"]
        captions = [(image, text) for text in case["captions"]]
        instances = [(image, name) for name in case["instance_categories"]]
        assert chair.build_ground_truth([], captions).get(image, set()) == set(case["caption_objects_nltk"])
        assert chair.build_ground_truth(instances, captions)[image] == set(case["gt_in_cache"])


def test_published_totals(golden, nltk_data, shared_data):
    truth = chair.read_ground_truth([shared_data / "chair/chair_gt_nltk.json"])
    for name, want in golden("chair_e2e")["files"].items():
        lines = (shared_data / "chair/opera_captions" / name).read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        scores = chair.score_captions((str(r["image_id"]), r["caption"], truth[r["image_id"]]) for r in rows)
        want = want["nltk"]
        for metric in ("CHAIRs", "CHAIRi", "Recall", "Len"):
            assert scores.metrics[metric] == pytest.approx(want[metric], abs=1e-9)
        assert scores.metrics["F1"] == pytest.approx(want["paper_f1_mean"], abs=1e-9)
        for count in ("object_mentions", "hallucinated_mentions", "hallucinated_captions"):
            assert scores.counts[count] == want[count]
        for metric, units in scores.per_item.items():
            assert ratio(units.values()) == pytest.approx(scores.metrics[metric], abs=1e-12)


def test_tables_hold_the_published_facts(shared_data):
    tables = json.loads((shared_data / "chair/chair_tables.json").read_text("utf-8"))
    published = tables["synonym_to_category"]
    assert {w: c for w, c in published.items() if w not in WORDS}.keys() == set(tables["unreachable_synonyms"]) - {
        "dining table"
    }
    assert all(published[word] == category for word, category in WORDS.items())
    pairs = {tuple(k.split()): v for k, v in tables["double_word_map"].items() if len(k.split()) == 2}
    assert pairs == PAIRS
    assert len(CATEGORIES) == 80


def test_sample_list_can_be_recomputed(shared_data):
    ids = sorted(json.loads((shared_data / "chair/val2014_image_ids.json").read_text("utf-8")))
    random.Random(42).shuffle(ids)
    assert chair.sample_ids("seed42-500") == ids[:500]
    with pytest.raises(RevisitError, match="seed42-500"):
        chair.sample_ids("seed42_500")


def test_worked_by_hand(nltk_data):
    scores = chair.score_captions(
        [("1", "A dog and a dog and a cat.", ["dog", "person"]), ("2", "The sky is blue.", ["kite"])]
    )
    assert scores.metrics["CHAIRs"] == 0.5
    assert scores.metrics["CHAIRi"] == pytest.approx(1 / 3)
    assert scores.metrics["Recall"] == pytest.approx(1 / 3)
    assert scores.metrics["F1"] == pytest.approx((2 * (2 / 3) * 0.5 / (2 / 3 + 0.5)) / 2)
    assert scores.metrics["Len"] == pytest.approx(0.01 * (9 + 5) / 2)


def test_no_mention_at_all_is_undefined_not_zero(nltk_data):
    scores = chair.score_captions([("1", "", ["dog"])])
    assert math.isnan(scores.metrics["CHAIRi"])
    assert scores.metrics["CHAIRs"] == 0.0
    assert "undefined" in scores.notes[0]


def test_toilet_seat_and_pairs(nltk_data):
    assert chair.parse_caption("the seat of the toilet").nodes == ("toilet",)
    assert chair.merge_pairs(("hot", "dog", "baby", "cat", "wine")) == (("hot dog", "cat", "wine"), (0, 2, 4))


@pytest.mark.parametrize("value", [139, "139", "000000000139.jpg", "COCO_val2014_000000000139.jpg"])
def test_image_key(value):
    assert chair.image_key(value) == 139


def test_instances_alone_are_refused(tmp_path: Path):
    path = tmp_path / "instances_val2014.json"
    path.write_text(json.dumps({"categories": [], "annotations": [], "images": []}))
    with pytest.raises(RevisitError, match="captions file too"):
        chair.read_ground_truth([path])


def test_missing_nltk_data_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import nltk

    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])
    language._tools.cache_clear()
    try:
        with pytest.raises(RevisitError, match="punkt_tab, averaged_perceptron_tagger_eng, wordnet"):
            chair.parse_caption("a dog")
    finally:
        language._tools.cache_clear()


def test_download_is_nltks_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import nltk

    asked = []
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda package, quiet: asked.append(package))
    with pytest.raises(RevisitError, match="could not download 'punkt_tab'"):
        language.download_data()
    assert asked == ["punkt_tab"]


def _coco_folder(root: Path) -> Path:
    (root / "annotations").mkdir()
    images = [{"id": i, "file_name": f"COCO_val2014_{i:012d}.png"} for i in (2, 1)]
    (root / "annotations/instances_val2014.json").write_text(
        json.dumps(
            {
                "images": images,
                "categories": [{"id": 18, "name": "dog"}],
                "annotations": [{"image_id": 1, "category_id": 18}],
            }
        )
    )
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
    with pytest.raises(RevisitError, match="1 of 2 items have no answer"):
        bench.score(items, {"1": "a dog"})


def test_id_file_keeps_its_order(tmp_path: Path, nltk_data):
    ids = tmp_path / "ids.txt"
    ids.write_text("2\n1\n")
    assert [item.id for item in get("chair", ids=str(ids)).load(_coco_folder(tmp_path))] == ["2", "1"]
    with pytest.raises(RevisitError, match="not in the annotations"):
        get("chair", ids="seed42-500").load(tmp_path)


def test_missing_annotations_say_where_they_go(tmp_path: Path):
    with pytest.raises(RevisitError, match=r"instances_val2014\.json not found: put it at .*cocodataset"):
        get("chair").load(tmp_path)


def test_length_by_the_published_formula(nltk_data):
    captions = [(str(n), "dog " * (7 + (n < 5)), ["dog"]) for n in range(20)]
    assert chair.score_captions(captions).metrics["Len"] == 0.01 * 145 / 20
