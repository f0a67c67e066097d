"""`revisit lens`: tables, the page and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import families
from revisit import RevisitError
from revisit.cli.main import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random model and an image."""
    path = tmp_path_factory.mktemp("model")
    families.save("llava", path)
    families.image(1, (90, 60)).save(path / "a.png")
    return path


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["lens", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_tables_and_page(folder: Path, tmp_path: Path) -> None:
    image, common = str(folder / "a.png"), ("--model", str(folder))
    result = run(image, *common, "--words", "a,b,c", "--html", str(tmp_path / "l.html"), "--layer", "3")
    assert result.exit_code == 0
    assert "words, layer 3" in result.output
    assert "LensView" in (tmp_path / "l.html").read_text("utf-8")
    assert "the 16 of 16 patches" in run(image, *common).output


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((), "No image"),
        (("a.png", "--words", "one"), "two different words"),
        (("{folder}/a.png", "--model", "{folder}", "--layer", "9"), "no layer 9"),
    ],
)
def test_wrong_uses(folder: Path, arguments: tuple[str, ...], key: str) -> None:
    with pytest.raises(RevisitError, match=key):
        run(*(argument.format(folder=folder) for argument in arguments))
