"""The commands on the embedded model: studies, an ablation, the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from revisit import ReVisiT, RevisitError
from revisit.cli.main import app
from revisit.eval.config import EvalConfig
from revisit.eval.log import read_logs
from revisit.eval.run import Reporter
from revisit.models.config import describe_model
from revisit.paper import published, report
from revisit.paper.ablation import paper_panels, with_panels
from revisit.paper.study import Subject

pytestmark = pytest.mark.usefixtures("nltk_data")
SCENES = "scenes:unusual:4:7"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.fixture(scope="module")
def command(root: Path, nltk_data: None) -> Callable[..., str]:
    def call(*words: str) -> str:
        result = CliRunner(env={"REVISIT_CACHE": str(root / "cache")}).invoke(app, list(words), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return call


@pytest.fixture(scope="module")
def measured(root: Path, command: Callable[..., str]) -> Path:
    """Run three studies into one folder."""
    out = root / "out"
    common = ["--data", SCENES, "--out", str(out), "-q"]
    for study in ("hallucinated-steps", "gt-vs-hal"):
        command("analyze", study, *common, "--max-new-tokens", "40")
    command("analyze", "projection", *common)
    return out


def test_studies_of_other_settings_in_the_same_folder_keep_their_captions(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(root / "cache"))
    subjects = [Subject(data=SCENES, out=str(root / "two"), limit=1, max_new_tokens=n) for n in (3, 5, 3)]
    first, longer, again = ([caption.tokens for caption in subject.captions(Reporter())] for subject in subjects)
    assert len(longer[0]) == 5
    assert again == first


def test_captions_use_the_settings_recommended_for_the_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stop(config: EvalConfig, reporter: Reporter) -> None:
        raise Stopped(*config.methods_for("tiny"))

    monkeypatch.setenv("REVISIT_CACHE", str(root / "cache"))
    monkeypatch.setattr("revisit.paper.study.run", stop)
    with pytest.raises(Stopped) as stopped:
        Subject(data=SCENES, method=("revisit",)).captions(Reporter())
    assert stopped.value.args == (ReVisiT.recommended(describe_model("tiny")),)


def test_an_output_folder_that_cannot_be_written_fails_before_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    never_run = report.STUDIES["projection"]._replace(run=lambda *_: pytest.fail("The study was run."))
    monkeypatch.setitem(report.STUDIES, "projection", never_run)
    with pytest.raises(RevisitError, match="Cannot write"):
        report.run_study("projection", Subject(data=SCENES, out=str(tmp_path / "file")), Reporter())


def test_studies_are_stored_with_what_made_them(measured: Path) -> None:
    found = {f["study"]: f for path in measured.glob("studies/*.json") for f in [json.loads(path.read_text())]}
    assert set(found) == {"hallucinated-steps", "gt-vs-hal", "projection"}
    for about in found.values():
        assert about["settings"]["data"] == SCENES
        assert about["settings"]["items"] == 4
        assert about["command"]
    (log,) = read_logs(measured / "captions")
    assert len(log.answers) == 4  # decoded once for all studies
    steps, sums = found["hallucinated-steps"]["result"], found["gt-vs-hal"]["result"]
    assert steps["captions"] == 4
    assert steps["selection"] == sums["selection"]  # of the same captions
    assert len(steps["steps"]) == steps["selection"]["kept"]
    if steps["steps"]:
        assert steps["greedy_agreement"] == 1.0
    tokens = found["projection"]["result"]
    assert tokens["tokens"] == 4 * 64
    for row in tokens["layers"]:
        shares = [entry["recall"] for entry in row["objects"]]
        assert shares == sorted(shares)
        assert all(a["recall"] <= b["recall"] for a, b in zip(row["full"], row["objects"], strict=True))


def test_an_ablation_then_the_report(measured: Path, command: Callable[..., str]) -> None:
    words = ["ablate", "c", "--data", SCENES, "--limit", "2", "--max-new-tokens", "12"]
    text = command(*words, "--out", str(measured / "grid"), "-q")
    assert "(c) Selection metric · chair · tiny" in text
    logs = read_logs(measured / "grid")
    assert [log.spec.method.name for log in logs] == ["greedy", "revisit", "revisit", "revisit"]
    assert [log.totals()["vision_tokens"] for log in logs] == [128] * 4
    before = [path.stat().st_mtime_ns for path in measured.glob("grid/logs/*.jsonl")]
    command(*words, "--out", str(measured / "grid"), "-q")
    assert [path.stat().st_mtime_ns for path in measured.glob("grid/logs/*.jsonl")] == before  # answered once
    command("report", str(measured))
    page = (measured / "report.html").read_text()
    for words_of_page in ("What single vision tokens predict", "(c) Selection metric", "scenes:unusual:4:7"):
        assert words_of_page in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["analyze", "projection", "--model", "nowhere/none"], "--data is missing"),
        (["analyze", "projecton"], "Did you mean 'projection'"),
        (["analyze", "projection", "--method", "greedy"], "--method cannot be used with projection"),
        (["analyze", "case-study", "--method", "vcd", "--data", SCENES], "Case studies need ReVisiT"),
        (["ablate", "e"], "Unknown panel 'e'"),
        (["bench", "--method", "revisit:alpha=7", "--model", "nowhere/none"], "alpha must be"),
        (["analyze", "projection", "--data", "scenes:unsual:3"], "Did you mean 'unusual'"),
        (["report", "nowhere"], "is not a folder"),
    ],
)
def test_bad_input_raises(words: list[str], message: str) -> None:
    with pytest.raises(RevisitError, match=message):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_case_studies_with_an_adaptive_weight_print_the_weight_of_each_step(
    root: Path, command: Callable[..., str]
) -> None:
    out = root / "cases"
    command(
        *("analyze", "case-study", "--method", "revisit:weight=agreement,alpha=0.1", "--data", SCENES),
        *("--out", str(out), "--max-new-tokens", "40", "-q"),
    )
    (path,) = out.glob("studies/*.json")
    result = json.loads(path.read_text())["result"]
    assert result["method"]["weight"] == "agreement"
    assert result["cases"]
    for case in result["cases"]:
        for row in case["rows"]:
            assert row["base"][0] + row["vision"][0] <= row["final"][0] <= row["base"][0]  # a weight from 0 to 1


def test_the_papers_panels_have_the_papers_rows_and_every_method_is_run_once() -> None:
    base = ReVisiT(layers="all")
    panels = paper_panels(base)
    for key, rows in published.table("ablation")["panels"].items():
        columns = panels[key].columns
        mine = {tuple(getattr(method, name) for name in columns) for method in panels[key].methods}
        assert mine == {tuple(row[name] for name in columns) for row in rows}
        assert base in panels[key].methods
    methods = with_panels(EvalConfig(), panels).methods_for("tiny")
    assert methods[0].name == "greedy"
    assert len(set(methods)) == len(methods) == 1 + 4 + 12 + 3 + 7 - 3  # the main configuration is in every panel
