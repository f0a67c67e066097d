"""Reproducing the paper's tables: rows, plans, verdicts, and whole rows with the embedded model, killed and resumed."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Metric, Scores
from revisit.eval.config import EvalConfig
from revisit.eval.statistics import Interval
from revisit.io.files import read_lines
from revisit.methods.revisit import ReVisiT
from revisit.methods.vcd import VCD
from revisit.paper import latency, published
from revisit.paper.published import Measured, comparison_table, decimals, verdict
from revisit.paper.reproduce import _values


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "revisit", "reproduce", *arguments]


def test_every_published_table_belongs_to_a_row() -> None:
    assert {row.published for row in published.ROWS.values() if row.published} == set(published.data()["tables"])
    for row in published.ROWS.values():
        assert set(row.models) <= set(published.MODELS)
        if row.kind == "grid":
            assert set(row.models) == set(published.table(row.published))
            assert len(row.methods) == row.answers
    assert published.find("all") == list(published.ROWS.values())
    with pytest.raises(RevisitError, match=r"Unknown table 'chiar'\. Did you mean 'chair'"):
        published.find("pope,chiar")


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (50.0, None, "not run"),
        (50.0, (51.0, math.nan, math.nan), "no interval"),
        (50.0, (51.0, 49.0, 53.0), "inside"),
        (50.0, (52.0, 50.04, 53.0), "inside"),  # 50.0 may be 50.049
        (50.0, (52.0, 50.06, 53.0), "outside"),
        (81.16, (82.0, 81.17, 83.0), "outside"),
        (81.16, (82.0, 81.164, 83.0), "inside"),
        (80.0, (100.0, 100.0, 100.0), "no interval"),  # every item counts alike: nothing to resample
    ],
)
def test_verdicts(theirs: float, ours: Measured | None, expected: str) -> None:
    assert verdict(theirs, ours, decimals(theirs)) == expected


def test_the_mean_over_subjects_is_the_papers_overall() -> None:
    names = ("macro", "Art_Theory/accuracy")
    scores = Scores(
        dict(zip(names, (0.5, 0.25), strict=True)),
        shown={name: Metric(name, "higher", 100) for name in names},
        intervals=dict.fromkeys(names, Interval(0.4, 0.6, "bootstrap")),
    )
    found = _values(SimpleNamespace(scores=scores), ["Overall", "Art Theory", "Music"])
    assert found == {"Overall": (50.0, 40.0, 60.0), "Art Theory": (25.0, 40.0, 60.0)}


def test_a_table_counts_its_verdicts_to_the_last_digit_of_a_column() -> None:
    theirs = {"greedy": {"F1": 44.4}, "revisit": {"F1": 81.0}, "vcd": {"F1": 70.0}}
    ours: dict[str, dict[str, Measured]] = {
        "greedy": {"F1": (46.0, 44.43, 48.0)},
        "revisit": {"F1": (90.0, 89.0, 91.0)},
    }
    table = comparison_table(theirs, ours, "Made up.")
    assert table.caption == "Made up. 1 inside, 1 not run, 1 outside."
    assert [str(getattr(cell, "text", cell)) for cell in table.rows[1]] == ["revisit", "81.00", "90.00", "+9.00"]
    assert table.rows[2][-1] == "not run"
    among = comparison_table({**theirs, "vcd": {"F1": 44.77}}, ours, "44.40 in a column of two decimals is exact.")
    assert among.caption.endswith(" 1 not run, 2 outside.")


def test_the_papers_preset_is_its_protocol() -> None:
    names = ["chair", "hallusionbench", "mmmu", "vqav2", "pope"]
    config = EvalConfig(benchmark=names, method=["vcd", "revisit"], data="scenes:unusual:2", preset="paper")
    config.check()
    found = {b.name: b for b in config.benchmarks}
    assert {config.decoding_for(b).max_new_tokens for b in config.benchmarks} == {512}
    assert (found["hallusionbench"].part, found["mmmu"].keep) == ("VD", "single-image")  # type: ignore[attr-defined]
    assert (found["vqav2"].suffix, found["pope"].suffix) == ("none", "none")  # type: ignore[attr-defined]
    assert config.limit_of("vqav2") == 500
    assert config.limit_of("chair") is None
    assert config.methods_for("tiny") == (VCD.official(), ReVisiT())  # not what the embedded model recommends


def test_the_list_and_a_plan_are_printed_without_loading_a_model() -> None:
    listed = subprocess.run(command("--list"), capture_output=True, text=True, check=True).stdout
    for key in published.ROWS:
        assert f"| {key} |" in listed
    planned = subprocess.run(
        command("chair", "--models", "LLaVA-1.5-7B=/models/llava", "--plan"), capture_output=True, text=True, check=True
    ).stdout
    assert "| chair | /models/llava | 14 GB | 3,500 |" in planned
    wrong = subprocess.run(command("chair", "--models", "LLaVA"), capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "Unknown model of the paper 'LLaVA'" in wrong.stderr


@pytest.mark.timeout(900)
def test_a_row_with_the_embedded_model_killed_and_resumed(tmp_path: Path) -> None:
    """The answers of a row that was killed in the middle are those of a row that was not, and the report has them."""
    table = "vqav2"  # whose scores need no NLTK
    options = ["--model", "tiny", "--limit", "2", "--batch-size", "1", "--data", "scenes:unusual:6"]
    whole = subprocess.run(command(table, *options, "--out", str(tmp_path / "whole")), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    killed = subprocess.Popen(
        command(table, *options, "--out", str(tmp_path / "killed")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not _answers(tmp_path / "killed") and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = _answers(tmp_path / "killed")
    assert before
    again = subprocess.run(command(table, *options, "--out", str(tmp_path / "killed")), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert _answers(tmp_path / "killed") == _answers(tmp_path / "whole")
    text = (tmp_path / "killed" / "report.md").read_text()
    assert "takes the place of all models of the paper" in text
    assert "published" in text
    assert "inside" in text or "outside" in text


def report_of(row: str, out: Path) -> str:
    words = ["reproduce", row, "--model", "tiny", "--limit", "1", "--data", "scenes:unusual:4:7", "--quiet"]
    CliRunner().invoke(app, [*words, "--out", str(out)], catch_exceptions=False)
    return (out / "report.md").read_text()


def test_the_row_of_eight_models_has_each_of_them(tmp_path: Path, nltk_data: None) -> None:
    text = report_of("models", tmp_path)
    assert text.count("| revisit |") == 8
    assert "not run" not in text


def test_studies_are_shown_with_the_papers_numbers_and_verdicts(tmp_path: Path, nltk_data: None) -> None:
    text = report_of("projection,hallucinated-steps,gt-vs-hal,token-tables", tmp_path)
    assert len(list(tmp_path.glob("analyses/studies/*.json"))) == 4
    assert text.count("recall@k: difference") == 1
    assert text.count("Case studies · tiny") == 1  # although the paper has two models
    assert "| top-1 | 2.03 | " in text  # the paper's recall at the final layer, and ours


def test_latency_is_measured_image_by_image_and_resumes(
    tmp_path: Path, nltk_data: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "PROTOCOL", {"warmups": 1, "repeats": 2, "max_new_tokens": 6})
    monkeypatch.setattr(published.Exhibit, "methods", ("greedy", "revisit"))
    text = report_of("latency", tmp_path)
    assert text.count("| greedy | 26.00 | ") == 1  # the paper's LLaVA-1.5-7B
    assert text.count("| – | not run |") == 2 * 5  # the other methods of both models
    monkeypatch.setattr(latency, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert report_of("latency", tmp_path) == text


def _answers(out: Path) -> set[tuple[str, str, str]]:
    rows = ((path.name, row) for path in out.glob("runs/logs/*.jsonl") for row in read_lines(path)[0])
    return {(name, row["id"], row["text"]) for name, row in rows if "text" in row}
