"""Hand-made files in the published formats of word labels, and scores computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from revisit import RevisitError
from revisit.embedded.samples import SAMPLES, sample
from revisit.eval.run import Reporter
from revisit.paper.study import Subject
from studies.detectors import CHECK, DETECTORS
from studies.word_labels import (
    LabeledText,
    Span,
    draw,
    labeled_items,
    read_detail_verify,
    read_halloc,
    run,
    score_words,
)


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def tagged(text: str) -> str:
    return text.replace("[", "<Hallucination>").replace("]", "</Hallucination>")


def test_detail_verify_bench(tmp_path: Path) -> None:
    labels = [{"text": "red", "labels": ["Color"]}, {"text": "Red.", "labels": ["Material", "Color"]}]
    real = {"filename": "a_1.png", "description_tag": tagged("A [red] dog and a [red] U.S. [flag-pole].")}
    synthetic = {
        "image_path": "test/Poster/c.png",
        "description_tag": "Two <HALLUCINATION>green cups</HALLUCINATION> stand here.",
        "hallucination_labels": [
            {"attribute_type": "Number", "final_replacement": "Two", "applied": False},
            {"attribute_type": "Color", "final_replacement": "green cups", "applied": True},
        ],
    }
    rows = ({**real, "hallucination_labels": labels}, synthetic)
    first, second = read_detail_verify(lines(tmp_path / "real_test.jsonl", *rows))
    assert (first.image, first.text) == ("a_1.png", "A red dog and a red U.S. flag-pole.")
    assert first.wrong == (Span(2, 5, "color"), Span(16, 19, "material"), Span(25, 34, "unknown"))
    assert [kind for _, _, kind in first.words()] == [None, "color", *[None] * 3, "material", None, "unknown"]
    assert [first.text[a:b] for a, b, _ in first.words()][-2:] == ["U.S", "flag-pole"]
    assert (second.image, second.wrong) == ("test/Poster/c.png", (Span(4, 14, "color"),))


@pytest.mark.parametrize("text", ["a [cat", "a cat]", "[a [b]"])
def test_tags_must_match(text: str, tmp_path: Path) -> None:
    with pytest.raises(RevisitError, match="line 1"):
        read_detail_verify(lines(tmp_path / "x.jsonl", {"filename": "a.png", "description_tag": tagged(text)}))


@pytest.mark.parametrize(
    "annotations",
    [
        [{"type": "Object", "text": "cat"}, {"type": "scene", "text": "rain"}, {"type": "object", "text": "cat"}],
        [{"type": k, "start": a, "end": b} for k, a, b in (("object", 2, 5), ("scene", 12, 16), ("object", 25, 28))],
        {"object": ["cat", "cat"], "scene": ["rain"]},
    ],
)
def test_halloc(annotations: Any, tmp_path: Path) -> None:
    row = {"hallucinated_text": "a cat in a, rain and one cat", "annotations": annotations, "image_id": 23}
    path = lines(tmp_path / "halloc_caption.json", row)
    (found,) = read_halloc(path)
    assert found.image == "23"
    assert sorted((span.start, span.kind) for span in found.wrong) == [(2, "object"), (12, "scene"), (25, "object")]
    lines(path, {**row, "annotations": {"object": ["dog"]}})
    with pytest.raises(RevisitError, match="annotation 1"):
        read_halloc(path)


def test_scores_by_hand() -> None:
    texts = [
        LabeledText("1", "a red dog runs", (Span(2, 5, "attribute"), Span(6, 9, "object"))),
        LabeledText("2", "the hot dog here", (Span(4, 11, "object"),)),
        LabeledText("3", "all right", ()),
    ]
    scores = [
        [(2, 5, 0.1), (6, 9, 0.6), (10, 14, 0.4)],  # "a" has no score
        [(0, 3, 0.9), (4, 11, 0.2), (12, 16, 0.15)],  # one unit of two words
        [(0, 3, 0.8), (4, 9, 0.7)],
    ]
    found = score_words(texts, scores, threshold=0.3)
    # wrong: 0.1 (attribute), 0.6, 0.2, 0.2; right: 0.4, 0.9, 0.15, 0.8, 0.7 and one without a score
    assert (found["texts"], found["words"], found["wrong"], found["scored"]) == (3, 10, 4, 9)
    assert found["auroc"] == pytest.approx((5 + 3 + 4 + 4) / 20)
    assert found["average_precision"] == pytest.approx((1 / 1 + 2 / 3 + 3 / 4 + 4 / 6) / 4)
    assert found["f1"] == pytest.approx(2 * 3 / (4 + 4))  # flagged: 0.1, 0.2, 0.2 and the right 0.15
    assert found["recall"] == pytest.approx(3 / 4)
    assert found["text_f1"] == pytest.approx((2 * 1 / (1 + 2) + 2 * 2 / (3 + 2) + 0) / 3)
    thing = found["kinds"]["object"]
    assert (thing["words"], thing["wrong"], thing["recall"]) == (9, 3, pytest.approx(2 / 3))
    assert thing["auroc"] == pytest.approx((3 + 4 + 4) / 15)


def test_detectors_on_labeled_words(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    rows = []
    for name in SAMPLES:
        sample(name).image().save(tmp_path / f"images/{name}.png")
        text = tagged(f"A [zebra] and a {sample(name).nouns[0]}.")
        rows.append({"filename": f"{name}.png", "description_tag": text})
    path = lines(tmp_path / "real_test.jsonl", *rows)
    result = run(Subject(data=str(tmp_path)), Reporter(), labels=path)
    assert result["texts"] == 2
    by_name = {row["name"]: row for row in result["rows"]}
    assert list(by_name) == list(DETECTORS)
    assert (by_name[CHECK]["words"], by_name[CHECK]["wrong"], by_name[CHECK]["scored"]) == (10, 2, 10)
    assert "by kind of mistake" in str(draw(result))
    path.write_text('{"caption": "a cat"}')
    with pytest.raises(RevisitError, match="neither DetailVerifyBench nor HalLoc"):
        labeled_items(path, tmp_path)
