"""Tables: ranks, tests, refusals; the four forms of output."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from fake_grid import HashEngine, Letters, Shift, make_plan, write_items
from rich.console import Console

from revisit.benchmarks.base import Metric
from revisit.errors import RevisitError
from revisit.evaluation import statistics
from revisit.evaluation.comparison import Row, Table, Value, compare_folder, ranks
from revisit.evaluation.records import sealed
from revisit.evaluation.runner import run
from revisit.report.comparisons import WRITERS, comparison_section, footnotes, short_names, stars, to_csv, verdict
from revisit.report.document import section_markdown
from revisit.report.terminal import print_section

METHODS = (Shift(0), Shift(1), Shift(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grid")
    data = write_items(root / "data", 40)
    run(make_plan(root / "out", data, models=("m1",), methods=METHODS), engine_for=HashEngine)
    return root / "out"


def test_values_are_those_of_the_run_and_tests_those_of_the_statistics(folder: Path) -> None:
    (table,) = compare_folder(folder, resamples=499)
    entries = {c["method"]["label"]: c for c in json.loads((folder / "results.json").read_text())["cells"]}
    assert table.baseline == "shift"  # the first, since nobody ran greedy
    assert [row.method for row in table.rows] == ["shift", "shift(by=1)", "shift(by=2)"]
    assert table.n == 40
    terms = {}
    for name, entry in entries.items():
        stored = json.loads((folder / entry["path"] / "scores.json").read_text())["per_item"]["vowels"]
        terms[name] = {unit: tuple(pair) for unit, pair in stored.items()}
    expected = []
    for row in table.rows:
        value = row.values["vowels"]
        assert value.value == entries[row.method]["metrics"]["vowels"]["value"]
        if row.method != "shift":
            expected = statistics.paired(terms["shift"], terms[row.method], resamples=499)
            assert value.paired == expected.at(value.paired.level)
            assert value.p == value.paired.p_permutation
    raw = [row.values[m.name].p for m in table.metrics for row in table.rows]
    expected = statistics.holm(raw)
    got = [row.values[m.name].p_holm for m in table.metrics for row in table.rows]
    assert [p for p in got if not math.isnan(p)] == [p for p in expected if not math.isnan(p)]
    assert any("4 tests of this table" in note for note in table.notes)


def test_ranks_go_by_what_is_printed() -> None:
    lower = Metric("CHAIRi", "lower", 100, 1)
    assert ranks([0.1301, 0.1249, 0.1252, 0.2], lower) == [2, 1, 1, 0]  # 13.0, 12.5, 12.5, 20.0
    assert ranks([0.5, 0.7, math.nan], Metric("F1", "higher", 100, 1)) == [2, 1, 0]
    assert ranks([0.5, 0.7], Metric("yes_ratio", None)) == [0, 0]
    assert ranks([0.5], lower) == [0]  # alone there is no best
    assert ranks([0.5, 0.5001, math.nan], lower) == [0, 0, 0]  # nor where all are alike


def test_stars() -> None:
    assert [stars(p) for p in (math.nan, 0.05, 0.049, 0.0099, 0.0009)] == ["", "", "*", "**", "***"]


@pytest.fixture
def table() -> Table:
    f1, hal = Metric("F1", "higher", 100, 1), Metric("CHAIR_i", "lower", 100, 1)
    better = statistics.Paired(-0.03, -0.04, -0.02, 0.0004, 0.0004, 500)
    return Table(
        model="org/m&m",
        benchmark="chair",
        version="v_1",
        n=500,
        metrics=(f1, hal),
        baseline="greedy",
        rows=(
            Row("greedy", {"F1": Value(0.8, 0.78, 0.82, 2), "CHAIR_i": Value(0.1, rank=2)}),
            Row(
                "revisit",
                {"F1": Value(0.85, rank=1), "CHAIR_i": Value(0.07, 0.06, 0.08, 1, better, 4e-4, 8e-4)},
            ),
            Row("<b>", {"F1": Value(0.1), "CHAIR_i": Value(math.nan)}),
        ),
        notes=("a note",),
    )


def test_markdown(table: Table) -> None:
    text = WRITERS[".md"]([table])
    assert "| Method | F1 ↑ | CHAIR_i ↓ |" in text
    assert "| greedy | <u>80.0</u> [78.0, 82.0] | <u>10.0</u> |" in text
    assert "| revisit | **85.0** | **7.0** [6.0, 8.0] |" in text
    assert "| <b> | 10.0 | - |" in text
    assert r"| revisit | – | -3.0 [-4.0, -2.0] p (Holm) 8.00e-04\*\*\* |" in text
    assert "a note" in text


def test_the_verdict_is_about_the_main_metric(table: Table) -> None:
    named = replace(table, headline="CHAIR_i")
    text = "CHAIR (org/m&m, n = 500): revisit improves CHAIR_i from 10.0 to 7.0 (-3.0, p (Holm) 8.00e-04); "
    assert verdict(named) == text + "<b> has CHAIR_i -, not tested."
    best = named.rows[1].values["CHAIR_i"]
    unsure = replace(named.rows[1], values={"CHAIR_i": replace(best, p_holm=0.2)})
    told = verdict(replace(named, rows=(named.rows[0], unsure)))
    assert told.endswith("revisit shows no significant difference in CHAIR_i (-3.0, p (Holm) 0.20).")
    worse = replace(table.metrics[1], better="higher")
    assert "revisit worsens CHAIR_i" in verdict(replace(named, metrics=(worse,)))


def test_long_settings_are_a_footnote() -> None:
    labels = [
        "greedy",
        "shift(by=1)",
        "revisit(weight=agreement, neighbors=8)",
        "revisit(weight=agreement, neighbors=4)",
    ]
    names = short_names(labels)
    assert list(names.values()) == ["greedy", "shift(by=1)", "revisit¹", "revisit²"]
    assert footnotes(names) == " ¹ weight=agreement, neighbors=8. ² weight=agreement, neighbors=4."


def test_csv_is_unrounded(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv([table]))))
    assert len(rows) == 6
    found = next(r for r in rows if r["method"] == "revisit" and r["metric"] == "CHAIR_i")
    assert found["value"] == "0.07"
    assert (found["baseline"], found["difference"]) == ("greedy", "-0.03")
    assert (found["p"], found["p_holm"]) == ("0.0004", "0.0008")
    undefined = next(r for r in rows if r["method"] == "<b>" and r["metric"] == "CHAIR_i")
    assert undefined["value"] == undefined["baseline"] == ""


def test_latex(table: Table) -> None:
    text = WRITERS[".tex"]([table])
    assert r"org/m\&m" in text
    assert r"revisit & \textbf{85.0} & \textbf{7.0} {\footnotesize [6.0, 8.0]} \\" in text
    assert r"revisit & – & -3.0 {\footnotesize [-4.0, -2.0], p (Holm) 8.00e-04***} \\" in text
    assert r"greedy & \underline{80.0} {\footnotesize [78.0, 82.0]} & \underline{10.0} \\" in text
    assert r"CHAIR\_i $\downarrow$" in text
    assert text.count(r"\begin{tabular}{lrr}") == 2  # values, differences


def test_html_is_whole_and_needs_nothing(table: Table) -> None:
    class Check(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "link", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    text = WRITERS[".html"]([table])
    check = Check()
    check.feed(text)
    assert check.open == []
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,", "#chair---org-m-m"]  # the page's empty icon
    assert not re.search(r"url\(|@import|<script", text)
    assert ">&lt;b&gt;</td>" in text
    assert "<b>7.0</b><small>[6.0, 8.0]</small>" in text
    assert "-3.0<small>[-4.0, -2.0]<br>p (Holm) 8.00e-04***</small>" in text


def test_different_items_are_refused(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 30)
    out = tmp_path / "out"
    run(make_plan(out, data, models=("m1",), methods=(Shift(0),)), engine_for=HashEngine)
    run(make_plan(out, data, models=("m1",), methods=(Shift(1),), limit=20), engine_for=HashEngine)
    with pytest.raises(RevisitError, match=r"not run on the same items .*shift 30, shift\(by=1\) 20; 20 in common"):
        compare_folder(out)


def test_the_same_id_with_another_question_is_refused(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 10)
    run(make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(0),)), engine_for=HashEngine)
    (data / "items.txt").write_text((data / "items.txt").read_text().replace("prompt 3", "PROMPT 3"))
    run(make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(1),)), engine_for=HashEngine)
    with pytest.raises(RevisitError, match="different questions with the same id 'q3'"):
        compare_folder(tmp_path / "out")


def test_metrics_and_baselines_by_name(folder: Path) -> None:
    (table,) = compare_folder(folder, baseline="shift(by=2)", metrics=["y*"], resamples=99)
    assert [m.name for m in table.metrics] == ["yes"]
    assert table.baseline == "shift(by=2)"
    assert table.rows[2].values["yes"].paired is None
    with pytest.raises(RevisitError, match=r"shfit was not run in .*Did you mean 'shift'"):
        compare_folder(folder, baseline="shfit")
    with pytest.raises(RevisitError, match=r"Unknown metric 'vowel'\. Did you mean 'vowels'"):
        compare_folder(folder, metrics=["vowel"])


def test_a_folder_without_results_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RevisitError, match=r"results\.json does not exist"):
        compare_folder(tmp_path)


def test_corrected_interval_and_corrected_p_tell_the_same_story() -> None:
    rng = np.random.default_rng(5)
    base = {f"q{i}": (float(rng.random() < 0.5), 1.0) for i in range(300)}
    found = []
    for shift in (0.0, 0.03, 0.05, 0.08, 0.1):
        better = {u: (max(n, float(rng.random() < shift)), d) for u, (n, d) in base.items()}
        found.append(statistics.paired(base, better, resamples=1999))
    raw = [pair.p_bootstrap for pair in found]
    levels, corrected = statistics.holm_levels(raw), statistics.holm(raw)
    for pair, level, p in zip(found, levels, corrected, strict=True):
        at = pair.at(level)
        assert (p < 0.05) == (at.low > 0 or at.high < 0)
    assert statistics.holm_levels([0.001, math.nan, 0.02, 0.2]) == pytest.approx(
        [1 - 0.05 / 3, 0.95, 1 - 0.05 / 2, 0.95]
    )
    assert statistics.holm_levels([0.3, 0.04]) == pytest.approx([0.975, 0.975])  # not rejected: both at the first step


class Undirected(Letters):
    """`yes` without a better direction."""

    metrics = (Metric("vowels", "lower", 100.0, 1), Metric("yes", None, 100.0, 1))


def test_only_metrics_with_a_direction_are_tested(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 40)
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=METHODS, benchmarks=(Undirected(),))
    run(plan, engine_for=HashEngine)
    (table,) = compare_folder(tmp_path / "out", resamples=199)
    for row in table.rows[1:]:
        assert math.isnan(row.values["yes"].p_holm)
        assert row.values["yes"].paired is not None
        assert row.values["yes"].paired.level == 0.95
        assert not math.isnan(row.values["vowels"].p_holm)
    assert any("2 tests of this table" in note for note in table.notes)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seeds")
    data = write_items(root / "data", 40)
    plan = make_plan(root / "out", data, models=("m1",), methods=METHODS[:2])
    plan = replace(plan, decoding=plan.decoding.replace(temperature=0.7), seeds=(0, 1, 5))
    results = run(plan, engine_for=HashEngine)
    assert [(c["method"]["label"], c["seed"]) for c in results["cells"]] == [
        (label, seed) for label in ("shift", "shift(by=1)") for seed in (0, 1, 5)
    ]
    return root / "out"


def test_several_seeds_are_one_row_with_mean_and_deviation(sampled: Path) -> None:
    (table,) = compare_folder(sampled, resamples=299)
    cells = json.loads((sampled / "results.json").read_text())["cells"]
    assert [row.method for row in table.rows] == ["shift", "shift(by=1)"]
    for row in table.rows:
        own = [c["metrics"]["vowels"]["value"] for c in cells if c["method"]["label"] == row.method]
        assert len(set(own)) == 3
        value = row.values["vowels"]
        assert value.value == pytest.approx(np.mean(own))
        assert value.std == pytest.approx(np.std(own, ddof=1))
        assert value.low < value.value < value.high
        assert [row.runs[seed]["vowels"] for seed in (0, 1, 5)] == own
    pair = table.rows[1].values["vowels"].paired
    assert pair is not None
    assert pair.difference == pytest.approx(table.rows[1].values["vowels"].value - table.rows[0].values["vowels"].value)
    assert pair.units == 40  # items, not items times seeds
    assert any("over the seeds 0, 1, 5" in note for note in table.notes)


def test_seeds_in_every_form_of_output(sampled: Path) -> None:
    tables = compare_folder(sampled, resamples=99)
    vowels = tables[0].rows[0].values["vowels"]
    shown = f"{100 * vowels.value:.1f} ± {100 * vowels.std:.1f}"
    markdown = WRITERS[".md"](tables)
    assert shown in markdown
    assert shown in WRITERS[".html"](tables)
    latex = WRITERS[".tex"](tables)
    assert shown.replace("±", r"$\pm$") in latex
    assert r"Mean $\pm$ standard deviation over the seeds 0, 1, 5" in latex
    rows = list(csv.DictReader(io.StringIO(to_csv(tables))))
    assert [row["seed"] for row in rows if row["method"] == "shift" and row["metric"] == "vowels"] == [
        "",
        "0",
        "1",
        "5",
    ]
    assert float(rows[0]["std"]) == vowels.std


def test_seeds_that_only_some_methods_have_are_refused(sampled: Path, tmp_path: Path) -> None:
    shutil.copytree(sampled, tmp_path / "out")
    path = tmp_path / "out" / "results.json"
    results = json.loads(path.read_text())
    del results["cells"][-1]
    path.write_text(json.dumps(sealed(results)))
    with pytest.raises(
        RevisitError, match=r"not run with the same seeds on letters \(shift: 0, 1, 5; shift\(by=1\): 0, 1\)"
    ):
        compare_folder(tmp_path / "out", resamples=99)


def test_a_terminal_gets_drawn_tables_and_a_pipe_markdown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = compare_folder(folder, resamples=99)
    section = comparison_section(tables[0])
    print_section(section)
    assert capsys.readouterr().out == section_markdown(section) + "\n\n"
    text = io.StringIO()
    print_section(section, Console(file=text, force_terminal=True, width=200, color_system=None))
    drawn = text.getvalue()
    assert "| ---" not in drawn
    assert "vowels ↓" in drawn
    assert tables[0].rows[1].method == "shift(by=1)"
    lines = [line.split() for line in drawn.splitlines()]
    below = [after[:1] for words, after in itertools.pairwise(lines) if words[:1] == ["shift"]]
    assert ["by=1"] in below  # settings stand below their method
    assert f"minus {tables[0].baseline}" in drawn
