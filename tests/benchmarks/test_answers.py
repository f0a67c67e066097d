"""Answer files in every layout that is in use, and what is said about broken ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from revisit.benchmarks.io.answers import aligned, by_id, read_answers
from revisit.errors import RevisitError


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "field", "key", "text"),
    [
        ({"id": "coco_random/1", "text": "Yes", "tokens": [1]}, "id", "coco_random/1", "Yes"),
        ({"image_id": 7, "caption": "A dog."}, "image_id", "7", "A dog."),
        ({"question_id": 3, "prompt": "Is it?", "text": "No", "model_id": "m"}, "question_id", "3", "No"),
        ({"question_id": 3, "answer": "two"}, "question_id", "3", "two"),
        ({"question_id": 3, "text": "Is it?", "label": "yes", "answer": "No"}, "question_id", "3", "No"),
        ({"index": 4, "answer": "Yes", "prediction": "No."}, "index", "4", "No."),
        ({"id": "validation_Art_1", "answer": "C", "response": "(B)"}, "id", "validation_Art_1", "(B)"),
        (
            {"doc_id": 0, "doc": {"question_id": "9", "answer": "no"}, "filtered_resps": ["Yes"]},
            "question_id",
            "9",
            "Yes",
        ),
        ({"doc_id": 0, "doc": {"question_id": "9"}, "resps": [["No"]]}, "question_id", "9", "No"),
        (
            {"question_id": 1, "category": "conv", "tuple": [8, 7], "content": "8 7\nGood."},
            "question_id",
            "1",
            "8 7\nGood.",
        ),
    ],
)
def test_layouts(tmp_path: Path, row, field, key, text):
    for path in (_write(tmp_path / "a.jsonl", [row]), tmp_path / "a.json", tmp_path / "b.json.gz"):
        if path.name == "a.json":
            path.write_text(json.dumps([row], indent=1))
        elif path.suffix == ".gz":
            path.write_bytes(gzip.compress(json.dumps([row]).encode()))
        (answer,) = read_answers(path)
        assert (answer.key([field]), answer.text) == (key, text)


def test_maps_tables_and_folders(tmp_path: Path):
    (tmp_path / "map.json").write_text(json.dumps({"validation_Art_1": "A", "validation_Art_2": ["B"]}, indent=2))
    assert [(a.key(["id"]), a.text) for a in read_answers(tmp_path / "map.json")] == [
        ("validation_Art_1", "A"),
        ("validation_Art_2", "B"),
    ]
    (tmp_path / "kit.tsv").write_text('index\tprediction\tanswer\n1\t"Yes, ""it"" is\nred"\tYes\n')
    assert [(a.key(["index"]), a.text) for a in read_answers(tmp_path / "kit.tsv")] == [("1", 'Yes, "it" is\nred')]
    for subject in ("Art", "Math"):
        (tmp_path / "out" / subject).mkdir(parents=True)
        _write(tmp_path / "out" / subject / "output.json", [{"id": f"validation_{subject}_1", "response": "A"}])
    assert [a.key(["id"]) for a in read_answers(tmp_path / "out")] == ["validation_Art_1", "validation_Math_1"]
    cell = tmp_path / "cell"
    cell.mkdir()
    _write(cell / "answers.jsonl", [{"id": "1", "text": "a\u2028b"}])
    assert [a.text for a in read_answers(cell)] == ["a\u2028b"]
    (tmp_path / "existence.txt").write_text("1.jpg\tIs it?\tYes\tyes\n")
    (answer,) = read_answers(tmp_path / "existence.txt")
    assert (answer.text, answer.record["category"], answer.record["label"]) == ("yes", "existence", "Yes")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": "1", "text": "x"}\n{"id": "2", "te', r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", '{"id": "1", "text": "x"}\n[1]', r"a\.jsonl line 2 is a list, not an object"),
        ("a.jsonl", '{"id": "1", "text": "x"}\n\n{"id": "2"}', r"a\.jsonl line 3 holds no answer"),
        ("a.jsonl", '{"id": "1", "caption": 5}\n', r"line 1: 'caption' must be text, not int"),
        ("a.json", '[{"id": 1,\n "text": }]', r"a\.json line 2 is not valid JSON"),
        ("a.json", '{"x": {"y": 1}}', r"entry 'x' must be text"),
        ("a.jsonl", "", "holds no answers"),
        ("a.xlsx", "PK", r"\.xlsx file, which is not read here"),
        ("a.tsv", "index\tprediction\n1\tYes\tmore\n", r"a\.tsv line 2 has 3 columns; the header has 2"),
        ("a.txt", "1.jpg\tIs it?\n", r"a\.txt line 1 has 2 tab-separated columns"),
    ],
)
def test_broken_files_are_named_by_line(tmp_path: Path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(RevisitError, match=message):
        read_answers(tmp_path / name)


def test_bytes_that_are_no_text(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": "1", "text": "\xff"}')
    with pytest.raises(RevisitError, match="not UTF-8"):
        read_answers(tmp_path / "a.jsonl")
    with pytest.raises(RevisitError, match="does not exist"):
        read_answers(tmp_path / "b.jsonl")


def test_alignment(tmp_path: Path):
    keyed = read_answers(_write(tmp_path / "a.jsonl", [{"id": "2", "text": "b"}, {"id": "1", "text": "a"}]))
    assert {k: a.text for k, a in aligned(["1", "2"], keyed, ["id"]).items()} == {"2": "b", "1": "a"}
    ordered = read_answers(
        _write(tmp_path / "b.jsonl", [{"question": "?", "answer": "b"}, {"question": "?", "answer": "a"}])
    )
    assert {k: a.text for k, a in aligned(["1", "2"], ordered, ["id"]).items()} == {"1": "b", "2": "a"}
    with pytest.raises(RevisitError, match="order must be that of the 3 items, but there are 2"):
        aligned(["1", "2", "3"], ordered, ["id"])
    with pytest.raises(RevisitError, match=r"a\.jsonl line 1 answers '2' a second time"):
        by_id([*keyed, keyed[0]], ["id"])
    with pytest.raises(RevisitError, match="has none of 'id'"):
        by_id(ordered, ["id"])
