"""`revisit calibrate`, and what `--risk` does with its result."""

import json

import pytest
from typer.testing import CliRunner

import revisit
from revisit.cli.main import app
from revisit.embedded.scenes import render, scene
from revisit.errors import RevisitError
from revisit.eval.benchmarks import language
from revisit.guard import rates
from revisit.words import WORDS

pytest.importorskip("scipy")
pytestmark = pytest.mark.skipif(bool(language.missing_packages()), reason="NLTK's data are not installed")

CALIBRATE = ("calibrate", "--risk", "0.3", "--confidence", "0.8", "--max-new-tokens", "40", "--batch-size", "24")


def run(*arguments, status=0):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Scenes with CHAIR's labels."""
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "val2014").mkdir()
    truth = {}
    for number in range(1, 25):
        shown = scene("unusual", 5, number)
        render(shown).save(folder / "val2014" / f"COCO_val2014_{number:012d}.jpg")
        truth[number] = [WORDS[noun] for noun in shown.nouns]
    (folder / "ground_truth.json").write_text(json.dumps(truth))
    return folder


@pytest.fixture(scope="module")
def calibrated(folder, tmp_path_factory):
    """A calibration of tiny, and what the command printed."""
    patch = pytest.MonkeyPatch()
    patch.setenv("REVISIT_CACHE", str(tmp_path_factory.mktemp("cache")))
    path = folder / "guard.json"
    printed = run(*CALIBRATE, "--data", folder, "--out", path).stdout
    again = run(*CALIBRATE, "--data", folder, "--out", path).stdout
    patch.undo()
    return path, printed, again


def image(folder):
    return folder / "val2014" / "COCO_val2014_000000000001.jpg"


def test_missing_data_of_nltk_is_an_error_before_the_first_caption(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(language, "missing_packages", lambda: ["wordnet"])
    monkeypatch.setattr(revisit, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(RevisitError, match="wordnet"):
        run(*CALIBRATE, "--data", folder, "--out", tmp_path / "guard.json")


def test_your_own_photos_are_calibrated_like_chairs(calibrated, folder, tmp_path, monkeypatch, capfd):
    """The same images under other names, with the objects in a file; one that cannot be read is left out."""
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    rows = []
    for number, objects in json.loads((folder / "ground_truth.json").read_text()).items():
        name = f"IMG_{number}.jpg"
        (tmp_path / name).write_bytes((folder / "val2014" / f"COCO_val2014_{int(number):012d}.jpg").read_bytes())
        rows.append({"id": name, "image": name, "objects": objects})
    (tmp_path / "IMG_99.jpg").write_bytes(b"no image")
    rows.append({"id": "IMG_99.jpg", "image": "IMG_99.jpg", "objects": ["cat"]})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(*CALIBRATE, "--data", f"captions:{tmp_path / 'own.jsonl'}", "--out", tmp_path / "guard.json")
    assert "IMG_99.jpg" in result.stderr
    rate, theirs = (json.loads(path.read_text()) for path in (tmp_path / "guard.json", calibrated[0]))
    same = ("images", "mistakes", "threshold", "settings")
    assert {name: rate[name] for name in same} == {name: theirs[name] for name in same}


def test_a_calibration_prints_the_price_and_resumes(calibrated):
    path, printed, again = calibrated
    stored = json.loads(path.read_text())
    assert "mistakes" in printed.splitlines()[0]
    assert stored["risk"] == 0.3
    assert stored["settings"]["floor"] == stored["threshold"] > 0
    assert stored["mistakes"] <= 0.3 * 24
    assert "over images like those of the calibration" in printed
    assert all(" 0 captions decoded" in line for line in again.splitlines() if "captions decoded" in line)


def test_generate_takes_method_prompt_and_length_from_the_calibration(calibrated, folder):
    path, *_ = calibrated
    result = run("generate", image(folder), "--risk", "0.3", "--calibration", path, "--json")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["method"]["floor"] == json.loads(path.read_text())["threshold"]
    assert answer["generation"]["max_new_tokens"] == 40
    assert answer["promise"].startswith("At most 0.3 of captions")
    asked = revisit.ask("tiny", image(folder), risk=0.3, calibration=path)
    assert asked.text == answer["text"]
    assert asked.promise == answer["promise"]
    assert "At most 0.3 of captions" in asked.page.render()


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--max-new-tokens", "50"], "max_new_tokens"),
        (["--prompt", "What is there?"], "prompt"),
        (["--method", "greedy"], "method"),
        (["--set", "alpha=0.2"], "method"),
        (["--dtype", "bfloat16"], "data type"),
        (["--sample"], "sampled"),
        (["--risk", "0.1"], "0.3"),
    ],
)
def test_a_call_that_differs_is_an_error_that_names_the_difference(calibrated, folder, options, difference):
    call = [
        "generate",
        image(folder),
        "--calibration",
        calibrated[0],
        "--any-image",
        *([] if "--risk" in options else ["--risk", "0.3"]),
    ]
    with pytest.raises(RevisitError, match=difference):
        run(*call, *options)
    if difference != "0.3":
        marked = run(*call, *options, "--any-calibration", "--json").stdout
        assert json.loads(marked.splitlines()[-1])["promise"].startswith("No rate is promised")


