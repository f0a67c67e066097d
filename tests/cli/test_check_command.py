"""`revisit check`: one text, and a file of texts that is resumed."""

from __future__ import annotations

import csv
import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import revisit.models.loading
from revisit import RevisitError
from revisit.cli.main import app
from revisit.embedded.samples import sample
from revisit.embedded.scenes import render, scene
from revisit.errors import Incomplete
from revisit.explain import check as check_module
from revisit.explain.captions import read_captions
from revisit.io.files import LineFile, read_lines
from revisit.models.config import embedded_folder

PHOTO = str(sample("demo").path)
NOUN = sample("demo").nouns[0]


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["check", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make five images with COCO-like names, and captions in CHAIR's layout, the last of which names an absent object."""
    (tmp_path / "images").mkdir()
    rows = []
    for number in range(5):
        shown = scene("unusual", 3, number)
        render(shown).save(tmp_path / "images" / f"COCO_val2014_{number + 1:012d}.png")
        absent = next(noun for noun in ("zebra", "surfboard", "toilet") if noun not in shown.nouns)
        nouns = [*shown.nouns[:1], absent] if number == 4 else shown.nouns[:1]
        rows.append({"image_id": number + 1, "caption": "The image shows a " + " and a ".join(nouns) + "."})
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def options(folder: Path) -> list[str]:
    return [str(folder / "captions.jsonl"), "--images", str(folder / "images"), "--out", str(folder / "out")]


def lines(folder: Path) -> list[Any]:
    return [row for row in read_lines(folder / "out/checks.jsonl")[0] if "number" in row]


def test_the_exit_status_tells_whether_a_word_is_flagged(tmp_path: Path) -> None:
    fine = run(PHOTO, f"A {NOUN}.", "--threshold", "0.01", "--html", str(tmp_path / "page.html"))
    assert fine.exit_code == 0
    assert NOUN in fine.stdout
    assert "No word is flagged" in (tmp_path / "page.html").read_text()
    bad = run(PHOTO, f"A {NOUN} and a zebra.", "--json", "--threshold", "0.01")
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["flagged"] == ["zebra"]


def test_without_a_word_to_check_the_status_is_3(folder: Path) -> None:
    for text in ("Ein Hund liegt im Gras.", "", "..."):
        with pytest.raises(Incomplete, match="word") as ended:
            run(PHOTO, text)
        assert ended.value.status == 3
    (folder / "captions.jsonl").write_text('{"image_id": 1, "caption": "Ein Hund."}\n')
    with pytest.raises(Incomplete, match="none of the words to check"):
        run(*options(folder))


def test_a_file_of_captions(folder: Path) -> None:
    result = run(*options(folder), "--batch-size", "2", "--threshold", "0.01")
    assert result.exit_code == 1
    assert "5 texts checked" in result.stdout
    assert "zebra: 1" in result.stdout
    assert [line["number"] for line in lines(folder)] == [1, 2, 3, 4, 5]
    assert (folder / "out/index.html").read_text().count("<svg") == 5
    assert "most often: cat (1), zebra (1)" in (folder / "out/index.html").read_text()


def test_an_interrupted_run_resumes_to_the_same_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(*options(folder), "--batch-size", "2")
    expected = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    cut = expected["checks.jsonl"].split(b"\n")
    (folder / "out/checks.jsonl").write_bytes(cut[0] + b"\n" + cut[3] + b"\n" + cut[1][:30])  # killed while writing
    checked: list[str] = []
    original = check_module.read_texts

    def counting(*args: Any) -> Any:
        checked.extend(args[5])
        return original(*args)

    monkeypatch.setattr(check_module, "read_texts", counting)
    again = run(*options(folder), "--batch-size", "2")
    assert len(checked) == 5  # in the batches of the first run
    assert again.stdout == whole.stdout
    assert {path.name: path.read_bytes() for path in (folder / "out").iterdir()} == expected


def test_nothing_is_loaded_when_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(*options(folder))
    monkeypatch.setattr(revisit.models.loading, "load", None)
    assert run(*options(folder)).stdout == first.stdout


def test_another_threshold_flags_stored_supports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(*options(folder), "--threshold", "0")
    stored = (folder / "out/checks.jsonl").read_bytes()
    assert (folder / "out/flagged.csv").read_text().splitlines() == [""]
    monkeypatch.setattr(revisit.models.loading, "load", None)
    result = run(*options(folder), "--threshold", "1", "--json")
    summary = json.loads(result.stdout)
    checks = [check for check in revisit.read_checks(folder / "out", threshold=1) if check.flagged()]
    assert (result.exit_code, summary["flagged"], summary["threshold"]) == (1, len(checks), 1)
    assert (folder / "out/checks.jsonl").read_bytes() == stored
    with (folder / "out/flagged.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image_id"], row["caption"]) for row in rows] == [(check.id, check.text) for check in checks]
    assert rows[-1]["flagged_words"].endswith("zebra")
    assert [row["least_support"] for row in rows] == [f"{check.least_support}" for check in checks]
    assert [row["flagged_words"] for row in rows] == [
        ", ".join(word.text for word in check.flagged()) for check in checks
    ]


