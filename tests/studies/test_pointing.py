"""The pointing study: the criteria for patches on an object, and the counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from revisit import RevisitError
from revisit.decoding.trace import RowTrace, StepRecord
from revisit.models.geometry import ImageGrid, Layout
from revisit.paper.objects import ObjectVocabulary
from studies.pointing import Count, criteria, object_steps, read_boxes

SPANS = ((0.0, 10.0), (10.0, 20.0))
LAYOUT = Layout(((20, 20),), 4, (ImageGrid(SPANS, SPANS),))  # four patches of 10 × 10 pixels


def test_a_patch_touches_a_box_or_has_its_middle_inside() -> None:
    touches, inside = criteria(LAYOUT, [(8.0, 8.0, 16.0, 9.0)]).T.tolist()  # in the upper half, across both patches
    assert touches == [True, True, False, False]
    assert inside == [False, False, False, False]
    assert criteria(LAYOUT, [(0.0, 4.0, 20.0, 6.0)])[:, 1].tolist() == [True, True, False, False]
    touches, inside = criteria(LAYOUT, [(10.0, 10.0, 20.0, 20.0)]).T.tolist()
    assert touches == inside == [False, False, False, True]  # a box that only shares an edge does not touch
    layout = Layout(((20, 20),), 5, LAYOUT.grids)  # the last token has no place
    assert criteria(layout, [(0.0, 0.0, 20.0, 20.0)])[:, 0].tolist() == [True, True, True, True, False]


def test_shares_and_chance_over_all_steps() -> None:
    count = Count()
    half = np.array([[True, True], [True, False], [False, False], [False, False]])
    count.add("a", 0, half)
    count.add("a", 1, half)
    count.add("b", 3, half)
    row = count.row(setting="s")
    assert (row["setting"], row["images"], row["steps"]) == ("s", 2, 3)
    assert row["touches"]["share"] == pytest.approx(2 / 3)
    assert row["inside"]["share"] == pytest.approx(1 / 3)
    assert row["touches_chance"]["share"] == pytest.approx(0.5)
    assert row["inside_chance"]["share"] == pytest.approx(0.25)
    assert row["touches"]["low"] == 0.0  # a resample of image b alone
    assert row["touches"]["high"] == 1.0
    assert Count().row()["touches"] == {"share": None, "low": None, "high": None}


def test_steps_that_name_a_boxed_object() -> None:
    vocabulary = ObjectVocabulary(("dog", "puppy", "cat"), (5, 6, 7))

    def step(token: int, index: int | None) -> StepRecord:
        table = torch.tensor([[0.3, 0.1, float("nan")], [0.0, 0.5, 0.2]])
        return StepRecord(
            0, token, [token], [1.0], [1.0], [1.0], 2, 1, index, 0.0, table if index is not None else None
        )

    row = RowTrace(records=[step(6, 2), step(7, 0), step(9, 0), step(5, None)])
    assert list(object_steps(row, vocabulary, {"dog"})) == [("dog", 2, [1, 0])]  # a puppy is a dog; no cat is boxed


def test_boxes_are_read_by_category(tmp_path: Path) -> None:
    instances = {
        "images": [{"id": 3, "file_name": "3.png"}],
        "categories": [{"id": 1, "name": "dog"}],
        "annotations": [{"image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4]}],
    }
    (tmp_path / "instances_val2014.json").write_text(json.dumps(instances))
    assert read_boxes(tmp_path) == {"3": {"dog": [(1.0, 2.0, 4.0, 6.0)]}}
    (tmp_path / "instances_val2014.json").write_text("[]")
    with pytest.raises(RevisitError, match="not a file of COCO instances"):
        read_boxes(tmp_path)
