"""Answer files: their layouts, errors for broken ones, and how rows are matched to items."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from revisit.cli.score import attach
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.io.records import AnswerRow, read_answers


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "key", "text"),
    [
        ({"id": "coco_random/1", "text": "Yes", "tokens": [1]}, "coco_random/1", "Yes"),
        ({"image_id": 7, "caption": "A dog."}, "7", "A dog."),
        ({"question_id": 3, "prompt": "Is it?", "text": "No", "model_id": "m"}, "3", "No"),
        ({"index": 4, "answer": "Yes", "prediction": "No."}, "4", "No."),
        ({"id": "validation_Art_1", "answer": "C", "response": "(B)"}, "validation_Art_1", "(B)"),
    ],
)
def test_layouts(tmp_path: Path, row, key, text):
    for path in (_write(tmp_path / "a.jsonl", [row]), tmp_path / "a.json", tmp_path / "b.json.gz"):
        if path.name == "a.json":
            path.write_text(json.dumps([row], indent=1))
        elif path.suffix == ".gz":
            path.write_bytes(gzip.compress(json.dumps([row]).encode()))
        (answer,) = read_answers(path)
        assert (answer.key(), answer.text) == (key, text)


def test_maps_tables_and_logs(tmp_path: Path):
    (tmp_path / "map.json").write_text(json.dumps({"validation_Art_1": "A", "validation_Art_2": 2}, indent=2))
    assert [(a.key(), a.text) for a in read_answers(tmp_path / "map.json")] == [
        ("validation_Art_1", "A"),
        ("validation_Art_2", "2"),
    ]
    (tmp_path / "kit.tsv").write_text('index\tprediction\tanswer\n1\t"Yes, ""it"" is\nred"\tYes\n')
    assert [(a.key(), a.text) for a in read_answers(tmp_path / "kit.tsv")] == [("1", 'Yes, "it" is\nred')]
    with pytest.raises(RevisitError, match="Is a directory"):
        read_answers(tmp_path)
    _write(tmp_path / "log.jsonl", [{"spec": {}, "request": {}}, {"id": "1", "text": "a\u2028b"}])
    assert [a.text for a in read_answers(tmp_path / "log.jsonl")] == ["a\u2028b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"id": "1", "text": "x"}\n{"id": "2", "te', r"a\.jsonl line 2 is not valid JSON"),
        ("a.jsonl", '{"id": "1", "text": "x"}\n[1]', r"a\.jsonl line 2 is a list, not an object"),
        ("a.jsonl", '{"id": "1", "text": "x"}\n\n{"id": "2"}', r"a\.jsonl line 3 has no answer among its fields id"),
        ("a.jsonl", '{"id": "1", "caption": [5]}\n', r"line 1: 'caption' must be text, not list"),
        ("a.jsonl", '{"id": 1, "text": "x", "prediction": "y"}', r"several texts \(text, prediction\).* --field"),
        ("a.json", '[{"id": 1,\n "text": }]', r"a\.json line 2 is not valid JSON"),
        ("a.json", '{"x": {"y": 1}}', r"entry 'x': 'text' must be text"),
        ("a.jsonl", "", "contains no answers"),
        ("a.tsv", "index\tprediction\n1\tYes\tmore\n", r"a\.tsv line 2 has 3 columns; the header has 2"),
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


def test_rows_find_their_items(tmp_path: Path):
    items = [Item("coco_random/1", "Is there a dog?"), Item("coco_random/2", "Is there a cat?")]

    def attached(*rows: dict[str, Any], field: str | None = None) -> dict[str, str]:
        return attach(read_answers(_write(tmp_path / "a.jsonl", list(rows)), field), items, AnswerRow.key)

    want = {"coco_random/1": "a", "coco_random/2": "b"}
    assert attached({"id": "coco_random/2", "text": "b"}, {"id": "coco_random/1", "text": "a"}) == want
    assert attached({"question_id": 2, "text": "b"}, {"question_id": 1, "text": "a"}) == want
    assert attached({"answer": "a"}, {"answer": "b"}, field="answer") == want  # the order of the questions
    with pytest.raises(RevisitError, match="in the order of the 2 items, but there are 1"):
        attached({"text": "a"})
    with pytest.raises(RevisitError, match=r"line 2 answers 'coco_random/1' a second time \(first at .* line 1\)"):
        attached({"id": 1, "text": "a"}, {"id": 1, "text": "b"})
    with pytest.raises(RevisitError, match="line 2 has none of 'id'"):
        attached({"id": 1, "text": "a"}, {"text": "b"})
