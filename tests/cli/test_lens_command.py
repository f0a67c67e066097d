"""`revisit lens`: tables, the page and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Run

import families
from revisit.errors import RevisitError
from revisit.models import loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random model and an image."""
    path = tmp_path_factory.mktemp("model")
    families.save("llava", path)
    families.image(1, (90, 60)).save(path / "a.png")
    return path


def test_tables_and_page(run: Run, folder: Path, tmp_path: Path) -> None:
    command = ("lens", folder / "a.png", "--model", folder)
    done = run(*command, "--words", "a,b,c", "--html", tmp_path / "l.html", "--layer", 3)
    assert done.status == 0
    assert "words, layer 3" in done.out
    assert "LensView" in (tmp_path / "l.html").read_text("utf-8")
    assert "the 16 of 16 patches" in run(*command).out


def test_a_layer_that_does_not_exist(run: Run, folder: Path) -> None:
    done = run("lens", folder / "a.png", "--model", folder, "--layer", 9)
    assert done.status == 2
    assert "no layer 9" in done.sentence


@pytest.mark.parametrize("command", [("lens",), ("check", "a")])
def test_the_data_type_and_the_device_can_be_chosen(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    asked = {}

    def load(name: str, **options: object) -> None:
        asked.update(options)
        raise RevisitError("stop")

    monkeypatch.setattr(loading, "load", load)
    name, *text = command
    run(name, folder / "a.png", *text, "--model", folder, "--dtype", "bfloat16", "--device-map", "cpu")
    assert (asked["dtype"], asked["device_map"]) == ("bfloat16", "cpu")
