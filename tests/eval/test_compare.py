"""Comparisons: values, ranks, tests, tables, and logs that cannot be compared."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_grid import HashEngine, Letters, Shift, make_config, write_items
from rich.console import Console

from revisit.decoding.method_id import MethodId
from revisit.errors import RevisitError
from revisit.eval import statistics
from revisit.eval.benchmarks.base import Metric
from revisit.eval.compare import Comparison, Value, compare, ranks
from revisit.eval.log import Log, read_logs
from revisit.eval.report.comparisons import (
    WRITERS,
    comparison_sections,
    footnotes,
    short_names,
    tables_of,
    to_csv,
    verdict,
)
from revisit.eval.report.document import section_markdown
from revisit.eval.report.sample_browser import PageColumns
from revisit.eval.report.terminal import print_section
from revisit.eval.run import run
from revisit.paper.report import compare_runs

METHODS = (Shift(by=0), Shift(by=1), Shift(by=2))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Log]:
    root = tmp_path_factory.mktemp("grid")
    data = write_items(root / "data", 40)
    run(make_config(root / "out", data, model="m1", method=METHODS), engine_for=HashEngine)
    return read_logs(root / "out")


def test_values_come_from_the_scores_and_tests_from_the_statistics(logs: list[Log]) -> None:
    (table,) = compare(logs, resamples=499)
    scores = {log.spec.method: log.scores for log in logs if log.scores}
    assert table.baseline == "shift"  # the first, because greedy was not run
    assert list(table.values) == ["shift", "shift(by=1)", "shift(by=2)"]
    assert table.n == 40
    terms = {method: own.per_item["vowels"] for method, own in scores.items()}
    for method, values in table.values.items():
        value = values["vowels"]
        assert value.value == scores[method].metrics["vowels"]
        if method != "shift":
            assert value.paired is not None
            paired = statistics.paired(terms["shift"], terms[method], resamples=499)
            assert value.paired == paired.at(value.paired.level)
            assert value.p == value.paired.p_permutation
    raw = [values[m.name].p for m in table.metrics for values in table.values.values()]
    got = [values[m.name].p_holm for m in table.metrics for values in table.values.values()]
    assert [p for p in got if not math.isnan(p)] == [p for p in statistics.holm(raw) if not math.isnan(p)]
    assert any("4 tests of this table" in note for note in table.notes)


def test_ranks_go_by_what_is_printed() -> None:
    lower = Metric("CHAIRi", "lower", 100, 1)
    assert ranks([0.1301, 0.1249, 0.1252, 0.2], lower) == [2, 1, 1, 0]  # 13.0, 12.5, 12.5, 20.0
    assert ranks([0.5, 0.7, math.nan], Metric("F1", "higher", 100, 1)) == [2, 1, 0]
    assert ranks([0.5, 0.7], Metric("yes_ratio", None)) == [0, 0]
    assert ranks([0.5], lower) == [0]  # a single value is not the best
    assert ranks([0.5, 0.5001, math.nan], lower) == [0, 0, 0]  # nor are equal ones


@pytest.fixture
def table() -> Comparison:
    f1, hal = Metric("F1", "higher", 100, 1), Metric("CHAIR_i", "lower", 100, 1)
    better = statistics.Paired(-0.03, -0.04, -0.02, 0.0004, 0.0004, 500)
    return Comparison(
        model="org/m&m",
        benchmark="chair",
        scorer="v_1",
        n=500,
        metrics=(f1, hal),
        baseline=MethodId("greedy"),
        values={
            MethodId("greedy"): {"F1": Value(0.8, 0.78, 0.82, 2), "CHAIR_i": Value(0.1, rank=2)},
            MethodId("revisit"): {"F1": Value(0.85, rank=1), "CHAIR_i": Value(0.07, 0.06, 0.08, 1, better, 4e-4, 8e-4)},
            MethodId("<b>"): {"F1": Value(0.1), "CHAIR_i": Value(math.nan)},
        },
        notes=("a note",),
    )


def test_markdown(table: Comparison) -> None:
    text = section_markdown(comparison_sections([table])[0])
    assert "| Method | F1 ↑ | CHAIR_i ↓ |" in text
    assert "| greedy | 80.0 [78.0, 82.0] | 10.0 |" in text
    assert "| revisit | 85.0 | **7.0** [6.0, 8.0] |" in text  # only differences that were tested are bold
    assert "| <b> | 10.0 | - |" in text
    assert r"| revisit | – | −3.0 [−4.0, −2.0] p 8.00e-04\*\*\* |" in text
    assert "a note" in text


def test_columns_of_numbers_are_divided_among_tables_that_fit(table: Comparison) -> None:
    shown = Console(force_terminal=True, width=30, color_system=None)
    with shown.capture() as drawn:
        for section in comparison_sections([table]):
            print_section(section, shown)
    lines = drawn.get().splitlines()
    assert sum(" Method" in line for line in lines) == 2
    assert any("[78.0, 82.0]" in line for line in lines)
    assert any("[6.0, 8.0]" in line for line in lines)


def test_the_verdict_is_about_the_main_metric(table: Comparison) -> None:
    named = replace(table, headline="CHAIR_i")
    text = "CHAIR (org/m&m, n = 500): revisit improves CHAIR_i from 10.0 to 7.0 (−3.0, p = 8.00e-04); "
    assert verdict(named) == text + "<b> has CHAIR_i -, not tested."
    unsure = replace(named.values["revisit"]["CHAIR_i"], p_holm=0.2)
    values = {MethodId("greedy"): named.values["greedy"], MethodId("revisit"): {"CHAIR_i": unsure}}
    told = verdict(replace(named, values=values))
    assert told.endswith("revisit shows no significant difference in CHAIR_i (−3.0, p = 0.20).")
    worse = replace(table.metrics[1], better="higher")
    assert "revisit worsens CHAIR_i" in verdict(replace(named, metrics=(worse,)))


def test_long_settings_are_a_footnote() -> None:
    long = [MethodId("revisit", {"weight": "agreement", "neighbors": neighbors}) for neighbors in (8, 4)]
    names = short_names([MethodId("greedy"), MethodId("shift", {"by": 1}), *long])
    assert list(names.values()) == ["greedy", "shift(by=1)", "revisit¹", "revisit²"]
    assert footnotes(names) == " ¹ weight=agreement, neighbors=8. ² weight=agreement, neighbors=4."


def test_only_logs_with_the_same_questions_are_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_items(tmp_path / "data", 30)
    config = make_config(tmp_path / "out", data, model="m1", method=Shift(by=0))
    for change in ({}, {"method": Shift(by=1), "limit": 20}):
        run(config.replace(**change), engine_for=HashEngine)
    with pytest.raises(RevisitError, match=r"not run on the same items .*shift 30, shift\(by=1\) 20; 20 in common"):
        compare(read_logs(tmp_path / "out"))
    run(config.replace(model="m2"), engine_for=HashEngine)
    caplog.clear()
    assert [table.model for table in compare(read_logs(tmp_path / "out"), resamples=99)] == ["m2"]
    assert "not run on the same items" in caplog.text
    (data / "items.txt").write_text((data / "items.txt").read_text().replace("prompt 3", "PROMPT 3"))
    run(config.replace(method=Shift(by=1)), engine_for=HashEngine)
    with pytest.raises(RevisitError, match="different questions with the same id 'q3'"):
        compare([log for log in read_logs(tmp_path / "out") if log.spec.model == "m1"])


def test_methods_with_different_weights_are_not_compared(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 12)
    for by, weights in ((0, "aaaaaaaaaa"), (3, "bbbbbbbbbb")):
        config = make_config(tmp_path / "out", data, model="m1", method=Shift(by=by))
        run(config, engine_for=lambda model: HashEngine(model, weights=weights))  # noqa: B023
    tables = compare(read_logs(tmp_path / "out"), resamples=99)
    assert [table.variant for table in tables] == ["weights aaaaaaaa", "weights bbbbbbbb"]
    assert [list(table.values) for table in tables] == [["shift"], ["shift(by=3)"]]
    assert "letters, m1, weights aaaaaaaa (" in tables_of(tables[0])[0].caption


def test_two_versions_of_a_scorer_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CHAIR's version depends on whether NLTK's data is installed; its options do not."""
    config = make_config(tmp_path / "out", write_items(tmp_path / "data", 12), model="m1", method=Shift())
    run(config, engine_for=HashEngine)
    monkeypatch.setattr(Letters, "version", "letters-plain-2")
    run(config, engine_for=HashEngine)
    logs = read_logs(tmp_path / "out")
    variants = ["scorer letters-plain-1", "scorer letters-plain-2"]
    assert [table.variant for table in compare(logs)] == variants
    assert [column["settings"] for column in PageColumns(logs).methods] == variants
    assert len(compare_runs({"out": logs}, resamples=99)) == 2