@pytest.mark.parametrize("unit", ["word", "text"])
def test_labels_give_precision_and_recall_by_threshold(
    folder: Path, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    rows = [json.loads(line) for line in (folder / "captions.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        nouns = sorted(scene("unusual", 3, number).nouns)
        row["label"] = ", ".join(nouns) if unit == "word" else ["yes", "yes", "yes", "yes", "no"][number]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(*options(folder))
    monkeypatch.setattr(revisit.models.loading, "load", None)
    file, _, _, *out = options(folder)
    labels = json.loads(run(file, *out, "--labels", "label", "--json", "--threshold", "1").stdout)["labels"]
    assert (labels["unit"], labels["labelled"], labels["wrong"]) == (unit, 6 if unit == "word" else 5, 1)
    last = labels["thresholds"][-1]
    assert (last["threshold"], last["recall"], last["precision"]) == (1, 1, pytest.approx(1 / last["flagged"]))
    assert labels["auroc"] == 1  # the zebra has the least support
    best = next(row for row in labels["thresholds"] if row["threshold"] == labels["best_threshold"])
    assert (best["flagged"], best["precision"], best["recall"], best["f1"]) == (1, 1, 1, 1)
    assert "AUROC 1.000" in run(file, *out, "--labels", "label").stdout
    with pytest.raises(RevisitError, match="no 'colour'"):
        run(file, *out, "--labels", "colour")


def test_checks_of_another_image_or_model_are_not_used_again(folder: Path) -> None:
    model = folder / "model"
    shutil.copytree(embedded_folder(), model)
    arguments = [*options(folder), "--model", str(model)]
    run(*arguments)
    before = lines(folder)
    changed = folder / "images" / f"COCO_val2014_{1:012d}.png"
    Image.new("RGB", (64, 64)).save(changed)
    run(*arguments)
    assert [line["number"] for line in lines(folder)] == [1, 2, 3, 4, 5]
    assert lines(folder)[1:] == before[1:]
    assert lines(folder)[0]["least_support"] != before[0]["least_support"]
    changed.write_bytes(b"no image")
    with pytest.raises(Incomplete, match="1 of the texts"):
        run(*arguments)
    assert [line["number"] for line in lines(folder)] == [2, 3, 4, 5]
    assert "4 texts" in (folder / "out/index.html").read_text()
    (failure,) = map(json.loads, (folder / "out/failures.jsonl").read_text().splitlines())
    assert (failure["number"], failure["image"]) == (1, changed.name)
    assert "not an image" in failure["error"]
    settings = json.loads((model / "generation_config.json").read_text())
    settings["check"]["threshold"] = 0.9
    (model / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(RevisitError, match=r"other settings \(fingerprint\)"):
        run(*arguments)


def test_an_edited_text_replaces_its_check(folder: Path) -> None:
    run(*options(folder))
    before = lines(folder)
    file = folder / "captions.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join([rows[0], '{"image_id": 2, "caption": "A zebra."}\n', *rows[2:4]]))
    run(*options(folder))
    after = lines(folder)
    assert [line["text"] for line in after] == [before[0]["text"], "A zebra.", before[2]["text"], before[3]["text"]]
    assert [after[n] for n in (0, 2, 3)] == [before[n] for n in (0, 2, 3)]
    file.rename(folder / "other.jsonl")
    with pytest.raises(RevisitError, match=r"other settings \(file\)"):
        run(str(folder / "other.jsonl"), *options(folder)[1:])


def test_a_broken_image_does_not_stop_the_others(folder: Path) -> None:
    broken = folder / "images" / f"COCO_val2014_{3:012d}.png"
    good = broken.read_bytes()
    broken.write_bytes(good[:200])
    with pytest.raises(Incomplete, match="1 of the texts could not be checked"):
        run(*options(folder), "--batch-size", "4")
    assert [line["number"] for line in lines(folder)] == [1, 2, 4, 5]
    broken.write_bytes(good)
    assert run(*options(folder)).exit_code in (0, 1)
    assert sorted(line["number"] for line in lines(folder)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "row",
    [
        {"image": "COCO_val2014_000000000001.png", "caption": "A dog."},
        {"question_id": "COCO_val2014_000000000001", "text": "A dog."},
        {"id": 1, "response": "A dog."},
    ],
)
def test_other_layouts(folder: Path, row: dict[str, Any]) -> None:
    (folder / "captions.jsonl").write_text(json.dumps(row) + "\n")
    rows = read_captions(folder / "captions.jsonl", folder / "images")
    assert (rows[0].image.name, rows[0].text) == ("COCO_val2014_000000000001.png", "A dog.")


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"image": "a/1.png"}, "a/1.png"),
        ({"image": "1.png"}, "1.png"),
        ({"image": "elsewhere/2.png"}, "b/c/2.png"),
        ({"image": "/somewhere/2.png"}, "b/c/2.png"),
        ({"image": "{typed}/b/1.png"}, "b/1.png"),
        ({"image_id": "b/1"}, "b/1.png"),
        ({"image_id": 1}, "1.png"),
        ({"image_id": 7}, "b/COCO_7.jpg"),
        ({"image": "c/1.png"}, None),
        ({"image_id": 3}, None),
    ],
)
def test_images_are_found_in_subfolders_by_their_whole_path_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], found: str | None
) -> None:
    for name in ("1.png", "a/1.png", "b/1.png", "b/c/2.png", "b/COCO_7.jpg", "a/3.png", "b/3.png"):
        (tmp_path / "nest" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nest" / name).touch()
    monkeypatch.chdir(tmp_path)
    rows = [
        json.dumps({name: str(value).replace("{typed}", "nest"), "caption": "A dog."}) for name, value in row.items()
    ]
    (tmp_path / "captions.jsonl").write_text("\n".join(rows))
    if found is None:
        with pytest.raises(RevisitError, match=r"could be any of [23] images"):
            read_captions(tmp_path / "captions.jsonl", tmp_path / "nest")
        return
    (caption,) = read_captions(tmp_path / "captions.jsonl", Path("nest"))
    assert (caption.image, caption.name) == (tmp_path / "nest" / found, found)


def test_texts_of_images_with_one_name_are_kept_apart(folder: Path) -> None:
    for number in (1, 2):
        (folder / "images" / str(number)).mkdir()
        (folder / "images" / f"COCO_val2014_{number:012d}.png").rename(folder / "images" / str(number) / "x.png")
    rows = [{"image": f"{number}/x.png", "caption": f"A {NOUN}."} for number in (1, 2)]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(*options(folder)).exit_code in (0, 1)
    assert [line["image"] for line in lines(folder)] == ["1/x.png", "2/x.png"]
    supports = [line["least_support"] for line in lines(folder)]
    alone = [check_module.check("tiny", folder / f"images/{n}/x.png", f"A {NOUN}.").least_support for n in (1, 2)]
    assert supports == pytest.approx(alone)


WRONG: list[tuple[list[str], str]] = [
    ([PHOTO], "Give an image and its text"),
    (["nowhere.jpg", "A dog."], "There is no file nowhere.jpg"),
    ([PHOTO, "A dog.", "--prompt", " "], "The prompt must be a question"),
    ([PHOTO, "A dog.", "--words", ","], "words must be"),
    ([PHOTO, "A dog.", "--images", "."], "need a file of texts"),
    (["{captions}", "--images", "{images}"], "--out DIR"),
    (["{captions}", "--images", "nowhere", "--out", "{out}"], "not a folder"),
    (["{captions}", "--images", "{images}", "--out", "{out}", "--html", "x.html"], "needs a folder"),
    (["{captions}", "--out", "{images}", "--labels", "x"], "has no checks"),
    (["{captions}", "--images", "{images}", "--out", "{out}", "--field", "txt"], "has no 'txt'"),
    (["{images}/broken.jsonl", "--images", "{images}", "--out", "{out}"], "broken.jsonl"),
    (["{images}/strange.jsonl", "--images", "{images}", "--out", "{out}"], "no image in"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG)
def test_wrong_uses_are_one_sentence(folder: Path, arguments: list[str], sentence: str) -> None:
    (folder / "images/broken.jsonl").write_text('{"image_id": 1, "caption": \n')
    (folder / "images/strange.jsonl").write_text('{"image_id": 99, "caption": "A dog."}\n')
    places = {"captions": folder / "captions.jsonl", "images": folder / "images", "out": folder / "out"}
    with pytest.raises(RevisitError, match=sentence) as error:
        run(*(argument.format(**places) for argument in arguments))
    assert "\n" not in str(error.value)
    assert not (folder / "out").exists()


def test_a_folder_in_use_or_with_other_settings_raises(folder: Path) -> None:
    with closing(LineFile(folder / "out/checks.jsonl")), pytest.raises(RevisitError, match="in use"):
        run(*options(folder))
    caption = f"A {NOUN}\u2028 and\u0085 more."  # with separators that end no line of the file
    (folder / "captions.jsonl").write_text(json.dumps({"image_id": 1, "caption": caption}) + "\n")
    first = run(*options(folder)).stdout
    assert run(*options(folder)).stdout == first
    assert lines(folder)[0]["text"] == caption
    with pytest.raises(RevisitError, match="other settings"):
        run(*options(folder), "--words", "content")
