"""`revisit doctor`: facts about the machine and a model's small files, and an exit status for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run

import families
from revisit.cli.doctor import machine_rows


def test_the_embedded_model(run: Run) -> None:
    done = run("doctor", "tiny", "--image-size", 128, 128, "--json")
    shown, model = json.loads(done.out), json.loads(done.out)["model"]
    assert (done.status, shown["problems"]) == (0, [])
    assert shown["machine"]["revisit"]
    assert model["vision tokens of 128×128"] == "64"
    assert model["recommended"] == "layers=last, alpha=1e-05, neighbors=8, weight=agreement"
    # 64 tokens × 256 numbers × 4 bytes = 64 KB per image
    assert model["layers=last"] == "5; states 0.1 MB per image"


def test_a_model_without_a_patch_map_is_supported(run: Run, tmp_path: Path) -> None:
    done = run("doctor", families.save("ovis2", tmp_path))
    assert done.status == 0
    assert "✓ ReVisiT can be used" in done.out
    assert "! Pages cannot show patches" in done.out


def test_an_unsupported_model(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    done = run("doctor", tmp_path)
    assert done.status == 1
    assert "✗" in done.out
    assert "gpt2" in done.out


def test_every_extra_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    shown = {name.removeprefix("extra ") for name, _ in machine_rows() if name.startswith("extra ")}
    assert shown == metadata["project"]["optional-dependencies"].keys() - {"dev"}