def test_a_method_is_found_by_its_name_if_only_one_label_has_it(logs: list[Log]) -> None:
    """With settings recommended for the model, the label of `revisit` may be `revisit(layers=all)`."""
    (table,) = compare(logs, resamples=99)
    assert table.values["shift"] is table.values.get("shift")  # the exact label comes first
    (table,) = compare(logs[1:], resamples=99)
    with pytest.raises(RevisitError, match=r"'shift' has several settings: use one of shift\(by=1\), shift\(by=2\)"):
        table.values["shift"]
    (table,) = compare(logs[1:2])
    assert table.values["shift"] is table.values["shift(by=1)"]
    with pytest.raises(RevisitError, match="'greedy' was not compared"):
        table.values["greedy"]


def test_metrics_and_baselines_by_name(logs: list[Log]) -> None:
    (table,) = compare(logs, baseline="shift(by=2)", metrics=["y*"], resamples=99)
    assert [m.name for m in table.metrics] == ["yes"]
    assert table.baseline == "shift(by=2)"
    assert table.values["shift(by=2)"]["yes"].paired is None
    with pytest.raises(RevisitError, match=r"shfit was not run.*Did you mean 'shift'"):
        compare(logs, baseline="shfit")
    with pytest.raises(RevisitError, match=r"Unknown metric 'vowel'\. Did you mean 'vowels'"):
        compare(logs, metrics=["vowel"])


