"""Answer files with random contents give a result or raise one sentence."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import damage
import pytest
from corpus import recall, remember
from typer.testing import CliRunner

from chat_requests import TEXTS, places, value
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import language

YES_NO = [
    {"question_id": n, "image": "a.jpg", "text": "A dog?", "label": label} for n, label in ((1, "yes"), (2, "no"))
]
ART = {"id": "validation_Art_1", "question": "?", "images": [], "question_type": "multiple-choice", "answer": "A"}
PAIR = {"category": "VD", "subcategory": "math", "set_id": "0", "figure_id": "0", "question_id": "0"}
PAIR |= {"visual_input": "1", "gt_answer": "1", "question": "Is it?"}
VQA = {"questions": [{"question_id": 1, "image_id": 1, "question": "What?"}]}
OWN = [{"id": n, "image": "a.jpg", "question": "Is it?", "label": "yes", "options": ["yes", "no"]} for n in (1, 2)]
WILD = {"question_id": 1, "image": "1.jpg", "text": "What?", "category": "conv"}
# (benchmark, answers, a file of the data folder, what it holds): what each scorer reads, small
LAYOUTS: list[tuple[str, Any, str, Any]] = [
    ("pope", [{"question_id": n, "text": "No."} for n in (1, 2)], "pope/coco_pope_random.json", YES_NO),
    ("repope", [{"question_id": n, "text": "No."} for n in (1, 2)], "repope/coco_repope_random.json", YES_NO),
    ("vqav2", [{"question_id": 1, "text": "a"}], "vqav2/v2_mscoco_val2014_annotations.json", [{"question_id": 1, "answers": ["a"] * 10}]),
    ("vqav2", [{"question_id": 1, "text": "a"}], "vqav2/v2_OpenEnded_mscoco_val2014_questions.json", VQA),
    ("mmmu", {"validation_Art_1": "A"}, "mmmu/questions.jsonl", [{**ART, "options": ["x", "y"]}]),
    ("chair", [{"image_id": 1, "caption": "A dog and a cat."}], "chair/ground_truth.json", {"1": ["dog"]}),
    ("hallusionbench", [{**PAIR, "model_prediction": "Yes"}], "hallusionbench/HallusionBench.json", [PAIR]),
    ("llava_bench", [{"question_id": 1, "text": "8 4"}], "llava_bench/questions.jsonl", [WILD]),
    ("yesno", [{"id": n, "text": "No."} for n in (1, 2)], "own.json", OWN),
    ("choice", [{"id": n, "text": "B"} for n in (1, 2)], "own.json", OWN),
    ("captions", [{"id": n, "text": "A dog."} for n in (1, 2)], "own.json", OWN),
    ("amber", [{"id": 1005, "response": "Yes"}], "amber/data/annotations.json", [{"id": 1005, "type": "discriminative", "truth": "no"}]),
]  # fmt: skip
# The other files of those folders.
AROUND = {
    "a.jpg": None,
    "vqav2/v2_mscoco_val2014_annotations.json": [{"question_id": 1, "answers": ["a"] * 10}],
    "vqav2/v2_OpenEnded_mscoco_val2014_questions.json": VQA,
    "llava_bench/context.jsonl": [{"image": "1.jpg", "caption": "A sea."}],
    "llava_bench/answers_gpt4.jsonl": [{"question_id": 1, "text": "The sea."}],
    "amber/data/relation.json": {},
    "amber/data/safe_words.txt": "",
    "amber/data/query/query_all.json": [{"id": 1005, "image": "1.jpg", "query": "Is it?"}],
}


def changed(given: Any, dice: random.Random) -> Any:
    """Return a value with random changes in one to three places, or another value."""
    if dice.random() < 0.05:
        return value(dice)
    holder = {"": copy.deepcopy(given)}
    for _ in range(dice.randrange(1, 4)):
        node, key = dice.choice(list(places(holder)))
        action = dice.randrange(5)
        if action == 0 and key != "":
            del node[key]
        elif action == 1 and isinstance(node, dict) and key != "":
            node[dice.choice((*TEXTS, "id", "name"))] = value(dice)
        elif action == 2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[key] = value(dice)
    return holder[""]


def in_file(given: Any, path: Path, dice: random.Random) -> bytes:
    """Return a value as the bytes of a JSON file, sometimes as lines of JSON, sometimes damaged."""
    path.unlink(missing_ok=True)
    if isinstance(given, list) and dice.random() < 0.4:
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
    else:
        path.write_text(json.dumps(given))
    if path.stat().st_size and dice.random() < 0.3:
        dice.choice((damage.changed_byte, damage.cut, damage.zeros, damage.random_bytes, damage.nested))(path, dice)
    return path.read_bytes()


def outcome(work: Any) -> str:
    """Return "done", "rejected", or the error that should not occur."""
    try:
        work()
    except RevisitError as error:
        message = str(error)
        return "rejected" if "\n" not in message and len(message) < 1500 else f"no sentence: {message[:200]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def score(benchmark: str, folder: Path, answers: bytes, file: str, truth: bytes) -> None:
    """Run `revisit score` on these files."""
    for name, content in {**AROUND, file: None}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(truth if content is None else json.dumps(content).encode())
    (folder / "answers.json").write_bytes(answers)
    own = ["--set", f"file={folder / file}"] if file == "own.json" else []
    command = ["score", benchmark, str(folder / "answers.json"), "--data", str(folder), "--json", *own]
    result = CliRunner().invoke(app, command)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    json.loads(result.stdout)


def score_all(folder: Path, count: int, seed: int) -> Counter[str]:
    """Count the outcomes of the corpus and of new random answer files."""
    cases = [json.loads(case) for case in recall("score")]
    for benchmark, answers, file, truth in LAYOUTS:  # unchanged
        cases.append([benchmark, json.dumps(answers), file, json.dumps(truth)])
    for number in range(count):
        dice = random.Random(seed * 1_000_000 + number)
        benchmark, answers, file, truth = dice.choice(LAYOUTS)
        which = dice.random()
        if which < 0.7:
            answers = changed(answers, dice)
        if which > 0.5:
            truth = changed(truth, dice)
        files = [in_file(given, folder / "made", dice).decode("latin-1") for given in (answers, truth)]
        cases.append([benchmark, files[0], file, files[1]])
    found: Counter[str] = Counter()
    for case in cases:
        benchmark, answers, file, truth = case
        files = [text.encode("latin-1") for text in (answers, truth)]
        end = outcome(lambda: score(benchmark, folder, files[0], file, files[1]))  # noqa: B023
        found[end] += 1
        if end not in ("done", "rejected"):
            remember("score", json.dumps(case).encode())
    return found


@pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.faults)])
def test_random_answer_files_are_scored_or_rejected(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "missing_packages", list)  # NLTK's tagger and lemmatizer need data
    monkeypatch.setattr(language, "version", lambda: "No tagger.")
    monkeypatch.setattr(language, "tagged", lambda text: [(word, "NN") for word in text.split()])
    monkeypatch.setattr(language, "lemma", lambda word, pos: word)
    outcomes = score_all(tmp_path, count, seed=count)
    print(f"\n{dict(outcomes)}")
    assert set(outcomes) == {"done", "rejected"}, outcomes
