"""Reproducing the paper's tables: rows, plans, verdicts, and whole rows with the embedded model, killed and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from paper_data import stand_in_data
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import get
from revisit.eval.benchmarks.base import Metric, Scores
from revisit.eval.config import EvalConfig
from revisit.eval.statistics import Interval
from revisit.explain.files import read_lines
from revisit.methods.icd import ICD
from revisit.methods.revisit import ReVisiT
from revisit.methods.vcd import VCD
from revisit.paper import catalog, published
from revisit.paper.published import Measured, comparison_table, decimals, verdict
from revisit.paper.reproduce import _values, study_verdicts


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "revisit", "reproduce", *arguments]


def test_every_published_table_belongs_to_a_row() -> None:
    assert {row.published for row in catalog.ROWS.values() if row.published} == set(published.data()["tables"])
    for row in catalog.ROWS.values():
        assert set(row.models) <= set(catalog.MODELS)
        if row.kind == "grid":
            assert set(row.models) == set(published.table(row.published))
            assert set(row.methods) == set(published.table(row.published)[row.models[0]])


def test_answers_follow_from_items_methods_and_passes() -> None:
    row = catalog.ROWS["models"]
    assert (catalog.answers(row), catalog.answers(row, limit=10)) == (1000, 20)
    with pytest.raises(RevisitError, match=r"Unknown table 'chiar'\. Did you mean 'chair'"):
        catalog.find("pope,chiar")
    assert {*catalog.ROWS} - {row.key for row in catalog.find("all")} == {"methods"}  # which is not of the paper


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (50.0, None, "not run"),
        (50.0, Measured(51.0), "no interval"),
        (50.0, Measured(51.0, 49.0, 53.0), "inside"),
        (50.0, Measured(52.0, 50.04, 53.0), "inside"),  # 50.0 may be 50.049
        (50.0, Measured(52.0, 50.06, 53.0), "outside"),
        (81.16, Measured(82.0, 81.17, 83.0), "outside"),
        (81.16, Measured(82.0, 81.164, 83.0), "inside"),
        (80.0, Measured(100.0, 100.0, 100.0), "no interval"),  # every item counts alike: nothing to resample
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
    assert found == {"Overall": Measured(50.0, 40.0, 60.0), "Art Theory": Measured(25.0, 40.0, 60.0)}


def test_a_table_counts_its_verdicts() -> None:
    theirs = {"greedy": {"F1": 80.0}, "revisit": {"F1": 81.0}, "vcd": {"F1": 70.0}}
    ours = {"greedy": {"F1": Measured(80.5, 79.0, 82.0)}, "revisit": {"F1": Measured(90.0, 89.0, 91.0)}}
    table = comparison_table(theirs, ours, "Made up.")
    assert table.caption == "Made up. 1 inside, 1 not run, 1 outside."
    assert [str(getattr(cell, "text", cell)) for cell in table.rows[1]] == ["ReVisiT", "81.00", "90.00", "+9.00"]
    assert table.rows[2][-1] == "not run"


def test_latency_is_compared_method_by_method() -> None:
    table = study_verdicts(
        catalog.ROWS["latency"],
        "LLaVA-1.5-7B",
        {"rows": [{"method": "greedy", "ms": 30.0}, {"method": "vcd", "ms": None}]},
    )
    assert len(table.rows) == 7
    assert [str(getattr(cell, "text", cell)) for cell in table.rows[0]][::2] == ["Greedy", "30.00"]
    assert sum(row[-1] == "not run" for row in table.rows) == 6


def test_the_last_printed_digit_is_that_of_the_column() -> None:
    """44.40 in a column of two decimals is not 44.4, which may be 44.449."""
    ours = {"greedy": {"aAcc": Measured(46.0, 44.43, 48.0)}}
    alone = comparison_table({"greedy": {"aAcc": 44.4}}, ours, "Alone.")
    assert alone.caption == "Alone. 1 inside."
    among = comparison_table({"greedy": {"aAcc": 44.4}, "vcd": {"aAcc": 44.77}}, ours, "Among others.")
    assert among.caption == "Among others. 1 not run, 1 outside."


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
    typed = EvalConfig(
        benchmark=["vqav2:suffix=short"], data="scenes:unusual:2", preset="paper", limit=3, max_new_tokens=7
    )
    assert (typed.benchmarks[0].suffix, typed.limit_of("vqav2")) == ("short", 3)  # type: ignore[attr-defined]
    assert typed.decoding_for(typed.benchmarks[0]).max_new_tokens == 7
    with pytest.raises(RevisitError, match=r"Unknown preset 'papr'\. Did you mean 'paper'"):
        EvalConfig(preset="papr", data="scenes:unusual:2").check()


def test_the_list_and_a_plan_are_printed_without_loading_a_model() -> None:
    listed = subprocess.run(command("--list"), capture_output=True, text=True, check=True).stdout
    for key in catalog.ROWS:
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


def test_the_row_of_eight_models_has_each_of_them(tmp_path: Path, nltk_data: None) -> None:
    words = ["reproduce", "models", "--model", "tiny", "--limit", "1", "--data", "scenes:unusual:4:7", "--quiet"]
    CliRunner().invoke(app, [*words, "--out", str(tmp_path)], catch_exceptions=False)
    text = (tmp_path / "report.md").read_text()
    assert text.count("| ReVisiT |") == 8
    assert "not run" not in text


def test_methods_are_shown_with_scores_and_times_or_why_they_do_not_run(
    tmp_path: Path, nltk_data: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = catalog.ROWS["methods"]
    few = replace(row, methods=("greedy", "opera", "icd"), tokens=3)
    monkeypatch.setitem(catalog.ROWS, "methods", few)

    def unsupported(self: ICD, run: object) -> None:
        raise RevisitError("No such prompt here.")

    monkeypatch.setattr(ICD, "begin", unsupported)
    words = ["reproduce", "methods", "--model", "tiny", "--limit", "1", "--data", "scenes:unusual:4:7", "--quiet"]
    CliRunner().invoke(app, [*words, "--out", str(tmp_path)], catch_exceptions=False)
    text = (tmp_path / "report.md").read_text()
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in text.splitlines()}
    assert lines["greedy"] == ["greedy", "1.00"]
    assert float(lines["opera"][1]) > 1
    assert text.count("| opera | ") >= 3  # scores of two benchmarks, and the time
    assert lines["icd"] == ["icd", "No such prompt here."]
    (times,) = tmp_path.glob("time-*.json")
    times.write_text(times.read_text().replace("No such prompt here.", "Stored."))
    CliRunner().invoke(app, [*words, "--out", str(tmp_path)], catch_exceptions=False)  # from what is stored, times too
    again = (tmp_path / "report.md").read_text()
    assert again.replace("Stored.", "No such prompt here.") == text


def test_studies_are_shown_with_the_papers_numbers_and_verdicts(tmp_path: Path, nltk_data: None) -> None:
    rows = "projection,hallucinated-steps,gt-vs-hal,token-tables"
    words = ["reproduce", rows, "--model", "tiny", "--limit", "1", "--data", "scenes:unusual:4:7", "--quiet"]
    CliRunner().invoke(app, [*words, "--out", str(tmp_path)], catch_exceptions=False)
    text = (tmp_path / "report.md").read_text()
    assert len(list(tmp_path.glob("analyses/studies/*.json"))) == 4
    assert text.count("recall@k: difference") == 1
    assert "| top-1 | 2.03 | " in text  # the paper's recall at the final layer, and ours


def test_generated_data_fills_every_cell(tmp_path: Path) -> None:
    """The folder has nine settings of POPE, thirty subjects of MMMU, and LLaVA-Bench (for tests/faults/paper_rows.py)."""
    folder = stand_in_data(tmp_path)
    pope = get("pope").load(folder)
    settings = Counter(item.meta["setting"] for item in pope)
    assert set(settings) == {name.split("/")[0] for name in published.table("pope_full")["LLaVA-1.5-7B"]["greedy"]}
    assert set(settings.values()) == {6}
    assert Counter(item.meta["label"] for item in pope) == {"yes": 27, "no": 27}
    subjects = {item.id.removeprefix("validation_").removesuffix("_1") for item in get("mmmu").load(folder)}
    printed = set(published.table("mmmu_subjects")["LLaVA-1.5-7B"]["greedy"]) - {"Overall"}
    assert subjects == {name.replace(" ", "_") for name in printed}
    assert [len(get(name).load(folder)) for name in ("vqav2", "llava_bench")] == [18, 4]
    for name in ("pope", "mmmu", "vqav2", "llava_bench", "hallusionbench"):
        assert all(image.is_file() for item in get(name).load(folder) for image in item.images)
    assert stand_in_data(tmp_path) == folder  # made once


def _answers(out: Path) -> set[tuple[str, str, str]]:
    rows = ((path.name, row) for path in out.glob("runs/logs/*.jsonl") for row in read_lines(path)[0])
    return {(name, row["id"], row["text"]) for name, row in rows if "text" in row}
