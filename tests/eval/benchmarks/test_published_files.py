"""The scorers on published files: real captions, questions and annotations, which are not ours to keep in this repository."""

from __future__ import annotations

import json
import random

import pytest

from revisit.eval.benchmarks import chair, get, hallusionbench, language, mmmu, vqav2
from revisit.io.records import Record
from revisit.words import PAIRS, WORDS

FIVE = ("qAcc", "fAcc", "aAcc", "easy_aAcc", "hard_aAcc")


@pytest.fixture(autouse=True)
def nltk_beside(shared_data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLTK_DATA", str(shared_data / "nltk_data"))
    language.require_data()


def test_chair(shared_data):
    """Captions of real models, the published word tables, and the list of all images."""
    cases = json.loads((shared_data.parent / "golden/chair.json").read_text("utf-8"))["cases"]
    for case in cases:
        want, score = case["nltk"], chair.score_caption(case["caption"], case["gt_objects"])
        assert list(score.parse.merged) == want["double_words"]
        assert list(score.parse.nodes) == want["node_words"]
        assert score.f1 == pytest.approx(case["paper"]["f1"], abs=1e-12)
    for case in json.loads((shared_data.parent / "golden/chair_gt_build.json").read_text("utf-8")):
        captions, instances = [(1, text) for text in case["captions"]], [(1, n) for n in case["instance_categories"]]
        assert chair.build_ground_truth(instances, captions)[1] == set(case["gt_in_cache"])
    stored = json.loads((shared_data / "chair/chair_gt_nltk.json").read_text("utf-8"))
    names, splits = stored["categories"], [part for part in stored.values() if isinstance(part, dict)]
    truth = {int(image): {names[n] for n in numbers} for part in splits for image, numbers in part.items()}
    for name, want in json.loads((shared_data.parent / "golden/chair_e2e.json").read_text("utf-8"))["files"].items():
        lines = (shared_data / "chair/opera_captions" / name).read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        scores = chair.score_captions((str(r["image_id"]), r["caption"], truth[r["image_id"]]) for r in rows)
        for metric in ("CHAIRs", "CHAIRi", "Recall", "Len"):
            assert scores.metrics[metric] == pytest.approx(want["nltk"][metric], abs=1e-9)
        assert scores.metrics["F1"] == pytest.approx(want["nltk"]["paper_f1_mean"], abs=1e-9)
        for count in ("object_mentions", "hallucinated_mentions", "hallucinated_captions"):
            assert scores.counts[count] == want["nltk"][count]
    tables = json.loads((shared_data / "chair/chair_tables.json").read_text("utf-8"))
    published = tables["synonym_to_category"]
    assert {w for w in published if w not in WORDS} == set(tables["unreachable_synonyms"]) - {"dining table"}
    assert all(published[word] == category for word, category in WORDS.items())
    assert {tuple(k.split()): v for k, v in tables["double_word_map"].items() if len(k.split()) == 2} == PAIRS
    ids = sorted(json.loads((shared_data / "chair/val2014_image_ids.json").read_text("utf-8")))
    random.Random(42).shuffle(ids)
    assert chair.samples()["seed42-500"] == ids[:500]


def test_vqav2(shared_data):
    """The official tables, and real annotations."""
    tables = json.loads((shared_data / "vqav2/normalisation_tables.json").read_text("utf-8"))
    # Keys with capitals can never match lower-cased words, so we leave them out.
    assert {k: v for k, v in tables["contractions"].items() if k == k.lower()} == vqav2.CONTRACTIONS
    assert tables["punctuation_in_order"] == list(vqav2._PUNCTUATION)
    assert tables["number_words"] == vqav2._NUMBERS
    for case in json.loads((shared_data.parent / "golden/vqav2.json").read_text("utf-8"))["cases"]:
        assert vqav2.official_accuracy(case["prediction"], case["answers"]) == pytest.approx(case["official_acc"])
    notes = vqav2.read_list(shared_data / "vqav2/vqa_v2_train2014_subset2962_annotations.json.gz", "annotations")
    assert len(notes) == 2962
    answers = [[answer["answer"] for answer in note["answers"]] for note in notes]
    said = [note["multiple_choice_answer"] for note in notes]
    rows = ((str(n), said[n], own, "x", "y") for n, own in enumerate(answers))
    # The majority answer: its accuracy follows from how often it was given.
    assert vqav2.score_answers(rows).metrics["accuracy"] > 80


def test_mmmu(shared_data):
    """Outputs of real models on the 900 questions, the answer file and the tables."""
    found = json.loads((shared_data.parent / "golden/mmmu.json").read_text("utf-8"))["end_to_end"]
    for model, want in found.items():
        folder = shared_data / "mmmu/example_outputs" / model
        rows = [r for s in mmmu.SUBJECTS for r in json.loads((folder / s / "output.json").read_text())]
        shaped = [
            row | {"answer": str(row["answer"]), "options": list((row.get("index2ans") or {}).values())} for row in rows
        ]
        questions = [mmmu.question(Record(row, row["id"])) for row in shaped]
        scores = mmmu.score_responses(questions, {row["id"]: row["response"] for row in rows})
        assert scores.metrics["micro"] == pytest.approx(want["micro"], abs=1e-9)
        assert scores.metrics["macro"] == pytest.approx(want["macro"], abs=1e-9)
        for item, judged in want["judge"].items():
            assert scores.per_item["micro"][item][0] == (judged["judge"] == "Correct"), item
    tables = json.loads((shared_data / "mmmu/mmmu_tables.json").read_text())
    assert list(mmmu.SUBJECTS) == tables["subjects_in_scoring_order"]
    assert {k: list(v) for k, v in mmmu.DOMAINS.items()} == tables["domains"]


def test_hallusionbench(shared_data):
    """All 1,129 official questions."""
    bench = get("hallusionbench")
    items = bench.load(shared_data)
    assert len(items) == 1129
    assert sum(not item.images for item in items) == 178
    assert len(get("hallusionbench", part="VD").load(shared_data)) == 591
    rows = [item.meta["row"] for item in items]
    found = json.loads((shared_data.parent / "golden/hallusionbench.json").read_text("utf-8"))["sets"]
    for labels in found.values():
        scores = hallusionbench.score_labels(rows, labels["labels"])
        for part, want in labels["official"].items():
            for name in FIVE:
                assert round(scores.metrics[("" if part == "all" else f"{part}/") + name], 4) == want[name]
