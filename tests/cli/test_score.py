"""`revisit score` from the command line, on the layouts of the official answer files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from golden_files import golden
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import pope, yes_no

pytestmark = pytest.mark.usefixtures("nltk_data")


def run(*arguments: Any) -> str:
    """Return the standard output of the command, or raise its RevisitError."""
    result = CliRunner().invoke(app, ["score", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def numbers(*arguments: Any) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


def written(path: Path, value: Any) -> Path:
    """Write JSON, or its lines into a .jsonl file; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(map(json.dumps, value)) if path.suffix == ".jsonl" else json.dumps(value)
    path.write_text(value if isinstance(value, str) else text)
    return path


def pope_folder(root: Path, setting: str, count: int = 60) -> list[dict[str, Any]]:
    rows = [
        {"question_id": n, "image": "a.jpg", "text": f"Is there a thing {n}?", "label": "no" if n % 3 else "yes"}
        for n in range(1, count + 1)
    ]
    written(root / f"pope/{setting}.json", json.dumps(rows, indent=1))  # a pretty-printed array, as published
    return rows


def test_chair(tmp_path: Path):
    written(tmp_path / "chair/ground_truth.json", {"1": ["dog"], "2": []})
    rows = [
        {"image_id": 1, "caption": "A dog and a cat."},
        {"image": "COCO_val2014_000000000002.jpg", "caption": "Hi."},
    ]
    captions = written(tmp_path / "c.jsonl", rows)
    result = numbers("chair", captions, "--data", tmp_path)
    assert result["metrics"]["CHAIRi"] == result["metrics"]["CHAIRs"] == 0.5
    assert "CHAIRi" in run("chair", captions, "--data", tmp_path)
    (tmp_path / "ids.txt").write_text("2\n")
    chosen = ("--data", tmp_path, "--set", f"ids={tmp_path / 'ids.txt'}")
    with pytest.raises(RevisitError, match="1 answers match no item"):
        run("chair", captions, *chosen)
    result = numbers("chair", captions, *chosen, "--subset")
    assert (result["items"], result["metrics"]["CHAIRs"]) == (1, 0.0)
    assert result["notes"][0] == "Scored the 1 answered of 1 items. 1 answers match no item."


@pytest.mark.parametrize("parser", ["official", "vcd", "opera", "harness"])
def test_pope(tmp_path: Path, parser: str):
    rows = pope_folder(tmp_path, "aokvqa_pope_seem_popular")
    said = ["Yes", "No, there is not.", "no", "I do not know"]
    texts = [said[n % 4] for n in range(len(rows))]
    want = yes_no.score_answers(
        ((str(n), t, r["label"]) for n, (r, t) in enumerate(zip(rows, texts, strict=True))), parser
    )
    options = ("--data", tmp_path, "--set", f"parser={parser}")
    keyed = [{"question_id": r["question_id"], "text": t} for r, t in zip(rows, texts, strict=True)]
    result = numbers("pope", written(tmp_path / "a.jsonl", keyed[::-1]), *options)
    assert result["metrics"] == want.metrics
    assert result["version"] == f"pope-{parser}-1"
    ordered = [{"question": r["text"], "answer": t} for r, t in zip(rows, texts, strict=True)]
    assert numbers("pope", written(tmp_path / "b.jsonl", ordered), *options, "--field", "answer") == result
    ours = [{"id": f"aokvqa_popular/{r['question_id']}", "text": t} for r, t in zip(rows, texts, strict=True)]
    assert numbers("pope", written(tmp_path / "c.jsonl", ours), *options) == result
    pope_folder(tmp_path, "coco_pope_random")  # with two settings a question id does not say which one it belongs to
    with pytest.raises(RevisitError, match="120 of 120 items have no answer"):
        run("pope", tmp_path / "a.jsonl", *options)
    assert numbers("pope", tmp_path / "a.jsonl", *options, "--set", "settings=aokvqa_popular") == result


def test_repope_takes_answers_to_all_of_pope(tmp_path: Path):
    questions = [{"question_id": 2, "image": "x.jpg", "text": "?", "label": "no"}]
    written(tmp_path / "repope/coco_repope_random.json", questions)
    answers = written(tmp_path / "a.jsonl", [{"question_id": n, "text": "No"} for n in (1, 2, 3)])
    result = numbers("repope", answers, "--data", tmp_path, "--subset")
    assert result["metrics"]["accuracy"] == 1.0
    assert result["items"] == 1
    assert result["metrics"]["precision"] is None  # undefined, and so not a number


def vqa_folder(root: Path, answers: list[Any]) -> None:
    asked = [{"question_id": n, "image_id": n, "question": f"What is {n}?"} for n in range(len(answers))]
    notes = [{"question_id": n, "answers": given} for n, given in enumerate(answers)]
    written(root / "vqav2/v2_OpenEnded_mscoco_val2014_questions.json", {"questions": asked})
    written(root / "vqav2/v2_mscoco_val2014_annotations.json", {"annotations": notes})