class Undirected(Letters):
    """`yes` without a better direction."""

    metrics = (Metric("vowels", "lower", 100.0, 1), Metric("yes", None, 100.0, 1))


def test_only_metrics_with_a_direction_are_tested(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 40)
    config = make_config(tmp_path / "out", data, model="m1", method=METHODS, benchmark=Undirected())
    (table,) = compare(run(config, engine_for=HashEngine), resamples=199)
    for values in list(table.values.values())[1:]:
        assert math.isnan(values["yes"].p_holm)
        assert values["yes"].paired is not None
        assert values["yes"].paired.level == 0.95
        assert not math.isnan(values["vowels"].p_holm)
    assert any("2 tests of this table" in note for note in table.notes)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> list[Log]:
    root = tmp_path_factory.mktemp("seeds")
    data = write_items(root / "data", 40)
    config = make_config(
        root / "out", data, model="m1", method=METHODS[:2], sample=True, temperature=0.7, seeds="0,1,5"
    )
    logs = run(config, engine_for=HashEngine)
    wanted = [(label, seed) for label in ("shift", "shift(by=1)") for seed in (0, 1, 5)]
    assert [(log.spec.method, log.spec.seed) for log in logs] == wanted
    return logs


def test_several_seeds_are_one_row_with_mean_and_deviation(sampled: list[Log]) -> None:
    (table,) = compare(sampled, resamples=299)
    assert list(table.values) == ["shift", "shift(by=1)"]
    for method, values in table.values.items():
        own = [log.scores.metrics["vowels"] for log in sampled if log.scores and log.spec.method == method]
        assert len(set(own)) == 3
        value = values["vowels"]
        assert value.value == pytest.approx(np.mean(own))
        assert value.std == pytest.approx(np.std(own, ddof=1))
        assert value.low < value.value < value.high
    first, second = (values["vowels"] for values in table.values.values())
    assert second.paired is not None
    assert second.paired.difference == pytest.approx(second.value - first.value)
    assert second.paired.units == 40  # items, not items times seeds
    assert any("over the seeds 0, 1, 5" in note for note in table.notes)
    shown = f"{100 * first.value:.1f} ± {100 * first.std:.1f}"
    assert shown in section_markdown(comparison_sections([table])[0])


