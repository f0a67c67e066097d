"""`revisit generate`, `methods` and `models` as a user types them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import families

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from revisit.cli.main import main
from revisit.embedded.samples import sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    families.save("llava", folder / "model")
    families.picture(0).save(folder / "a.png")
    families.picture(1, (30, 50)).save(folder / "b.png")
    (folder / "bad.png").write_text("no picture")
    return folder


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command line as `python -m revisit ...` runs it, in this process (loading torch anew takes seconds)."""

    def call(*arguments: str) -> Done:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["revisit", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out = capsys.readouterr()
        return Done(int(ended.value.code or 0), out.out, out.err)

    return call


def test_json_for_two_images(run: Callable[..., Done]) -> None:
    done = run(
        "generate", "a.png", "b.png", "--model", "model", "--set", "alpha=1e-2", "--max-new-tokens", "4", "--json"
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["images"] for line in lines] == [["a.png"], ["b.png"]]
    for line in lines:
        assert line["method"]["name"] == "revisit"
        assert line["method"]["alpha"] == 0.01
        assert line["counters"]["steps"] == line["timings"]["tokens"]
        assert line["counters"]["applied"] > 0


def test_the_embedded_model_names_its_limits_for_other_pictures_only(
    run: Callable[..., Done], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample("demo").image().save(folder / "scene.png")
    own = run("generate", "scene.png", "--max-new-tokens", "2")
    assert (own.returncode, own.stderr) == (0, "")
    others = run("generate", "a.png", "b.png", "--max-new-tokens", "2").stderr
    assert others.count("note: ") == others.count("is a demonstration") == 1
    assert ".png is not like those scenes" in others or ".png (and 1 more) is not like those scenes" in others


def test_stream_equals_plain_output(run: Callable[..., Done]) -> None:
    common = ("generate", "a.png", "--model", "model", "--max-new-tokens", "4")
    assert run(*common, "--stream").stdout.strip() == run(*common).stdout.strip() != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "a.png", "--model", "model", "--method", "revisitt"), "Did you mean 'revisit'"),
        (("generate", "a.png", "--model", "model", "--set", "alpha=0"), "alpha must be a number above 0"),
        (("generate", "a.png", "--model", "model", "--set", "alpha=x"), "alpha must be a number"),
        (("generate", "a.png", "--model", "model", "--set", "alpha"), "key=value"),
        (("generate", "a.png", "--model", "model", "--set", "layers=99"), "Layer 99 does not exist"),
        (("generate", "bad.png", "--model", "model"), "not an image"),
        (("generate", "missing.png", "--model", "model"), "no image file"),
        (("generate", "a.png", "--model", "missing"), "There is no model 'missing'"),
        (("generate", "a.png", "--model", "model", "--prompt", " "), "prompt is empty"),
        (("generate", "--model", "model"), "No image was given"),
    ],
)
def test_bad_input_is_one_sentence(run: Callable[..., Done], arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_listings(run: Callable[..., Done]) -> None:
    methods = json.loads(run("methods", "--json").stdout)
    assert {"greedy", "revisit"} <= {row["name"] for row in methods}
    assert all(row["summary"] and row["cost"] and row["source"] for row in methods)
    models = {row["family"]: row["layers"] for row in json.loads(run("models", "--json").stdout)}
    assert set(families.ALL) == set(models)
    assert models["qwen2_5_vl"] == "all"
