"""`revisit score` from the command line, on every official input layout."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from golden_files import golden
from revisit.benchmarks import names, pope
from revisit.cli.main import app
from revisit.errors import RevisitError

pytestmark = pytest.mark.usefixtures("nltk_data")


def run(*arguments: Any) -> str:
    """Standard output of the command; its RevisitError is raised here."""
    result = CliRunner().invoke(app, ["score", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def numbers(*arguments: Any) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json"))


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_chair_with_a_map(tmp_path: Path):
    captions = lines(
        tmp_path / "c.jsonl", [{"image_id": 1, "caption": "A dog and a cat."}, {"image_id": 1, "caption": "A dog."}]
    )
    truth = tmp_path / "gt.json"
    truth.write_text(json.dumps({"1": ["dog"], "2": []}))
    result = numbers("chair", captions, "--ground-truth", truth, "--per-item")
    assert result["metrics"]["CHAIRi"] == pytest.approx(1 / 3)
    assert result["metrics"]["CHAIRs"] == 0.5
    assert set(result["per_item"]["CHAIRs"]) == {"1", "1#2"}
    assert "CHAIRi" in run("chair", captions, "--ground-truth", truth)


def test_chair_with_coco_files_and_a_stranger(tmp_path: Path):
    captions = lines(tmp_path / "c.jsonl", [{"image_id": 1, "caption": "A dog."}, {"image_id": 5, "caption": "A cat."}])
    instances = {
        "categories": [{"id": 1, "name": "dog"}],
        "annotations": [{"image_id": 1, "category_id": 1}],
        "images": [],
    }
    (tmp_path / "instances_val2014.json").write_text(json.dumps(instances))
    (tmp_path / "captions_val2014.json").write_text(json.dumps({"annotations": [{"image_id": 1, "caption": "Hi."}]}))
    result = numbers("chair", captions, "--ground-truth", tmp_path)
    assert result["metrics"]["CHAIRs"] == 0.5
    assert "1 images are not in the ground truth" in result["notes"][0]
    strangers = lines(tmp_path / "d.jsonl", [{"image_id": 9, "caption": "A cat."}])
    with pytest.raises(RevisitError, match="the ground truth does not know this image, nor 0 others of 1"):
        numbers("chair", strangers, "--ground-truth", tmp_path)


def test_chair_from_lmms_eval_samples(tmp_path: Path):
    row = {
        "doc_id": 0,
        "doc": {"question_id": "4", "gt_object": ["dog"]},
        "resps": [["A cat."]],
        "filtered_resps": ["A cat."],
    }
    assert numbers("chair", lines(tmp_path / "s.jsonl", [row]))["metrics"]["CHAIRi"] == 1.0


@pytest.mark.parametrize("parser", ["official", "vcd", "opera", "harness"])
def test_pope_with_the_official_questions(tmp_path: Path, parser: str):
    rows = [
        {
            "question_id": n,
            "image": "a.jpg",
            "text": f"Is there a thing {n} in the image?",
            "label": "no" if n % 3 else "yes",
        }
        for n in range(1, 61)
    ]
    questions = tmp_path / "aokvqa_pope_seem_popular.json"
    questions.write_text(json.dumps(rows, indent=1))  # a pretty-printed array, as published
    said = ["Yes", "No, there is not.", "no", "I do not know"]
    texts = [said[n % 4] for n in range(len(rows))]
    keyed = [{"question_id": r["question_id"], "text": t} for r, t in zip(rows, texts, strict=True)]
    want = pope.score_answers(
        ((str(n), t, r["label"]) for n, (r, t) in enumerate(zip(rows, texts, strict=True))), parser
    )
    result = numbers("pope", lines(tmp_path / "a.jsonl", keyed[::-1]), "--questions", questions, "--parser", parser)
    assert result["metrics"] == want.metrics
    assert result["version"] == f"pope-{parser}-1"
    ordered = [{"question": r["text"], "answer": t} for r, t in zip(rows, texts, strict=True)]
    assert numbers("pope", lines(tmp_path / "b.jsonl", ordered), "--questions", questions, "--parser", parser) == result
    ours = [{"id": f"aokvqa_popular/{r['question_id']}", "text": t} for r, t in zip(rows, texts, strict=True)]
    assert numbers("pope", lines(tmp_path / "c.jsonl", ours), "--questions", questions, "--parser", parser) == result


def test_pope_from_harness_files(tmp_path: Path):
    docs = [
        {
            "doc_id": n,
            "doc": {"id": str(n), "question_id": "1", "answer": label, "category": kind},
            "filtered_resps": [said],
        }
        for n, (label, kind, said) in enumerate(
            [("yes", "random", "Yes"), ("no", "popular", "yes"), ("no", "random", "no")]
        )
    ]
    docs[2]["doc"]["question_id"] = "2"
    result = numbers("pope", lines(tmp_path / "s.jsonl", docs), "--parser", "harness")
    assert result["metrics"]["random/accuracy"] == 1.0
    assert result["metrics"]["popular/accuracy"] == 0.0
    table = tmp_path / "k.tsv"
    table.write_text("index\tcategory\tanswer\tprediction\n0\trandom,popular\tYes\tYes.\n1\tpopular\tNo\tyes\n")
    result = numbers("pope", table, "--parser", "vlmevalkit")
    assert result["metrics"]["popular/precision"] == 0.5
    assert result["metrics"]["random/accuracy"] == 1.0


def test_repope_takes_answers_to_all_of_pope(tmp_path: Path):
    questions = lines(
        tmp_path / "coco_repope_random.json", [{"question_id": 2, "image": "x.jpg", "text": "?", "label": "no"}]
    )
    answers = lines(tmp_path / "a.jsonl", [{"question_id": n, "text": "No"} for n in (1, 2, 3)])
    result = numbers("repope", answers, "--questions", questions)
    assert result["metrics"]["accuracy"] == 1.0
    assert result["items"] == 1
    assert result["metrics"]["precision"] is None  # undefined, and so not a number


def test_vqav2_must_be_complete(tmp_path: Path):
    cases = golden("vqav2")["cases"]
    notes = [{"question_id": n, "answers": [{"answer": a} for a in case["answers"]]} for n, case in enumerate(cases)]
    annotations = tmp_path / "annotations.json.gz"
    annotations.write_bytes(gzip.compress(json.dumps({"annotations": notes}).encode()))
    answers = [{"question_id": n, "answer": case["prediction"]} for n, case in enumerate(cases)]
    result = numbers("vqav2", written(tmp_path / "r.json", answers), "--annotations", annotations)
    assert result["items"] == len(cases)
    assert result["metrics"]["accuracy"] == pytest.approx(100 * sum(c["official_acc"] for c in cases) / len(cases))
    some = written(tmp_path / "some.json", answers[:10])
    with pytest.raises(RevisitError, match=f"{len(cases) - 10} of {len(cases)} items have no answer"):
        run("vqav2", some, "--annotations", annotations)
    part = numbers("vqav2", some, "--annotations", annotations, "--subset")
    assert part["items"] == 10
    assert part["notes"] == [f"Scored the 10 answered of {len(cases)} items."]


def test_mmmu_both_ways(tmp_path: Path):
    run_ = golden("mmmu")["run"]
    share = sum(run_["correct"].values()) / len(run_["items"])
    for row in run_["items"]:
        folder = tmp_path / "outputs" / row["id"].split("_")[1]
        folder.mkdir(parents=True, exist_ok=True)
        earlier = json.loads((folder / "output.json").read_text()) if (folder / "output.json").exists() else []
        (folder / "output.json").write_text(json.dumps([*earlier, row]))
    # folders are read in the order of their names, guesses are drawn in the official order of subjects
    assert numbers("mmmu", tmp_path / "outputs")["metrics"]["micro"] == pytest.approx(share)
    gold = {r["id"]: {"question_type": r["question_type"], "ground_truth": r["answer"]} for r in run_["items"]}
    said = written(tmp_path / "total_val_output.json", {key: row["ground_truth"] for key, row in gold.items()})
    letters = numbers("mmmu", said, "--answers", written(tmp_path / "answer_dict_val.json", gold))
    assert letters["metrics"]["micro"] == 1.0
    assert "compared as letters" in letters["notes"][0]


def test_hallusionbench_by_rule_by_label_and_from_a_map(tmp_path: Path):
    found = golden("hallusionbench")
    names = ("category", "subcategory", "set_id", "figure_id", "question_id", "visual_input", "gt_answer")
    rows = [dict(zip(names, row, strict=True)) for row in found["rows"]]
    labels, want = found["sets"][1]["labels"], found["sets"][1]["official"]["all"]
    pairs = list(zip(rows, labels, strict=True))
    entries = [r | {"model_prediction": "x", "gpt4v_output_gpt_check": label} for r, label in pairs]
    judged = written(tmp_path / "judged.json", entries)
    given = written(tmp_path / "labels.json", {"_".join([r[k] for k in names[:5]]): label for r, label in pairs})
    questions = written(tmp_path / "HallusionBench.json", rows)
    for result in (numbers("hallusionbench", judged), numbers("hallusionbench", given, "--questions", questions)):
        assert result["version"] == "hallusionbench-labels-1"
        for name in ("qAcc", "fAcc", "aAcc", "easy_aAcc", "hard_aAcc"):
            assert round(result["metrics"][name], 4) == want[name]
    by_rule = numbers("hallusionbench", judged, "--judge", "rule")
    assert by_rule["version"] == "hallusionbench-rule-1"
    assert by_rule["metrics"]["VD/aAcc"] == 0.0
    bare = [{k: row[k] for k in names[:5]} | {"model_prediction": "Yes"} for row in rows[:7]]
    sample = written(tmp_path / "sample.json", bare)
    with pytest.raises(RevisitError, match="give --questions"):
        run("hallusionbench", sample)
    assert numbers("hallusionbench", sample, "--questions", questions, "--subset")["items"] == 7


def test_mme_result_folder(tmp_path: Path):
    (tmp_path / "count.txt").write_text("1.jpg\tTwo?\tYes\tYes\n1.jpg\tSix?\tNo\tYes, six\n")
    result = numbers("mme", tmp_path)
    assert result["metrics"]["count/score"] == 50.0

    with pytest.raises(
        RevisitError, match="scored with the gold answers that its result files carry here, not with --q"
    ):
        numbers("mme", tmp_path, "--questions", tmp_path / "count.txt")


def test_every_benchmark_is_listed_with_what_it_is_scored_with():
    listed = json.loads(CliRunner().invoke(app, ["benchmarks", "--json"]).stdout)
    assert [row["name"] for row in listed] == list(names())
    by_name = {row["name"]: row for row in listed}
    assert by_name["pope"]["options"] == ["settings", "parser", "suffix"]
    assert by_name["mmmu"]["data"] == "hub: MMMU/MMMU"
    assert by_name["vqav2"]["scored_with"] == "--annotations"


def test_llava_reviews(tmp_path: Path):
    row = {"question_id": 1, "category": "llava_bench_conv", "tuple": [8.0, 4.0], "content": "8 4\nwhy"}
    assert numbers("llava_bench", lines(tmp_path / "r.jsonl", [row]))["metrics"] == {"all": 50.0, "conv": 50.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chiar", "x"), "Did you mean 'chair'"),
        (("chair", "x.jsonl"), "does not exist"),
        (("pope", "a.jsonl", "--parser", "vdc"), "Did you mean 'vcd'"),
        (("pope", "a.jsonl", "--ground-truth", "gt.json"), "scored with --questions here, not with --ground-truth"),
        (("chair", "a.jsonl", "--parser", "vcd"), "Unknown Chair setting 'parser'"),
        (("chair", "a.jsonl"), "CHAIR needs --ground-truth"),
        (("pope", "a.jsonl"), r"a\.jsonl line 1 carries no label"),
        (("mmmu", "a.jsonl"), "carries no gold answer"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "a.jsonl", [{"question_id": 1, "text": "Yes"}])
    with pytest.raises(RevisitError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)
    assert not re.search(r"Traceback", str(caught.value))


# -- what must not pass in silence, and what must not end in a traceback -------------------------------------------


def written(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


POPE_QUESTIONS = [
    {"question_id": n, "image": "a.jpg", "text": "Is there a dog?", "label": label}
    for n, label in ((1, "yes"), (2, "no"))
]
VQA = {"question_id": 1, "answers": ["a"] * 10}
MMMU_GOLD = {"validation_Art_1": {"question_type": "short-answer", "ground_truth": "red"}}


@pytest.mark.parametrize(
    ("benchmark", "answers", "flag", "truth", "said"),
    [
        ("pope", [{"question_id": 1, "text": "no"}, {"text": "yes"}], "--questions", POPE_QUESTIONS, "has none of"),
        ("pope", [{"question_id": 1, "text": "no"}], "--questions", POPE_QUESTIONS[:1] * 2, "'.*/1' twice"),
        ("pope", [{"question_id": 1, "text": "no"}], "--questions", [{**POPE_QUESTIONS[0], "label": None}], "'label' must"),
        ("pope", [{"question_id": 1, "text": "no"}], "--questions", [], "there are no questions"),
        ("vqav2", [{"question_id": 1, "answer": "a"}], "--annotations", [VQA, VQA], "'1' twice"),
        ("vqav2", [{"question_id": 1, "answer": "a"}], "--annotations", [{**VQA, "answers": "aaaaaaaaaa"}], "must be a list"),
        ("vqav2", [{"question_id": 1, "answer": "a"}], "--annotations", [{**VQA, "answers": [{"x": 1}]}], "human answers"),
        ("mmmu", {"validation_Art_1": "red"}, "--answers", {"validation_Art_1": {"ground_truth": 1, "options": "[x"}}, "options"),
        ("mmmu", {"validation_Art_1": "red"}, "--answers", [{"id": "validation_Art_1"}], "neither 'ground_truth' nor"),
        ("hallusionbench", [{"figure_id": "x"}], "--questions", [{"category": "VD"}], "no answer"),
        ("chair", [{"image_id": 1, "caption": "a"}], "--ground-truth", {"categories": ["dog"], "val": {"1": [5]}}, "places in"),
        ("vqav2", "[" * 100_000, "--annotations", [VQA], "cannot be read|not valid JSON"),
        ("vqav2", '[{"question_id": ' + "9" * 5000 + ', "answer": "a"}]', "--annotations", [VQA], "cannot be read"),
        ("vqav2", [{"question_id": 1, "answer": "a"}], "--annotations", {"annotations": [{"question_id": 1, "answers": 3}]}, "list"),
        ("llava_bench", [{"question_id": 1, "text": "a", "tuple": [1], "category": "conv"}], None, None, "two numbers"),
    ],
)  # fmt: skip
def test_bad_files_are_one_sentence(tmp_path: Path, benchmark: str, answers: Any, flag: str, truth: Any, said: str):
    given = [written(tmp_path / "answers.json", answers)]
    if flag is not None:
        given += [flag, written(tmp_path / "truth.json", truth)]
    with pytest.raises(RevisitError, match=said):
        run(benchmark, *given)


def test_a_form_nobody_thought_of_names_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> Any:
        raise KeyError("odd")

    monkeypatch.setattr(pope.Pope, "match", broken)
    with pytest.raises(RevisitError, match=r"answers\.json cannot be scored as pope.*KeyError: 'odd'"):
        run("pope", written(tmp_path / "answers.json", [{"id": 1, "text": "a"}]))


def test_a_broken_archive(tmp_path: Path):
    whole = gzip.compress(b"[{}]" * 1000)
    (tmp_path / "a.json.gz").write_bytes(whole[:20] + b"\xff" * 10 + whole[30:])
    with pytest.raises(RevisitError, match="cannot be read"):
        run("pope", tmp_path / "a.json.gz")


def test_options_that_only_the_data_folder_can_serve_are_not_ignored(tmp_path: Path):
    answers, gold = written(tmp_path / "a.json", {"validation_Art_1": "red"}), written(tmp_path / "g.json", MMMU_GOLD)
    with pytest.raises(RevisitError, match="score with --data"):
        run("mmmu", answers, "--answers", gold, "--set", "keep=single-image")
    questions = written(tmp_path / "coco_pope_random.json", POPE_QUESTIONS)
    said = lines(tmp_path / "p.jsonl", [{"question_id": n, "text": "yes"} for n in (1, 2)])
    assert numbers("pope", said, "--questions", questions, "--set", "settings=coco_random")["items"] == 2
    with pytest.raises(RevisitError, match="none of the settings"):
        run("pope", said, "--questions", questions, "--set", "settings=gqa_random")
    with pytest.raises(RevisitError, match="needs the question files"):
        run(
            "pope",
            lines(tmp_path / "l.jsonl", [{"id": 1, "text": "yes", "label": "yes"}]),
            "--set",
            "settings=gqa_random",
        )


def test_chair_of_a_list_of_images(tmp_path: Path):
    captions = lines(tmp_path / "c.jsonl", [{"image_id": n, "caption": "A dog."} for n in (1, 2)])
    truth = written(tmp_path / "gt.json", {"1": ["dog"], "2": []})
    (tmp_path / "ids.txt").write_text("2\n")
    result = numbers("chair", captions, "--ground-truth", truth, "--set", f"ids={tmp_path / 'ids.txt'}")
    assert (result["items"], result["metrics"]["CHAIRs"]) == (1, 1.0)
    missing = pytest.raises(RevisitError, match="list of image ids")
    with missing:
        run("chair", captions, "--ground-truth", truth, "--set", "ids=nowhere")


def test_reviews_are_summed_up_by_their_marks(tmp_path: Path):
    rows = [
        {"question_id": 1, "category": "llava_bench_conv", "content": "9 3\nfine", "tuple": [8, 7]},
        {"question_id": 1, "category": "llava_bench_conv", "content": "9 3", "tuple": [8.0, 5.0]},
    ]
    result = numbers("llava_bench", lines(tmp_path / "r.jsonl", rows))
    assert result["metrics"]["conv"] == 75.0
    rows[0]["tuple"] = [8, float("nan")]
    with pytest.raises(RevisitError, match=r"line 1: 'tuple' must be two numbers, not \[8, nan\]"):
        numbers("llava_bench", lines(tmp_path / "r.jsonl", rows))