def test_vqav2_must_be_complete(tmp_path: Path):
    cases = golden("vqav2")["cases"]
    vqa_folder(tmp_path, [[{"answer": a} for a in case["answers"]] for case in cases])
    answers = [{"question_id": n, "answer": case["prediction"]} for n, case in enumerate(cases)]
    options = ("--data", tmp_path, "--field", "answer")
    result = numbers("vqav2", written(tmp_path / "r.json", answers), *options)
    assert result["items"] == len(cases)
    assert result["metrics"]["accuracy"] == pytest.approx(100 * sum(c["official_acc"] for c in cases) / len(cases))
    some = written(tmp_path / "some.json", answers[:10])
    with pytest.raises(RevisitError, match=f"{len(cases) - 10} of {len(cases)} items have no answer"):
        run("vqav2", some, *options)
    part = numbers("vqav2", some, *options, "--subset")
    assert part["items"] == 10
    assert part["notes"] == [f"Scored the 10 answered of {len(cases)} items."]


def test_hallusionbench_by_rule_and_by_label(tmp_path: Path):
    found = golden("hallusionbench")
    fields = ("category", "subcategory", "set_id", "figure_id", "question_id", "visual_input", "gt_answer")
    rows = [dict(zip(fields, row, strict=True)) | {"question": "Is it so?"} for row in found["rows"]]
    written(tmp_path / "hallusionbench/HallusionBench.json", rows)
    labels, want = found["sets"][1]["labels"], found["sets"][1]["official"]["all"]
    pairs = list(zip(rows, labels, strict=True))
    entries = [r | {"model_prediction": "x", "gpt4v_output_gpt_check": label} for r, label in pairs]
    judged = written(tmp_path / "judged.json", entries)
    given = written(tmp_path / "labels.json", {"_".join([r[k] for k in fields[:5]]): label for r, label in pairs})
    by_label = ("--data", tmp_path, "--set", "judge=reviews")
    for result in (
        numbers("hallusionbench", judged, *by_label, "--field", "gpt4v_output_gpt_check"),
        numbers("hallusionbench", given, *by_label),
    ):
        assert result["version"] == "hallusionbench-reviews-1"
        for name in ("qAcc", "fAcc", "aAcc", "easy_aAcc", "hard_aAcc"):
            assert round(result["metrics"][name], 4) == want[name]
    by_rule = numbers("hallusionbench", judged, "--data", tmp_path)
    assert by_rule["version"] == "hallusionbench-none-1"
    assert by_rule["metrics"]["VD/aAcc"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chiar", "x"), "Did you mean 'chair'"),
        (("chair", "x.jsonl"), "does not exist"),
        (("pope", "a.jsonl", "--set", "parser=vdc"), "Did you mean 'vcd'"),
        (("chair", "a.jsonl", "--set", "parser=vcd"), "Unknown Chair setting 'parser'"),
        (("chair", "a.jsonl"), r"instances_val2014\.json is missing: use --data download"),
        (("vqav2", "a.jsonl", "--field", "reply"), "line 1 has no 'reply'"),
    ],
)
def test_mistakes_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "a.jsonl", [{"question_id": 1, "text": "Yes"}])
    with pytest.raises(RevisitError, match=message) as caught:
        run(*arguments, "--data", ".")
    assert "\n" not in str(caught.value)


POPE_QUESTION = {"question_id": 1, "image": "a.jpg", "text": "Is there a dog?", "label": "yes"}
RANDOM, ANNOTATIONS = "pope/coco_pope_random.json", "vqav2/v2_mscoco_val2014_annotations.json"
EXAM = "mmmu/questions.jsonl"
ART = {"id": "validation_Art_1", "question": "?", "images": []}


@pytest.mark.parametrize(
    ("file", "truth", "said"),
    [
        (RANDOM, [POPE_QUESTION] * 2, "Duplicate item '.*/1'"),
        (RANDOM, [{**POPE_QUESTION, "label": None}], "'label' must"),
        (RANDOM, [], "list of items is empty"),
        (ANNOTATIONS, {"annotations": [{"question_id": 0, "answers": "aaaaaaaaaa"}]}, "must be a list"),
        (ANNOTATIONS, {"annotations": [{"question_id": 0, "answers": [{"x": 1}]}]}, "annotations entry 1 has no 'answer'"),
        (ANNOTATIONS, "[" * 100_000, "cannot be read|not valid JSON"),
        (EXAM, [{**ART, "question_type": "multiple-choice", "answer": "A", "options": "[x"}], "'options' must be a list"),
        (EXAM, [{**ART, "question_type": "open"}], "has no 'answer'"),
        ("hallusionbench/HallusionBench.json", [{"category": "VD"}], "has no 'subcategory'"),
        ("chair/ground_truth.json", {"1": "dog"}, "to a list of category names"),
    ],
)  # fmt: skip
def test_bad_files_raise(tmp_path: Path, file: str, truth: Any, said: str):
    vqa_folder(tmp_path, [["a"] * 10])
    written(tmp_path / file, truth)
    answers = written(tmp_path / "answers.json", [{"id": 1, "text": "no"}])
    with pytest.raises(RevisitError, match=said):
        run(file.partition("/")[0], answers, "--data", tmp_path)


def test_a_form_nobody_thought_of_names_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> Any:
        raise KeyError("odd")

    monkeypatch.setattr(pope.Pope, "load", broken)
    with pytest.raises(RevisitError, match=r"answers\.json cannot be scored as pope.*KeyError: 'odd'"):
        run("pope", written(tmp_path / "answers.json", [{"id": 1, "text": "a"}]), "--data", tmp_path)
