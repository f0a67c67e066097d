"""Answer files as other projects write them, each with its trap: read right, or refused in one sentence.

The layouts are those of the projects named; every text is ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError

pytestmark = pytest.mark.usefixtures("nltk_data")

GOLD = ["yes", "no", "no", "yes"]
SAID = ["Yes", "Yes, it is.", "No", "No."]  # two of four are right: the first and the third
ASKED = [f"Is there a {thing} in the image?" for thing in ("kettle", "ladder", "candle", "basket")]


def questions(folder: Path, name: str = "coco_pope_random.json", asked: list[str] = ASKED) -> Path:
    rows = [
        {"question_id": n, "image": f"COCO_val2014_{n:012d}.jpg", "text": text, "label": label}
        for n, (text, label) in enumerate(zip(asked, GOLD, strict=True), 1)
    ]
    return lines(folder / name, rows)


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def score(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["score", *map(str, arguments), "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


Row = Callable[[int], dict[str, Any]]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            lambda n: {"question": ASKED[n], "answer": SAID[n]}, id="POPE: no ids, the order of the questions"
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "prompt": ASKED[n], "text": SAID[n], "answer_id": "x", "model_id": "m"},
            id="LLaVA: the answer is called text",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "text": ASKED[n], "label": GOLD[n], "answer": SAID[n]},
            id="the question file with answers added: text is the question",
        ),
        pytest.param(
            lambda n: {
                "question_id": n + 1,
                "prompt": f"<image>\n{ASKED[n]} Please answer with one word.",
                "text": SAID[n],
            },
            id="VCD: the question inside a longer prompt",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "prompt": ASKED[n].replace("image", "imange"), "text": SAID[n]},
            id="VCD: the known misprint in some questions",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "question": ASKED[n], "answer": GOLD[n], "response": SAID[n]},
            id="gold in answer, generated text in response",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "text": ASKED[n], "answer": GOLD[n], "prediction": SAID[n]},
            id="question in text, gold in answer, generated text in prediction",
        ),
        pytest.param(
            lambda n: {"doc_id": n, "doc": {"question_id": n + 1, "answer": GOLD[n]}, "filtered_resps": [SAID[n]]},
            id="lmms-eval before 0.7: the doc holds the gold answer as answer",
        ),
        pytest.param(
            lambda n: {
                "doc_id": n,
                "target": GOLD[n],
                "input": ASKED[n],
                "resps": [[SAID[n]]],
                "filtered_resps": [SAID[n]],
                "pope_accuracy": {"question_id": n + 1, "prediction": "no", "ground_truth": GOLD[n]},
            },
            id="lmms-eval 0.7: no doc, a reading of its own beside",
        ),
        pytest.param(
            lambda n: {"id": f"coco_random/{n + 1}", "prompt": "5f2c", "item": "9a", "text": SAID[n], "tokens": [1]},
            id="ours: the prompt is a checksum, not a text",
        ),
        pytest.param(
            lambda n: {
                "query": ASKED[n],
                "label": int(GOLD[n] == "yes"),
                "ans": SAID[n],
                "question": f"USER: <ImageHere> {ASKED[n]} ASSISTANT:",
            },
            id="PAI: ans, and the gold answer as a number",
        ),
        pytest.param(
            lambda n: {"prompt": ASKED[n], "predict": SAID[n], "label": GOLD[n]}, id="LLaMA-Factory: predict and label"
        ),
        pytest.param(
            lambda n: {
                "doc_id": n,
                "target": GOLD[n],
                "input": ASKED[n],
                "filtered_resps": SAID[n],
                "pope_accuracy": {"question_id": n + 1, "prediction": "no"},
            },
            id="lmms-eval after 0.7: the bare reply",
        ),
    ],
)
def test_read_right(tmp_path: Path, row: Row) -> None:
    answers = lines(tmp_path / "answers.jsonl", [row(n) for n in range(4)])
    found = score("pope", answers, "--questions", questions(tmp_path))
    assert (found["items"], found["metrics"]["accuracy"]) == (4, 0.5)
    assert found["counts"]["TP"] == found["counts"]["FP"] == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        pytest.param(
            lambda n: {"question_id": n + 1, "text": SAID[n], "answer": GOLD[n]},
            r"line 1 has several fields that may be the generated text \(text, answer\).* --field answer",
            id="gold beside the prediction, and nothing says which is which",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "prompt": ASKED[n], "text": SAID[n], "label": GOLD[n], "answer": GOLD[n]},
            "several fields",
            id="the same with a prompt: text is not the question",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "response": SAID[n], "output": "Yes"},
            r"several fields that may be the generated text \(response, output\)",
            id="two generated texts",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "question": ASKED[(n + 1) % 4], "answer": SAID[n]},
            r"has the question 'Is there a ladder .* item 'coco_random/1' .*\(4 of 4 rows differ\): the rows are shuffled",
            id="ids in order, rows shuffled",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "image": f"COCO_val2014_{n + 2:012d}.jpg", "text": SAID[n]},
            r"has the picture 'COCO_val2014_000000000002.jpg', but 'coco_random/1' .* has 'COCO_val2014_000000000001.jpg'",
            id="ids in order, pictures of other rows",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "label": GOLD[n - 1], "response": SAID[n]},
            "line 2 has the label 'yes', but 'coco_random/2' of the question file has 'no'",
            id="ids in order, labels of other rows",
        ),
        pytest.param(
            lambda n: {"question": ASKED[3 - n], "answer": SAID[n]},
            "has the question",
            id="no ids, another order",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "prompt": "Is there a violin in the image?", "text": SAID[n]},
            "or of another file",
            id="answers to another question file with the same ids",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "image": "a.jpg", "text": ASKED[n], "label": GOLD[n]},
            "repeats the questions, so these are no answers",
            id="the question file itself",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, ("text" if n else "answer"): SAID[n]},
            "line 2 has its answer in 'text', but .* line 1 has it in 'answer'",
            id="two layouts in one file",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "question": ASKED[n], "answer": GOLD[n], "llava_reply": SAID[n]},
            r"several fields that may be the generated text \(answer, llava_reply\).* --field llava_reply",
            id="gold in answer, generated text under a name of its own",
        ),
        pytest.param(
            lambda n: {"question_id": n + 1, "question": ASKED[n], "answer": GOLD[n], "greedy": SAID[n]},
            r"several fields that may be the generated text \(answer, greedy\).* --field greedy",
            id="a column for every method beside the gold answer",
        ),
        pytest.param(
            lambda n: {"doc_id": n, "pope_accuracy": {"question_id": n + 1}, "filtered_resps": [SAID[n], "No"]},
            "line 1 holds 2 responses to one question",
            id="lmms-eval with repeats",
        ),
    ],
)
def test_refused(tmp_path: Path, row: Row, message: str) -> None:
    answers = lines(tmp_path / "answers.jsonl", [row(n) for n in range(4)])
    with pytest.raises(RevisitError, match=message) as caught:
        score("pope", answers, "--questions", questions(tmp_path))
    assert "\n" not in str(caught.value)


def test_the_user_chooses_the_field(tmp_path: Path) -> None:
    rows = [{"question_id": n + 1, "text": SAID[n], "answer": GOLD[n]} for n in range(4)]
    answers, asked = lines(tmp_path / "a.jsonl", rows), questions(tmp_path)
    assert score("pope", answers, "--questions", asked, "--field", "text")["metrics"]["accuracy"] == 0.5
    assert score("pope", answers, "--questions", asked, "--field", "answer")["metrics"]["accuracy"] == 1.0
    with pytest.raises(RevisitError, match="line 1 has no 'reply'"):
        score("pope", answers, "--questions", asked, "--field", "reply")


def test_lmms_eval_samples_without_doc_carry_their_labels(tmp_path: Path) -> None:
    rows = [{"doc_id": n, "target": GOLD[n], "filtered_resps": [SAID[n]], "resps": [[SAID[n]]]} for n in range(4)]
    assert score("pope", lines(tmp_path / "s.jsonl", rows))["metrics"]["accuracy"] == 0.5


def test_lmms_eval_of_all_settings_without_doc(tmp_path: Path) -> None:
    """Its question ids repeat in every category, which the samples no longer tell; an empty reply is one."""
    rows = [
        {"doc_id": n, "target": GOLD[n], "filtered_resps": SAID[n] if n else "", "m": {"id": n % 2}} for n in range(4)
    ]
    found = score("pope", lines(tmp_path / "s.jsonl", rows), "--parser", "harness")
    assert found["metrics"]["accuracy"] == 0.25  # only "No" is exactly its label
    assert found["notes"] == ["1 of 4 answers are empty, and count as the rule has it."]


def test_what_a_reader_would_drop_in_silence(tmp_path: Path) -> None:
    asked = questions(tmp_path)
    twice = tmp_path / "map.json"
    twice.write_text('{"1": "Yes", "2": "Yes", "3": "No", "4": "No", "3": "Yes"}')
    with pytest.raises(RevisitError, match="an object has the key '3' twice"):
        score("pope", twice, "--questions", asked)
    rows = [f'{{"question_id": {n + 1}, "text": "{SAID[n]}", "text": "{GOLD[n]}"}}' for n in range(4)]
    (tmp_path / "keys.jsonl").write_text("\n".join(rows))
    with pytest.raises(RevisitError, match=r"line 1 is JSON that cannot be read .*'text' twice"):
        score("pope", tmp_path / "keys.jsonl", "--questions", asked)
    (tmp_path / "t.tsv").write_text("index\tanswer\tprediction\tprediction\n1\tyes\tNo\tYes\n")
    with pytest.raises(RevisitError, match="has the column 'prediction' twice"):
        score("pope", tmp_path / "t.tsv")


def test_mme_folders(tmp_path: Path) -> None:
    """Two of two and one of two right: 75 + 50."""
    asked = [("a.jpg", "Red?", "Yes", "Yes"), ("b.jpg", "Big?", "No", "Yes"), ("a.jpg", "Blue?", "No", "No")]
    asked.append(("b.jpg", "Far?", "Yes", "yes, it is"))
    text = "\r\n".join("\t".join(row) for row in asked) + "\r\n\r\n"
    (tmp_path / "existence.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert score("mme", tmp_path)["metrics"]["existence/score"] == 125.0
    (tmp_path / "existence_vcd.txt").write_text("a.jpg\tRed?\tYes\tNo\n")
    with pytest.raises(RevisitError, match="'existence_vcd' is no category of MME"):
        score("mme", tmp_path)
    (tmp_path / "existence_vcd.txt").unlink()
    (tmp_path / "existence.txt").write_text(text.replace("Blue?", "Red?"))
    with pytest.raises(RevisitError, match=r"answers 'Red\?' about a.jpg a second time"):
        score("mme", tmp_path)


def nine(folder: Path) -> list[Path]:
    names = [f"coco_pope_{kind}.json" for kind in ("random", "popular", "adversarial")]
    names += [f"{s}_pope_seem_{k}.json" for s in ("aokvqa", "gqa") for k in ("random", "popular", "adversarial")]
    return [
        questions(folder, name, [text.replace("image", f"image {n}") for text in ASKED]) for n, name in enumerate(names)
    ]


def test_nine_settings_at_once(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    asked.mkdir()
    files = nine(asked)
    flags = [part for file in files for part in ("--questions", file)]
    said = tmp_path / "said"
    said.mkdir()
    rows = [{"question_id": n + 1, "text": SAID[n]} for n in range(4)]
    for file in files:
        lines(said / f"llava_{file.stem}_answers.jsonl", rows)
    by_name = score("pope", said, *flags)
    assert by_name["items"] == 36
    assert by_name["metrics"]["gqa_adversarial/accuracy"] == by_name["metrics"]["accuracy"] == 0.5
    assert score("pope", said, "--questions", asked) == by_name  # the folder of the question files
    with pytest.raises(RevisitError, match=r"do not say which of the settings coco_random, .* they belong to"):
        score("pope", lines(tmp_path / "all.jsonl", rows * 9), *flags)


def test_other_benchmarks_and_their_traps(tmp_path: Path) -> None:
    # VQA: the annotations themselves look like answers to nobody who asks for generated text
    notes = [{"question_id": n, "question": ASKED[n], "answers": ["cup"] * 10} for n in range(2)]
    truth = tmp_path / "annotations.json"
    truth.write_text(json.dumps({"annotations": notes}))
    rows = [{"question_id": n, "question": ASKED[n], "answer": "cup"} for n in range(2)]
    assert score("vqav2", lines(tmp_path / "v.jsonl", rows), "--annotations", truth)["metrics"]["accuracy"] == 100.0
    swapped = lines(tmp_path / "w.jsonl", [row | {"question_id": 1 - row["question_id"]} for row in rows])
    with pytest.raises(RevisitError, match="has the question"):
        score("vqav2", swapped, "--annotations", truth)
    # and their own file has no questions: those of the official file beside it count
    truth.write_text(json.dumps({"annotations": [{k: v for k, v in n.items() if k != "question"} for n in notes]}))
    beside = [{"question_id": n, "image_id": n, "question": ASKED[n]} for n in range(2)]
    (tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json").write_text(json.dumps({"questions": beside}))
    assert score("vqav2", lines(tmp_path / "v.jsonl", rows), "--annotations", truth)["metrics"]["accuracy"] == 100.0
    with pytest.raises(RevisitError, match="has the question"):
        score("vqav2", swapped, "--annotations", truth)
    # HallusionBench: a label that is the gold answer says nothing about the prediction
    kept = {"category": "VD", "subcategory": "ocr", "set_id": "0", "question_id": "0", "visual_input": "1"}
    asked = [
        kept | {"figure_id": str(n), "gt_answer": str(n), "label": str(n), "model_prediction": "Yes"} for n in (0, 1)
    ]
    with pytest.raises(RevisitError, match="'label' is the gold answer in all rows"):
        score("hallusionbench", lines(tmp_path / "h.jsonl", asked))
    assert score("hallusionbench", lines(tmp_path / "h.jsonl", asked), "--judge", "rule")["metrics"]["aAcc"] == 50.0
    # CHAIR: LLaVA's running numbers are no images
    (tmp_path / "gt.json").write_text('{"1": ["dog"], "7": ["cat"]}')
    told = [{"question_id": n, "prompt": "Describe it.", "text": "A dog."} for n in range(3)]
    with pytest.raises(RevisitError, match="does not know this image, nor 1 others of 3: the ids are running numbers"):
        score("chair", lines(tmp_path / "c.jsonl", told), "--ground-truth", tmp_path / "gt.json")
    # MMMU: a list of questions has gold answers in `answer`, and no responses
    with pytest.raises(RevisitError, match="holds no answer"):
        score("mmmu", lines(tmp_path / "m.jsonl", [{"id": "validation_Art_1", "answer": "B", "options": ["a", "b"]}]))
    # CHAIR: a reference caption beside the generated one
    with pytest.raises(RevisitError, match=r"several fields .*\(caption, text\)"):
        score("chair", lines(tmp_path / "c.jsonl", [{"image_id": 1, "caption": "A dog.", "text": "A cat."}]))


def test_ambers_folder(tmp_path: Path) -> None:
    home = tmp_path / "AMBER/data"
    (home / "query").mkdir(parents=True)
    notes = [{"id": n, "type": "discriminative-hallucination", "truth": GOLD[n - 1]} for n in (1, 2)]
    (home / "annotations.json").write_text(json.dumps(notes))
    queries = [{"id": n, "image": f"AMBER_{n}.jpg", "query": ASKED[n - 1]} for n in (1, 2)]
    (home / "query/query_all.json").write_text(json.dumps(queries))
    rows = [{"id": n, "query": ASKED[n - 1], "response": SAID[n - 1].split(",")[0]} for n in (1, 2)]
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(rows))
    for place in (tmp_path / "AMBER", home, home / "annotations.json"):
        assert score("amber", answers, "--annotations", place)["metrics"]["recall"] == 0.0  # the one "no" is missed
    rows[0]["query"] = ASKED[3]
    answers.write_text(json.dumps(rows))
    with pytest.raises(RevisitError, match=r"has the question .* item '1'"):
        score("amber", answers, "--annotations", home)
