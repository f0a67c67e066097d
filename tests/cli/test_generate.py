"""`revisit generate`, `methods` and `models` as a user types them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Run
from PIL import Image

import families
from revisit import ReVisiT
from revisit.embedded.samples import sample
from revisit.models.config import describe_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    families.save("llava", folder / "model")
    families.image(0).save(folder / "a.png")
    families.image(1, (30, 50)).save(folder / "b.png")
    sample("demo").image().save(folder / "scene.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8)).save(folder / "noise.png")
    (folder / "bad.png").write_text("no image")
    return folder


@pytest.fixture(autouse=True)
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def page_data(path: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.S)
    assert found is not None
    return json.loads(found[1])


def test_json_for_two_images(run: Run) -> None:
    done = run(
        "generate", "a.png", "b.png", "--model", "model", "--set", "alpha=1e-2", "--max-new-tokens", "4", "--json"
    )
    assert done.status == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["images"] for line in lines] == [["a.png"], ["b.png"]]
    for line in lines:
        assert line["method"]["name"] == "revisit"
        assert line["method"]["alpha"] == 0.01
        assert line["counters"]["steps"] == 4
        assert line["counters"]["applied"] > 0


@pytest.fixture
def photos(folder: Path, tmp_path: Path) -> Path:
    """Make nested folders of seven images with repeated names, one of them damaged."""
    for number, name in enumerate(["1.png", "a/1.png", "a/2.png", "b/1.png", "b/c/1.png", "b/c/2.png"]):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        families.image(number, (30 + number, 40)).save(tmp_path / "photos" / name)
    (tmp_path / "photos/b/2.png").write_bytes((tmp_path / "photos/b/1.png").read_bytes()[:100])
    return tmp_path / "photos"


def test_a_folder_is_answered_in_order_although_an_image_is_damaged(run: Run, photos: Path) -> None:
    common = ("generate", photos, "--model", "model", "--max-new-tokens", "4", "--sample", "--seed", "3")
    names = [str(path) for path in sorted(photos.rglob("*.png"))]
    together = run(*common, "--json", "--batch-size", "3")
    lines = [json.loads(line) for line in together.out.splitlines()]
    assert together.status == 3
    assert [line["images"] for line in lines] == [[name] for name in names]
    assert [name for name, line in zip(names, lines, strict=True) if "error" in line] == [str(photos / "b/2.png")]
    *listed, sentence = together.err.splitlines()
    assert [line.partition(": ")[0] for line in listed] == [str(photos / "b/2.png")[-80:]]
    assert "1 of 7 images" in sentence
    for batch_size in (1, 7):
        assert run(*common, "--json", "--batch-size", batch_size).out == together.out
    alone = run("generate", names[0], *common[2:], "--json").out
    assert alone == together.out.splitlines(keepends=True)[0]


def test_answers_of_a_folder_are_stored_and_resumed(
    run: Run, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    common = ("generate", photos, "--model", "model", "--max-new-tokens", "4", "--batch-size", "2", "--out", out)
    assert run(*common).status == 3
    expected = {path.name: path.read_bytes() for path in out.iterdir()}
    lines = expected["answers.jsonl"].splitlines(keepends=True)
    assert [len(lines), len(expected["failures.jsonl"].splitlines())] == [6, 1]
    (out / "answers.jsonl").write_bytes(lines[4] + lines[0] + lines[1][:50])  # killed while writing
    assert run(*common).status == 3
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    with monkeypatch.context() as patch:
        patch.setattr("revisit.models.loading.load", None)
        assert run(*common).status == 3  # the damaged image is tried again, and nothing is loaded for it
    assert {path.name: path.read_bytes() for path in out.iterdir()} == expected
    families.image(9, (50, 40)).save(photos / "a/1.png")  # changed
    (photos / "b/2.png").write_bytes((photos / "b/1.png").read_bytes())  # repaired
    assert run(*common).status == 0
    again = (out / "answers.jsonl").read_bytes().splitlines(keepends=True)
    assert [again[n] for n in (0, 2, 3, 5, 6)] == [lines[n] for n in (0, 2, 3, 4, 5)]
    assert again[1] != lines[1]
    assert json.loads(again[4])["images"] == [str(photos / "b/2.png")]
    assert not (out / "failures.jsonl").exists()
    for other in (("--method", "greedy"), ("--prompt", "What is it?"), ("--dtype", "float64")):
        assert "other settings" in run(*common, *other).sentence


def test_tiny_raises_an_error_for_images_unlike_its_scenes(run: Run) -> None:
    """The error names other models and the flag that overrides it; scenes print nothing on stderr."""
    own = run("generate", "scene.png", "--max-new-tokens", "2")
    assert (own.status, own.err) == (0, "")
    other = run("generate", "noise.png", "--max-new-tokens", "2")
    assert (other.status, other.out) == (2, "")
    for part in ("noise.png", "--model photo", "SmolVLM", "--any-image"):
        assert part in other.sentence
    assert run("generate", "noise.png", "--max-new-tokens", "2", "--any-image").status == 0
    assert run("lens", "noise.png").status == run("check", "noise.png", "A dog.").status == 2


def test_a_page_per_answer(run: Run, tmp_path: Path) -> None:
    options = ("--model", "model", "--max-new-tokens", "5", "--set", "alpha=0.05", "--compare-with", "greedy")
    done = run("generate", "a.png", "b.png", *options, "--html", str(tmp_path / "out.html"))
    assert done.status == 0
    for number, width in ((1, families.image(0).width), (2, 30)):
        data = page_data(tmp_path / f"out-{number}.html")
        assert data["images"][0]["w"] == width
        assert [answer["method"]["name"] for answer in data["answers"]] == ["revisit", "greedy"]
        assert len(data["predictions"]) == 16  # one entry for each vision token
        assert data["answers"][0]["method"]["alpha"] == 0.05


def test_compared_methods_use_the_models_recommendation(run: Run, tmp_path: Path) -> None:
    options = ("--max-new-tokens", "2", "--method", "greedy", "--compare-with", "revisit")
    assert run("generate", "scene.png", *options, "--html", str(tmp_path / "page.html")).status == 0
    neighbors = page_data(tmp_path / "page.html")["answers"][1]["method"]["neighbors"]
    assert neighbors == ReVisiT.recommended(describe_model("tiny")).neighbors
    assert neighbors != ReVisiT().neighbors


def test_answers_of_other_methods_are_printed_without_a_page(run: Run) -> None:
    options = ("--model", "model", "--max-new-tokens", "5", "--compare-with", "vcd", "--compare-with", "greedy")
    alone = run("generate", "a.png", "--model", "model", "--max-new-tokens", "5", "--method", "vcd").out.strip()
    first, *others = run("generate", "a.png", *options).out.splitlines()
    assert [line.partition(": ")[0] for line in others] == ["vcd", "greedy"]
    assert others[0] == f"vcd: {alone}"
    told = json.loads(run("generate", "a.png", *options, "--json").out)
    assert (told["text"], told["compared"]["vcd"]) == (first, alone)


def test_a_method_is_compared_with_itself_under_other_settings(run: Run, tmp_path: Path) -> None:
    options = ("--max-new-tokens", "2", "--compare-with", "revisit:alpha=0.5")
    assert run("generate", "scene.png", *options, "--html", str(tmp_path / "page.html")).status == 0
    alphas = [answer["method"]["alpha"] for answer in page_data(tmp_path / "page.html")["answers"]]
    assert alphas == [1e-5, 0.5]


@pytest.mark.parametrize(
    "command",
    [
        *("generate", "generate nope.jpg", "generate a.png --method nope", "lens", "check nope.jpg x"),
        *("serve --method nope", "serve --host 0.0.0.0", "serve --limits nope=1", "doctor --image-size 3"),
        *("doctor ./nope", "bench --method greedy,nope", "bench --image nope.jpg", "report nope"),
        *("ablate z", "ablate ,", "ablate --benchmark nope"),
        *("generate a.png --seed 1", "reproduce ,", "reproduce chair --models ,"),
    ],
)
def test_usage_errors_do_not_import_torch(folder: Path, command: str) -> None:
    code = (
        f"import sys; sys.argv = ['revisit', *{command.split()!r}]\n"
        "from revisit.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
