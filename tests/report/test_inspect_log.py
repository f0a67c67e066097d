"""A run as inspect_ai logs, read back by inspect_ai itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
from fake_grid import HashEngine, make_plan, write_items

from revisit.cli.main import app
from revisit.evaluation.runner import run
from revisit.evaluation.store import read_results

log = pytest.importorskip("inspect_ai.log", reason="inspect-ai is not installed")


def test_a_run_is_read_by_inspect(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 5)
    results = run(make_plan(tmp_path / "run", data, models=("m1",)), engine_for=HashEngine)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--to", "inspect"])
    assert done.exit_code == 0, done.output
    cells = {Path(cell["path"]).name: cell for cell in results["cells"]}
    files = sorted((tmp_path / "run" / "inspect").glob("*.eval"))
    assert {file.stem for file in files} == set(cells)
    for file in files:
        cell, found = cells[file.stem], log.read_eval_log(str(file))
        assert found.status == "success"
        assert found.eval.model == f"revisit/m1:{cell['method']['label']}"
        assert found.stats.started_at <= found.stats.completed_at
        assert len(found.samples) == 5
        metrics = found.results.scores[0].metrics
        assert metrics["vowels"].value == pytest.approx(100 * cell["metrics"]["vowels"]["value"])
        sample = found.samples[0]
        assert sample.input[0].content[-1].text == sample.messages[0].text
        assert sample.output.completion == sample.scores["letters"].answer
        assert 0 <= sample.scores["letters"].value["vowels"] <= 100
        assert "steps" in sample.metadata["decoding"]


def test_a_run_without_answers_is_refused(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 5)
    run(make_plan(tmp_path / "run", data, models=("m1",)), engine_for=HashEngine)
    for cell in read_results(tmp_path / "run")["cells"]:
        (tmp_path / "run" / cell["path"] / "answers.jsonl").write_text("")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--to", "inspect"])
    assert "contains no answers yet" in str(done.exception)
    assert not (tmp_path / "run" / "inspect").exists()
