"""`revisit generate --html --figure --trace`, `revisit lens`, `revisit ui`: what they write and what they refuse."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import families
from revisit import ReVisiT, RevisitError
from revisit.cli.generate import numbered
from revisit.cli.main import app
from revisit.models.config import describe_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model on disk, and two pictures."""
    path = tmp_path_factory.mktemp("model")
    model, processor = families.build("llava")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    families.picture(1, (90, 60)).save(path / "a.png")
    families.picture(2, (60, 60)).save(path / "b.png")
    return path


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_generate_writes_a_page_per_answer_and_a_table(folder: Path, tmp_path: Path) -> None:
    common = ("--model", str(folder), "--max-new-tokens", "5", "--set", "alpha=0.05")
    pictures = [str(folder / "a.png"), str(folder / "b.png")]
    result = run(
        "generate", *pictures, *common, "--html", str(tmp_path / "out.html"), "--trace", "--compare-with", "greedy"
    )
    assert result.exit_code == 0
    assert "steps changed" in result.output
    for number, width in ((1, 90), (2, 60)):
        text = (tmp_path / f"out-{number}.html").read_text("utf-8")
        data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
        assert data["images"][0]["w"] == width
        assert [answer["method"]["name"] for answer in data["answers"]] == ["revisit", "greedy"]
        assert not any("seconds" in answer for answer in data["answers"])  # recording takes time of its own
        assert len(data["says"]) == 16  # one entry for each vision token
        assert data["answers"][0]["method"]["alpha"] == 0.05
        assert str(folder) not in data["answers"][0]["settings"]
    assert numbered(Path("x.html"), 0, 1) == Path("x.html")


def test_a_compared_method_has_what_is_recommended_for_the_model(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    common = ("--max-new-tokens", "2", "--method", "greedy", "--compare-with", "revisit", "--html", str(page))
    assert run("generate", str(folder / "b.png"), *common).exit_code == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8"), re.S)[1])  # type: ignore[index]
    assert data["answers"][1]["method"]["neighbors"] == ReVisiT.recommended(describe_model("tiny")).neighbors
    assert data["answers"][1]["method"]["neighbors"] != ReVisiT().neighbors


def test_generate_draws_figures(folder: Path, tmp_path: Path) -> None:
    common = ("--model", str(folder), "--max-new-tokens", "4", "--set", "alpha=0.05", "--compare-with", "none")
    files = [tmp_path / name for name in ("f.png", "f.svg")]
    figures = [part for path in files for part in ("--figure", str(path))]
    result = run("generate", str(folder / "a.png"), *common, *figures, "--step", "1")
    assert result.exit_code == 0
    assert all(path.stat().st_size > 1000 for path in files)
    assert "step 1:" in files[1].read_text("utf-8")
    assert result.output.count("Wrote") == 2


def test_lens_prints_tables_and_writes_files(folder: Path, tmp_path: Path) -> None:
    common = ("--model", str(folder))
    words = ("--words", "a,b,c", "--png", str(tmp_path / "l.png"), "--html", str(tmp_path / "l.html"))
    result = run("lens", str(folder / "a.png"), *common, *words, "--layer", "3")
    assert result.exit_code == 0
    assert "words, layer 3" in result.output
    assert (tmp_path / "l.png").stat().st_size > 1000
    assert "LensView" in (tmp_path / "l.html").read_text("utf-8")
    assert (
        "the 2 of 16 patches with the most probable word"
        in run("lens", str(folder / "a.png"), *common, "--patches", "2").output
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("lens",), "No image was given"),
        (("lens", "a.png", "--words", "one"), "at least two different words"),
        (("lens", "a.png", "--png", "x.png"), "--png needs --words"),
        (("generate", "a.png", "--html", "x.html", "--beams", "2"), "cannot be combined with --beams"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(RevisitError, match=says):
        run(*arguments)


def test_a_layer_that_is_not_there(folder: Path) -> None:
    with pytest.raises(RevisitError, match="no layer 9: this model's hidden states are numbered 0 to 4"):
        run("lens", str(folder / "a.png"), "--model", str(folder), "--layer", "9")


def test_ui_says_that_its_port_is_taken(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(RevisitError, match="choose another --port"):
            run("ui", "--model", str(folder), "--port", str(taken.getsockname()[1]))
    with pytest.raises(RevisitError, match="There is no model 'nowhere-at-all'"):
        run("ui", "--model", "nowhere-at-all")