def test_another_model_is_an_error(calibrated, folder):
    model, processor = revisit.load("tiny")
    with __import__("torch").no_grad():
        next(model.parameters())[0] += 1
    with pytest.raises(RevisitError, match="not the one that was calibrated"):
        revisit.ask((model, processor), image(folder), risk=0.3, calibration=calibrated[0])


def test_a_file_that_was_edited_is_an_error(calibrated, tmp_path, folder):
    stored = json.loads(calibrated[0].read_text())
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(stored | {"risk": 0.1}))
    with pytest.raises(RevisitError, match="changed after"):
        run("generate", image(folder), "--risk", "0.1", "--calibration", path)
    path.write_text("{}")
    with pytest.raises(RevisitError, match="not a calibration"):
        run("generate", image(folder), "--risk", "0.1", "--calibration", path)


def test_eval_keeps_to_the_calibration(calibrated, folder, tmp_path):
    common = (
        "eval",
        "-b",
        "chair",
        "--data",
        folder,
        "--limit",
        "3",
        "--quiet",
        "--risk",
        "0.3",
        "--calibration",
        calibrated[0],
    )
    run(*common, "--out", tmp_path / "runs")
    (log,) = (tmp_path / "runs" / "logs").iterdir()
    assert json.loads(log.read_text().splitlines()[0])["spec"]["settings"]["floor"] > 0
    with pytest.raises(RevisitError, match="max_new_tokens"):
        run(*common, "--out", tmp_path / "other", "--max-new-tokens", "7")


def test_too_few_images_are_found_before_anything_is_decoded(folder, monkeypatch):
    monkeypatch.setattr(revisit, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(RevisitError, match="24 images can certify"):
        run("calibrate", "--data", folder, "--risk", "0.01", "--out", folder / "none.json")


def test_a_risk_that_no_floor_reaches(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path))
    monkeypatch.setattr(rates.Rate, "sealed", lambda **_: pytest.fail("certified"))
    from revisit.calibration import calibrate

    monkeypatch.setattr(calibrate, "FLOORS", (0.0,))
    result = run(*CALIBRATE, "--data", folder, "--limit", "12", "--out", tmp_path / "none.json", status=1)
    assert "could not be certified" in result.stdout
    assert not (tmp_path / "none.json").exists()


def test_a_threshold_for_finished_texts(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path))
    path = tmp_path / "filter.json"
    run(*CALIBRATE, "--data", folder, "--bound", "expectation", "--out", path)
    checked = revisit.check("tiny", image(folder), "There is a room. There is a zebra.", risk=0.3, calibration=path)
    assert checked.threshold == json.loads(path.read_text())["threshold"]
    assert "zebra" not in checked.kept()
    assert checked.notes[0].startswith("At most 0.3")
    with pytest.raises(RevisitError, match="no calibration for this"):
        revisit.ask("tiny", image(folder), risk=0.3, calibration=path)


def test_without_a_risk_the_settings_of_check_are_chosen(folder, tmp_path):
    run("calibrate", "--data", folder, "--batch-size", "12", "--out", tmp_path / "entry.json", "--quiet")
    entry = json.loads((tmp_path / "entry.json").read_text())["check"]
    assert set(entry) == {"layer", "threshold", "auroc"}
    assert 0.7 < entry["auroc"] <= 1


def test_a_model_folder_gets_the_entry(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    model, processor = revisit.load("tiny")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    run(*CALIBRATE, "--model", tmp_path / "model", "--data", folder)
    entries = json.loads((tmp_path / "model" / "generation_config.json").read_text())["rates"]
    (rate,) = (entry for entry in entries if entry["bound"] == "floor")  # instead of the one that `tiny` has
    assert rate["risk"] == 0.3
    assert revisit.ask(tmp_path / "model", image(folder), risk=0.3).promise


def test_bad_uses(folder):
    with pytest.raises(RevisitError, match="needs a risk"):
        run("generate", image(folder), "--calibration", "guard.json")
    with pytest.raises(RevisitError, match="--out"):
        run("calibrate", "--data", folder, "--risk", "0.3")
    with pytest.raises(RevisitError, match="leave out floor"):
        run(*CALIBRATE, "--data", folder, "--set", "floor=0.1", "--out", "none.json")


def test_tiny_has_certified_entries(folder):
    answer = revisit.ask("tiny", image(folder), risk=0.2)
    assert answer.trace.method["floor"] > 0
    assert "0.2 of captions" in answer.promise
    checked = revisit.check("tiny", image(folder), "There is a room. There is a zebra.", risk=0.2)
    assert "zebra" not in checked.kept()
    with pytest.raises(RevisitError, match=r"0\.1 was not certified, but 0\.2 was"):
        revisit.ask("tiny", image(folder), risk=0.1)
