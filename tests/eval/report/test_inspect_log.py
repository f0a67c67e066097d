"""Logs for inspect_ai, read back by inspect_ai itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1]))
from fake_grid import HashEngine, make_config, write_items

from revisit.cli.main import app
from revisit.eval.run import run

inspect = pytest.importorskip("inspect_ai.log", reason="inspect-ai is not installed")


def test_a_run_is_read_by_inspect(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 5)
    logs = run(make_config(tmp_path / "run", data, model="m1"), engine_for=HashEngine)
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--to", "inspect"])
    assert done.exit_code == 0, done.output
    files = sorted((tmp_path / "run" / "inspect").glob("*.eval"))
    assert {file.stem for file in files} == {log.path.stem for log in logs}
    for log in logs:
        found = inspect.read_eval_log(str(tmp_path / "run" / "inspect" / f"{log.path.stem}.eval"))
        assert found.status == "success"
        assert found.eval.model == f"revisit/m1:{log.spec.method}"
        assert found.stats.started_at <= found.stats.completed_at
        assert len(found.samples) == 5
        assert log.scores is not None
        assert found.results.scores[0].metrics["vowels"].value == pytest.approx(log.scores.value("vowels")[0])
        sample = found.samples[0]
        assert sample.input[0].content[-1].text == sample.messages[0].text
        assert sample.output.completion == sample.scores["letters"].answer
        assert 0 <= sample.scores["letters"].value["vowels"] <= 100
        assert "steps" in sample.metadata["decoding"]
