"""Hand-made files in the published formats of word labels, and scores computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from revisit import RevisitError
from revisit.embedded.samples import names, sample
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


def kinds(text: LabeledText) -> dict[str, str]:
    return {text.text[span.start : span.end]: span.kind for span in text.wrong}


def test_detail_verify_bench_real(tmp_path: Path) -> None:
    tagged = "A [red] dog and a [red] U.S. [flag-pole].".replace("[", "<Hallucination>").replace(
        "]", "</Hallucination>"
    )
    labels = [{"text": "red", "labels": ["Color"]}, {"text": "Red.", "labels": ["Material", "Color"]}]
    row = {"filename": "a_1.png", "category": "Movie", "description_tag": tagged, "hallucination_labels": labels}
    plain = {"filename": "b.png", "description_tag": "Nothing is wrong.", "hallucination_labels": []}
    first, second = read_detail_verify(lines(tmp_path / "real_test.jsonl", row, plain))
    assert (first.image, first.text) == ("a_1.png", "A red dog and a red U.S. flag-pole.")
    assert first.wrong == (Span(2, 5, "color"), Span(16, 19, "material"), Span(25, 34, "unknown"))
    assert [kind for _, _, kind in first.words()] == [None, "color", *[None] * 3, "material", None, "unknown"]
    assert [first.text[a:b] for a, b, _ in first.words()][-2:] == ["U.S", "flag-pole"]
    assert second.wrong == ()


def test_detail_verify_bench_synthetic(tmp_path: Path) -> None:
    row = {
        "id": 7,
        "image_path": "test/Poster/c.png",
        "description_tag": "Two <HALLUCINATION>green cups</HALLUCINATION> stand here.",
        "hallucination_labels": [
            {"attribute_type": "Number", "final_replacement": "Two", "applied": False},
            {"attribute_type": "Color", "final_replacement": "green cups", "applied": True},
        ],
    }
    (text,) = read_detail_verify(lines(tmp_path / "synthetic_test.jsonl", row))
    assert (text.image, kinds(text)) == ("test/Poster/c.png", {"green cups": "color"})


@pytest.mark.parametrize(
    "tagged", ["a <Hallucination>cat", "a cat</Hallucination>", "<Hallucination>a <Hallucination>b</Hallucination>"]
)
def test_tags_must_match(tagged: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", {"filename": "a.png", "description_tag": tagged})
    with pytest.raises(RevisitError, match="line 1"):
        read_detail_verify(path)


@pytest.mark.parametrize(
    "annotations",
    [
        [{"type": "Object", "text": "cat"}, {"type": "scene", "text": "rain"}, {"type": "object", "text": "cat"}],
        [
            {"type": "object", "start": 2, "end": 5},
            {"type": "scene", "start": 12, "end": 16},
            {"type": "object", "start": 25, "end": 28},
        ],
        {"object": ["cat", "cat"], "scene": ["rain"]},
    ],
)
def test_halloc(annotations: Any, tmp_path: Path) -> None:
    text = "a cat in a, rain and one cat"
    row = {"prompt": "?", "hallucinated_text": text, "source_text": "a dog", "annotations": annotations, "image_id": 23}
    path = tmp_path / "halloc_caption.json"
    path.write_text(json.dumps([row]), "utf-8")
    (found,) = read_halloc(path)
    assert found.image == "23"
    assert sorted((span.start, span.kind) for span in found.wrong) == [(2, "object"), (12, "scene"), (25, "object")]


def test_halloc_annotations_must_be_in_the_text(tmp_path: Path) -> None:
    path = tmp_path / "halloc_vqa.json"
    path.write_text(json.dumps([{"hallucinated_text": "a cat", "annotations": {"object": ["dog"]}, "image_id": 1}]))
    with pytest.raises(RevisitError, match="entry 1, annotation 1"):
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
    assert (thing["words"], thing["wrong"]) == (9, 3)
    assert thing["auroc"] == pytest.approx((3 + 4 + 4) / 15)
    assert thing["recall"] == pytest.approx(2 / 3)
    assert found["kinds"]["attribute"]["auroc"] == 1


def test_detectors_on_labeled_words(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    tagged = "A <Hallucination>{}</Hallucination> and a {}."
    rows = []
    for number, name in enumerate(names()):
        sample(name).image().save(tmp_path / f"images/{number}.png")
        wrong, right = "zebra", sample(name).nouns[0]
        label = [{"text": wrong, "labels": ["Object"]}]
        rows.append(
            {"filename": f"{number}.png", "description_tag": tagged.format(wrong, right), "hallucination_labels": label}
        )
    path = lines(tmp_path / "real_test.jsonl", *rows)
    result = run(Subject(data=str(tmp_path)), Reporter(), labels=path)
    assert result["texts"] == 2
    by_name = {row["name"]: row for row in result["rows"]}
    assert list(by_name) == list(DETECTORS)
    assert (by_name[CHECK]["words"], by_name[CHECK]["wrong"], by_name[CHECK]["scored"]) == (10, 2, 10)
    assert set(by_name[CHECK]["kinds"]) == {"object"}
    assert "by kind of mistake" in str(draw(result))
    path.write_text('{"caption": "a cat"}')
    with pytest.raises(RevisitError, match="neither DetailVerifyBench nor HalLoc"):
        labeled_items(path, tmp_path)
