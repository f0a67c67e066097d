"""`revisit eval` and `revisit compare` from the command line, and the recipes of the evaluation guide."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import families
from revisit import ReVisiT, evaluate, load, read_logs
from revisit.cli.main import app

KITS = Path(__file__).parents[2] / "docs" / "tutorials" / "kits"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save("llava", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def revisit(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def evaluated(model: Path, output: Path) -> str:
    return revisit(
        *("eval", "--model", model, "--method", "greedy", "--method", "revisit:alpha=0.01", "--quiet"),
        *("--benchmark", "pope,vqav2", "--data", "scenes:unusual:2", "--limit", 6, "--max-new-tokens", 5),
        *("--out", output),
    )


@pytest.fixture(scope="module")
def grid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("runs") / "first"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVISIT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        return output, evaluated(model, output)


def test_eval_prints_a_table_and_keeps_everything(grid: tuple[Path, str], model: Path) -> None:
    output, printed = grid
    logs = read_logs(output)
    assert [(log.spec.benchmark, log.spec.method) for log in logs] == [
        ("pope", "greedy"),
        ("pope", "revisit(alpha=0.01)"),
        ("vqav2", "greedy"),
        ("vqav2", "revisit(alpha=0.01)"),
    ]
    assert all(log.answered == 6 and log.spec.decoding["max_new_tokens"] == 5 for log in logs)
    assert (logs[0].spec.device, logs[0].spec.dtype) == ("cpu", "float32")
    assert logs[1].totals()["applied"] > 0 == logs[0].totals()["applied"]
    assert f"## pope · {model}" in printed
    assert "n = 6)" in printed
    assert re.search(r"\| revisit\(alpha=0\.01\) \| ", printed)


def test_evaluate_in_python_takes_a_loaded_model(grid: tuple[Path, str], model: Path, tmp_path: Path) -> None:
    pair = load(str(model))
    options = {"data": "scenes:unusual:2", "limit": 6, "max_new_tokens": 5, "out": tmp_path}
    (log,) = evaluate(pair, "pope", method=ReVisiT(alpha=0.01), **options)
    stored = next(other for other in read_logs(grid[0]) if other.spec.method == "revisit(alpha=0.01)")
    assert log.scores == stored.scores
    assert log.spec.fingerprint != stored.spec.fingerprint  # of the weights in memory, not of the files
    (again,) = evaluate(pair, "pope", method="revisit:alpha=0.01", **options)
    assert again.path == log.path
    assert len(again.answers) == 6


def test_our_answers_can_be_scored_again(grid: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    output, _ = grid
    log = read_logs(output)[0]
    data = next((tmp_path_factory.getbasetemp() / "cache").glob("scenes-unusual-2-*"))
    printed = json.loads(revisit("score", "pope", log.path, "--data", data, "--subset", "--json"))
    assert log.scores is not None
    assert printed["metrics"]["accuracy"] == log.scores.metrics["accuracy"]


def test_the_vlmevalkit_recipe_runs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict[str, Any] = {}
    for name, content in {
        "vlmeval": {},
        "vlmeval.config": {"supported_VLM": table},
        "vlmeval.vlm": {"BaseModel": type("BaseModel", (), {})},
    }.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    exec(
        (KITS / "vlmevalkit_run.py").read_text("utf-8").replace("llava-hf/llava-1.5-7b-hf", str(model)),
        {"__name__": "recipe"},
    )
    Image.new("RGB", (28, 28), (200, 30, 30)).save(tmp_path / "a.png")
    message = [{"type": "image", "value": str(tmp_path / "a.png")}, {"type": "text", "value": "What is this?"}]
    for name in ("llava-1.5-7b-revisit", "llava-1.5-7b-greedy"):
        made = table[name](max_new_tokens=4)
        assert isinstance(made.generate_inner(message, "POPE"), str)
    assert made.method.name == "greedy"


def test_a_run_that_was_killed_before_its_first_line_resumes(model: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "m-greedy-pope-0.jsonl").touch()
    options = ("--method", "greedy", "--benchmark", "pope", "--data", "scenes:unusual:2", "--limit", 1, "--quiet")
    revisit("eval", "--model", model, *options, "--max-new-tokens", 2, "--out", tmp_path)
    (log,) = read_logs(tmp_path)
    assert log.scores is not None
