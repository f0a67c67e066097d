"""`revisit doctor`: facts about the machine and a model's small files, and an exit status for scripts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from revisit.cli.doctor import machine_rows
from revisit.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["revisit", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "tiny", "--image-size", "128", "128", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["problems"] == []
    assert shown["machine"]["revisit"]
    assert shown["machine"]["ReVisiT's step on CPUs"].startswith(("in C", "in torch"))
    model = shown["model"]
    assert model["vision tokens of 128×128"] == "64"
    assert model["recommended"] == "layers=last, alpha=1e-05, neighbors=8, weight=agreement"
    # 64 tokens × 256 numbers × 4 bytes = 64 KB an image
    assert model["layers=last"] == "5; states 0.1 MB per image"


def test_an_unsupported_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert run(monkeypatch, str(tmp_path)) == 1
    out = capsys.readouterr().out
    assert "✗" in out
    assert "gpt2" in out


def test_every_extra_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    shown = {name.removeprefix("extra ") for name, _ in machine_rows() if name.startswith("extra ")}
    assert shown == metadata["project"]["optional-dependencies"].keys() - {"dev"}
