"""The folder of benchmarks: official schemas, correct labels, matching images."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from revisit.embedded.build import build
from revisit.embedded.catalog import CATEGORIES
from revisit.embedded.scenes import render, scene

N = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scenes") / "unusual"
    build(path, "unusual", N, 4)
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def there(folder: Path) -> dict[int, set[str]]:
    return {row["image_id"]: {o["noun"] for o in row["objects"]} for row in lines(folder / "scenes.jsonl")}


def test_images_are_the_scenes(folder: Path) -> None:
    for image_id in (1, N):
        stored = np.asarray(Image.open(folder / "val2014" / f"COCO_val2014_{image_id:012d}.png"))
        assert np.array_equal(stored, np.asarray(render(scene("unusual", 4, image_id - 1))))
    assert len(list((folder / "val2014").iterdir())) == N


def test_coco_files(folder: Path) -> None:
    instances = json.loads((folder / "annotations/instances_val2014.json").read_text())
    captions = json.loads((folder / "annotations/captions_val2014.json").read_text())
    names = {c["id"]: c["name"] for c in instances["categories"]}
    assert len(names) == 80
    nouns = {c.name: c.noun for c in CATEGORIES}
    found: dict[int, set[str]] = {}
    for row in instances["annotations"]:
        found.setdefault(row["image_id"], set()).add(nouns[names[row["category_id"]]])
        x, y, w, h = row["bbox"]
        assert 0 < row["area"] <= w * h
        assert x + w <= 128 >= y + h
    assert found == there(folder)
    assert set(Counter(row["image_id"] for row in captions["annotations"]).values()) == {5}


@pytest.mark.parametrize("setting", ["random", "popular", "adversarial"])
def test_pope_labels(folder: Path, setting: str) -> None:
    rows = lines(folder / f"pope/coco_pope_{setting}.json")
    assert [r["question_id"] for r in rows] == list(range(1, len(rows) + 1))
    assert Counter(r["label"] for r in rows) == {"yes": len(rows) // 2, "no": len(rows) // 2}
    truth = there(folder)
    for row in rows:
        noun = row["text"].removesuffix(" in the image?").split()[-1]
        image = int(row["image"].split("_")[-1][:12])
        assert (noun in truth[image]) == (row["label"] == "yes"), row


def test_adversarial_questions_are_about_typical_objects(folder: Path) -> None:
    rows = lines(folder / "pope/coco_pope_adversarial.json")
    for index in range(N):
        drawn = scene("unusual", 4, index)
        asked = [r["text"] for r in rows if int(r["image"].split("_")[-1][:12]) == index + 1 and r["label"] == "no"]
        assert drawn.place.core[0][0] in asked[0]


def test_hallusionbench_pairs(folder: Path) -> None:
    rows = json.loads((folder / "hallusionbench/HallusionBench.json").read_text())
    assert len(rows) == 4 * (N // 5)
    assert all(isinstance(v, str) for row in rows for v in row.values())
    answers = {(r["set_id"], r["figure_id"], r["question_id"]): r["gt_answer"] for r in rows}
    for set_id in {r["set_id"] for r in rows}:
        assert [answers[set_id, f, q] for f in "01" for q in "01"] == ["1", "0", "0", "1"]
        before, after = (folder / "hallusionbench" / f"VD/scene/{set_id}_{f}.png" for f in "01")
        assert (np.asarray(Image.open(before)) != np.asarray(Image.open(after))).any()
    assert all((folder / "hallusionbench" / r["filename"]).is_file() for r in rows)


def test_vqa_files(folder: Path) -> None:
    questions = json.loads((folder / "vqav2/v2_OpenEnded_mscoco_val2014_questions.json").read_text())
    annotations = json.loads((folder / "vqav2/v2_mscoco_val2014_annotations.json").read_text())
    assert [q["question_id"] for q in questions["questions"]] == [a["question_id"] for a in annotations["annotations"]]
    for row in annotations["annotations"]:
        given = [a["answer"] for a in row["answers"]]
        assert [a["answer_id"] for a in row["answers"]] == list(range(1, 11))
        assert Counter(given).most_common(1)[0][0] == row["multiple_choice_answer"]
        assert row["answer_type"] in {"yes/no", "number", "other"}


def test_mmmu_files(folder: Path) -> None:
    rows = lines(folder / "mmmu/questions.jsonl")
    for row in rows:
        (image,) = row["images"]
        assert (folder / image).is_file()
        if row["subject"] == "Object":
            assert row["options"][ord(row["answer"]) - 65] in there(folder)[int(image.split("_")[-1][:12])]