def test_seeds_that_only_some_methods_have_are_not_compared(sampled: list[Log]) -> None:
    with pytest.raises(
        RevisitError, match=r"not run with the same seeds on letters \(shift: 0, 1, 5; shift\(by=1\): 0, 1\)"
    ):
        compare(sampled[:-1], resamples=99)


def test_a_terminal_gets_drawn_tables_and_a_pipe_markdown(logs: list[Log], capsys: pytest.CaptureFixture[str]) -> None:
    tables = compare(logs, resamples=99)
    section = comparison_sections(tables)[0]
    print_section(section)
    assert capsys.readouterr().out == section_markdown(section) + "\n\n"
    text = io.StringIO()
    print_section(section, Console(file=text, force_terminal=True, width=200, color_system=None))
    drawn = text.getvalue()
    assert "| ---" not in drawn
    assert "vowels ↓" in drawn
    assert f"minus {tables[0].baseline}" in drawn


def test_a_folder_is_not_a_list_of_logs() -> None:
    with pytest.raises(RevisitError, match="read_logs"):
        compare("runs/own")  # type: ignore[arg-type]


def test_csv_has_the_unrounded_numbers_of_the_table(table: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([replace(table, model="=m")]))))
    assert len(rows) == 6
    found = next(r for r in rows if r["method"] == "revisit" and r["metric"] == "CHAIR_i")
    assert float(found["value"]) == 0.07 * 100  # the table prints 7.0
    assert (found["baseline"], float(found["difference"])) == ("greedy", -0.03 * 100)
    assert (found["p"], found["p_holm"]) == ("0.0004", "0.0008")
    undefined = next(r for r in rows if r["method"] == "<b>" and r["metric"] == "CHAIR_i")
    assert undefined["value"] == undefined["baseline"] == ""
    assert {row["model"] for row in rows} == {"'=m"}  # not a formula


def test_notebooks_show_tables(table: Comparison, logs: list[Log]) -> None:
    assert "<td>85.0</td>" in table._repr_html_().replace("<b>85.0</b>", "85.0")
    assert "&lt;b&gt;" in table._repr_html_()
    assert len(repr(table)) < 100
    scores = logs[0].scores
    assert scores is not None
    shown = scores.shown["vowels"].text(scores.metrics["vowels"])
    assert f'<td class="w">vowels</td><td>{shown}</td>' in logs[0]._repr_html_()


def test_latex(table: Comparison) -> None:
    text = WRITERS[".tex"]([table])
    assert r"org/m\&m" in text
    assert r"revisit & \textbf{85.0} & \textbf{7.0} \\" in text
    assert r"revisit & – & $-$3.0 {\footnotesize [$-$4.0, $-$2.0], p 8.00e-04***} \\" in text
    assert r"greedy & \underline{80.0} & \underline{10.0} \\" in text
    assert [line for line in text.splitlines() if r"\label" in line] == [
        r"\label{tab:chair-org-m-m}",
        r"\label{tab:chair-org-m-m-difference}",
    ]
    assert "v_1" not in text.replace("\\", "")  # the version of a scorer is for logs
    assert r"CHAIR\_i $\downarrow$" in text
    assert text.count(r"\begin{tabular}{lrr}") == 2  # values, differences
