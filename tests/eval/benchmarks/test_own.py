"""Your own questions, options and captions from a file, under the names that people use."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import revisit
from revisit import RevisitError
from revisit.embedded.scenes import render, scene
from revisit.eval.benchmarks.base import BENCHMARKS, Benchmark
from revisit.eval.compare import compare
from revisit.eval.report.sample_browser import view
from revisit.io.finder import image_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / "images" / str(number)).mkdir(parents=True)
        render(scene("unusual", 3, number)).save(tmp_path / "images" / str(number) / "x.png")
    return tmp_path


def load(folder: Path, entry: str) -> tuple[Benchmark, Any]:
    name, options = BENCHMARKS.parse(entry)
    benchmark = BENCHMARKS.get(name, **options)
    return benchmark, benchmark.load(folder)


def write(folder: Path, *rows: dict[str, Any], name: str = "q.jsonl") -> str:
    path = folder / name
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"id": 7, "image": "images/0/x.png", "question": "Is there a dog?", "label": "yes"},
        {"question_id": 7, "image": "images/0/x.png", "text": "Is there a dog?", "label": "Yes."},
        {"doc_id": 7, "image_path": "images/0/x.png", "prompt": "Is there a dog?", "answer": True},
        {"index": "7", "img_path": "{folder}/images/0/x.png", "query": "Is there a dog?", "target": 1},
        {
            "id": "7",
            "image": "images/0/x.png",
            "conversations": [
                {"from": "human", "value": "<image>\nIs there a dog?"},
                {"from": "gpt", "value": "Yes"},
            ],
        },
    ],
)
def test_the_names_of_other_files(folder: Path, row: dict[str, Any]) -> None:
    text = json.dumps([row, row]).replace("{folder}", str(folder))
    (folder / "q.json").write_text(text)
    _, (item, _) = load(folder, f"yesno:{folder / 'q.json'}")
    assert (item.id, item.prompt, item.meta) == ("7", "Is there a dog?", {"label": "yes"})
    assert item.images == (folder / "images/0/x.png",)


@pytest.mark.parametrize("name", ["q.csv", "q.jsonl"])
def test_yes_no_scores(folder: Path, name: str) -> None:
    labels = ["yes", "yes", "no", "no"]
    rows = [{"image": "images/1/x.png", "question": "A dog?", "label": label} for label in labels]
    benchmark, items = load(folder, f"yesno:{write(folder, *rows, name=name)},parser=vlmevalkit")
    scores = benchmark.score(items, dict(zip("1234", ["Yes.", "No.", "no", "Yes, it is."], strict=True)))
    assert scores.metrics["accuracy"] == 0.5
    assert scores.counts["TP"] == scores.counts["FP"] == scores.counts["TN"] == scores.counts["FN"] == 1


def test_choices(folder: Path) -> None:
    common = {"image": "images/2/x.png", "question": "What is it?"}
    path = write(
        folder,
        {**common, "options": ["cat", "dog"], "label": "B"},
        {**common, "choices": "['cat', 'dog']", "answer": "dog"},
        {**common, "A": "cat", "B": "dog", "answer": "(b)"},
        {**common, "options": {"a": "cat", "b": "dog"}, "answer": "B."},
    )
    benchmark, items = load(folder, f"choice:{path}")
    assert all(item.meta == {"label": "B", "options": {"A": "cat", "B": "dog"}} for item in items)
    assert items[0].prompt.startswith("What is it?\n(A) cat\n(B) dog\n")
    scores = benchmark.score(items, {"1": "B", "2": "(B) dog", "3": "A", "4": "I cannot tell."})
    assert (scores.metrics["accuracy"], scores.counts["unread"]) == (0.5, 1)


def test_captions(folder: Path) -> None:
    path = write(
        folder,
        {"id": "a", "image": "images/0/x.png", "label": ["dog", "puppy", "lamp"]},
        {"id": "b", "image": "images/1/x.png", "objects": "dog; cat"},
        {"id": "c", "image": "images/2/x.png", "captions": ["The image shows a dog.", "The image shows a cat."]},
        {"id": "d", "image": "images/2/x.png", "caption": "The image shows a dog."},
    )
    benchmark, items = load(folder, f"captions:{path}")
    truths = [set(item.meta["ground_truth"]) for item in items]
    assert truths == [{"dog", "lamp"}, {"dog", "cat"}, {"dog", "cat"}, {"dog"}]
    scores = benchmark.score(items, dict.fromkeys("abcd", "The image shows a dog and a cat."))
    assert scores.metrics["CHAIRs"] == 0.5
    assert scores.metrics["CHAIRi"] == 2 / 8


@pytest.mark.parametrize(
    ("entry", "row", "words"),
    [
        ("q.jsonl", {}, "yesno:q.jsonl"),
        ("yesno", {}, "needs a file"),
        ("yesno:{path}", {"image": "images/0/x.png", "question": "A?", "label": "maybe"}, "yes or no"),
        ("yesno:{path}", {"image": "images/0/x.png", "label": "yes"}, "no question"),
        ("yesno:{path}", {"image": "images/0/x.png", "question": "A?"}, "no label"),
        ("yesno:{path}", {"image": "x.png", "question": "A?", "label": "yes"}, "any of 3"),
        ("yesno:{path}", {"image": {"bytes": "x"}, "question": "A?", "label": "yes"}, "path of a file"),
        ("choice:{path}", {"image": "images/0/x.png", "question": "A?", "label": "C", "A": "1", "B": "2"}, "none of"),
        ("choice:{path}", {"image": "images/0/x.png", "question": "A?", "label": "C", "A": "1"}, "no options"),
    ],
)
def test_wrong_files_are_one_sentence(folder: Path, entry: str, row: dict[str, Any], words: str) -> None:
    path = write(folder, row)
    with pytest.raises(RevisitError, match=words) as error:
        revisit.evaluate(benchmark=entry.format(path=path), out=folder / "out")
    assert len(str(error.value)) < 500


def test_an_own_data_set_gets_everything(folder: Path) -> None:
    rows = [
        {"image": f"images/{n % 3}/x.png", "question": f"Is there a {noun} in the image?", "label": label}
        for n in range(10)
        for noun, label in ((scene("unusual", 3, n % 3).nouns[0], "yes"), (("zebra", "toilet")[n % 2], "no"))
    ]
    path = write(folder, *rows, name="mine.csv")
    logs = revisit.evaluate(
        benchmark=f"yesno:{path}", method="greedy,revisit", controls=True, max_new_tokens=4, out=folder / "out"
    )
    assert {log.spec.method.control for log in logs} == {"", "no image", "noise image", "other image"}
    assert all(len(log.answers) == 20 and log.scores is not None for log in logs)
    assert next(iter(compare(logs))).metrics[0].name == "accuracy"
    page = view(logs, folder / "out" / "view")
    assert "Is there a" in page.read_text()
    assert len(image_files(folder / "out" / "view" / "images")) == 3
