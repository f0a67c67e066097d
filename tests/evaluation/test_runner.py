"""The runner: kills, resumes, changed settings, unreadable images; all on an engine that needs no model."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_grid import HashEngine, Letters, Shift, lines_of, make_plan, numbers_of, write_items
from PIL import Image
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.evaluation import runner
from revisit.evaluation.comparison import compare_folder
from revisit.evaluation.engines.base import ahead_of
from revisit.evaluation.plan import Plan, label
from revisit.evaluation.records import sealed
from revisit.evaluation.runner import Reporter, job_seed, run
from revisit.evaluation.statistics import wilson
from revisit.evaluation.store import read_results, unfinished
from revisit.report.comparisons import WRITERS, to_csv
from revisit.report.sample_browser import begun_cells, read_samples
from run_folders import verify

SCRIPT = Path(__file__).with_name("fake_grid.py")


def run_here(plan: Plan, **engine: Any) -> tuple[dict[str, Any], list[HashEngine]]:
    engines: list[HashEngine] = []

    def open_one(model: str) -> HashEngine:
        engines.append(HashEngine(model, **engine))
        return engines[-1]

    return run(plan, engine_for=open_one), engines


def asked(engines: list[HashEngine]) -> int:
    return sum(len(batch) for engine in engines for batch in engine.asked)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_items(tmp_path / "data", 23)


def test_a_grid_from_nothing(tmp_path: Path, data: Path) -> None:
    results, engines = run_here(make_plan(tmp_path / "out", data))
    assert results["status"] == "complete"
    assert [(c["model"]["name"], c["method"]["label"]) for c in results["cells"]] == [
        ("m1", "shift"),
        ("m1", "shift(by=3)"),
        ("m2", "shift"),
        ("m2", "shift(by=3)"),
    ]
    assert asked(engines) == 4 * 23
    assert all(engine.closed for engine in engines)
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    settings = results["settings"]
    assert settings["methods"] == {model: ["shift", "shift(by=3)"] for model in ("m1", "m2")}
    assert (settings["num_beams"], settings["max_new_tokens"]) == (1, None)  # the benchmark's own length
    cell = results["cells"][1]
    assert cell["answers"] == cell["items"] == 23
    assert cell["counters"] == {"steps": 23 * 7, "applied": 23 * 3}
    assert cell["new_tokens"] == 23 * 7
    texts = [line["text"] for line in lines_of(tmp_path / "out")[Path(cell["path"]).name]]
    vowels, yes = cell["metrics"]["vowels"], cell["metrics"]["yes"]
    assert vowels["value"] == pytest.approx(sum(c in "aeiou" for t in texts for c in t) / (23 * 7))
    assert vowels["interval"] == "bootstrap"
    assert vowels["low"] < vowels["value"] < vowels["high"]
    assert (yes["low"], yes["high"]) == pytest.approx(wilson(sum(t[0] < "n" for t in texts), 23))
    assert yes["n"] == 23


def test_a_finished_grid_is_not_asked_again(tmp_path: Path, data: Path) -> None:
    first, _ = run_here(make_plan(tmp_path / "out", data))
    stored = lines_of(tmp_path / "out")
    second, engines = run_here(make_plan(tmp_path / "out", data))
    assert asked(engines) == 0
    assert lines_of(tmp_path / "out") == stored
    assert second["cells"] == first["cells"]


def test_batches_hold_prompts_of_similar_length_longest_first(tmp_path: Path, data: Path) -> None:
    _, engines = run_here(make_plan(tmp_path / "out", data))
    prompts = {item.id: len(item.prompt) for item in Letters().load(data)}
    lengths = [prompts[i] for batch in engines[0].asked[:6] for i in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in engines[0].asked[:6]] == [4, 4, 4, 4, 4, 3]


def test_a_larger_limit_keeps_the_answers_of_the_smaller(tmp_path: Path, data: Path) -> None:
    run_here(make_plan(tmp_path / "out", data, limit=8))
    results, _ = run_here(make_plan(tmp_path / "out", data))
    assert [c["answers"] for c in results["cells"]] == [23] * 4
    whole, _ = run_here(make_plan(tmp_path / "whole", data))
    assert numbers_of(results["cells"]) == numbers_of(whole["cells"])
    for ours, theirs in zip(lines_of(tmp_path / "out").values(), lines_of(tmp_path / "whole").values(), strict=True):
        assert sorted(ours, key=lambda x: x["id"]) == sorted(theirs, key=lambda x: x["id"])


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": (1,)},
        {"max_new_tokens": 5},
        {"decoding": "temperature"},
        {"methods": dict.fromkeys(("m1", "m2"), (Shift(1), Shift(4)))},
        {"benchmarks": (Letters(rule="strict"),)},
        {"weights": "w2"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_no_changed_setting_reuses_an_answer(tmp_path: Path, data: Path, change: dict[str, Any]) -> None:
    plan = make_plan(tmp_path / "out", data)
    if "seeds" in change:  # which decides something only where tokens are drawn
        plan = replace(plan, decoding=plan.decoding.replace(temperature=0.7))
    run_here(plan)
    engine = {"weights": change["weights"]} if "weights" in change else {}
    fields = {k: v for k, v in change.items() if k != "weights"}
    if "decoding" in fields:
        fields["decoding"] = plan.decoding.replace(temperature=0.7)
    _, engines = run_here(replace(plan, **fields), **engine)
    assert asked(engines) == 4 * 23


def test_changed_data_reuses_only_what_is_unchanged(tmp_path: Path, data: Path) -> None:
    run_here(make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),)))
    lines = (data / "items.txt").read_text().splitlines()
    lines[5] = "another question"
    (data / "items.txt").write_text("\n".join(lines) + "\n")
    results, engines = run_here(make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),), batch_size=1))
    assert engines[0].asked == [["q5"]]
    (stored,) = lines_of(tmp_path / "out").values()
    assert [line["id"] for line in stored].count("q5") == 2  # the file only grows
    assert results["cells"][0]["answers"] == 23


def test_batch_size_is_part_of_the_key_only_where_batches_could_matter(tmp_path: Path, data: Path) -> None:
    for invariant, expected in ((True, 0), (False, 4 * 23)):
        out = tmp_path / str(invariant)
        run_here(make_plan(out, data), invariant=invariant)
        _, engines = run_here(make_plan(out, data, batch_size=8), invariant=invariant)
        assert asked(engines) == expected


def test_seeds_belong_to_items(tmp_path: Path, data: Path) -> None:
    assert job_seed(0, "a") == job_seed(0, "a") != job_seed(0, "b")
    assert job_seed(0, "a") != job_seed(1, "a")
    assert 0 <= job_seed(3, "x") < 2**56


def test_a_second_command_adds_to_the_same_results(tmp_path: Path, data: Path) -> None:
    run_here(make_plan(tmp_path / "out", data, methods=(Shift(0),)))
    run_here(make_plan(tmp_path / "out", data, methods=(Shift(3),)))
    cells = read_results(tmp_path / "out")["cells"]
    assert [c["method"]["label"] for c in cells] == ["shift", "shift", "shift(by=3)", "shift(by=3)"]


def test_a_cell_that_was_deleted_is_no_longer_listed(tmp_path: Path, data: Path) -> None:
    first, _ = run_here(make_plan(tmp_path / "out", data))
    shutil.rmtree(tmp_path / "out" / first["cells"][0]["path"])
    run_here(make_plan(tmp_path / "out", data, models=("m2",)))
    listed = read_results(tmp_path / "out")["cells"]
    assert [cell["path"] for cell in listed] == [cell["path"] for cell in first["cells"][1:]]
    assert compare_folder(tmp_path / "out", resamples=50)


def test_new_weights_replace_the_old_entry_but_not_the_old_answers(tmp_path: Path, data: Path) -> None:
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),))
    run_here(plan)
    results, _ = run_here(plan, weights="w2")
    assert [c["model"]["fingerprint"] for c in results["cells"]] == ["w2"]
    assert len(lines_of(tmp_path / "out")) == 2


# --- killed at any moment -------------------------------------------------------------------------------------------


def start(output: Path, data: Path, pause: float = 0.004) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(output), str(data), json.dumps({"pause": pause, "models": ["m1"]})],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def stored_bytes(output: Path) -> int:
    return sum(path.stat().st_size for path in output.glob("cells/*/answers.jsonl"))


def test_killed_at_twenty_random_moments_equals_uninterrupted(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 300)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    run_here(make_plan(whole, data, models=("m1",)))
    expected = stored_bytes(whole)
    moments = random.Random(20)
    # Twenty kills over both cells, each at a random size of the store and a random instant after it; more of them in
    # the first cell, because every start after it scores that cell again.
    targets = sorted(int(expected * moments.random() ** 2) for _ in range(20))
    kills = cut = 0
    for target in targets:
        with start(out, data) as process:
            while process.poll() is None and stored_bytes(out) <= target:
                time.sleep(0.002)
            time.sleep(moments.random() * 0.004)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += process.returncode == -signal.SIGKILL
        paths = sorted(out.glob("cells/*/answers.jsonl"), key=lambda p: p.stat().st_mtime_ns)
        if paths and moments.random() < 0.5:  # and as if the power had failed in the middle of the line
            size = paths[-1].stat().st_size
            if size > 200:
                os.truncate(paths[-1], size - moments.randrange(1, 100))
                cut += 1
    assert kills >= 15  # a kill that comes after the end proves nothing
    assert cut >= 5
    with start(out, data) as process:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error.decode()
    assert lines_of(out) == lines_of(whole)  # nothing lost, nothing twice, in the same order
    results, reference = (json.loads((path / "results.json").read_text()) for path in (out, whole))
    assert numbers_of(results["cells"]) == numbers_of(reference["cells"])
    for cell in results["cells"]:
        ours, theirs = ((root / cell["path"] / "scores.json").read_text() for root in (out, whole))
        assert ours == theirs


def test_a_second_process_is_refused_politely(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    with start(out, data, pause=1.0) as process:
        while not (out / "results.json").exists():
            time.sleep(0.01)
        with pytest.raises(RevisitError, match="in use by process"):
            run_here(make_plan(out, data))
        process.kill()


# --- protocols of one benchmark -------------------------------------------------------------------------------------


TWO_PROTOCOLS = (Letters(), Letters(suffix=" In one word."))


def test_two_protocols_of_a_benchmark_are_two_cells_of_one_command(tmp_path: Path, data: Path) -> None:
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),), benchmarks=TWO_PROTOCOLS)
    results, engines = run_here(plan)
    assert asked(engines) == 2 * 23
    assert [c["benchmark"]["label"] for c in results["cells"]] == ["letters", "letters(suffix= In one word.)"]
    assert [c["benchmark"]["options"]["suffix"] for c in results["cells"]] == ["", " In one word."]
    assert len({c["path"] for c in results["cells"]}) == 2
    assert "suffix_In_one_word" in results["cells"][1]["path"]
    tables = compare_folder(tmp_path / "out", resamples=99)
    assert [table.variant for table in tables] == ["suffix ", "suffix  In one word."]


def test_a_second_protocol_in_one_output_replaces_nothing(tmp_path: Path, data: Path) -> None:
    first, second = (
        make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),), benchmarks=(b,)) for b in TWO_PROTOCOLS
    )
    (alone,) = run_here(first)[0]["cells"]
    (other,) = run_here(second)[0]["cells"]
    assert other["metrics"]["vowels"] != alone["metrics"]["vowels"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["cells"] == [alone, other]
    _, engines = run_here(first)
    assert asked(engines) == 0


def test_answers_carry_the_question_that_was_asked(tmp_path: Path, data: Path) -> None:
    benchmark = Letters(suffix=" In one word.")
    run_here(make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),), benchmarks=(benchmark,)))
    (lines,) = lines_of(tmp_path / "out").values()
    assert {line["id"]: line["prompt"] for line in lines} == {i.id: i.prompt for i in benchmark.load(data)}


# --- stopped runs ---------------------------------------------------------------------------------------------------


class Stops(HashEngine):
    """Stops in the middle of the second cell."""

    def answer(self, *arguments: Any) -> Any:
        if len(self.asked) == 6 + 2:
            raise KeyboardInterrupt
        return super().answer(*arguments)


@pytest.fixture
def stopped(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A run of two methods, stopped after 8 of the second one's 23 answers."""
    monkeypatch.setattr(sys, "argv", ["revisit", "eval", "--out", "my runs"])
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(0), Shift(3), Shift(4)))
    with pytest.raises(KeyboardInterrupt):
        run(plan, engine_for=Stops)
    return plan


def test_a_stopped_run_says_what_is_missing_and_how_to_finish_it(stopped: Plan) -> None:
    results = read_results(stopped.output)
    found = [(c["status"], c["answers"], c["items"]) for c in results["cells"]]
    assert found == [("complete", 23, 23), ("unfinished", 8, 23), ("unfinished", 0, 23)]
    assert unfinished(results) == (
        "This run is incomplete: 2 of 3 combinations of model, method and benchmark have no result (m1 · shift(by=3) · letters: 8 of "
        "23 answers; m1 · shift(by=4) · letters: 0 of 23 answers). To finish it, run: revisit eval --out 'my runs'"
    )
    (table,) = compare_folder(stopped.output, resamples=99)
    assert table.notes[0].startswith("Partial, not in this table: m1 · shift(by=3) · letters: 8 of 23 answers; m1")
    assert verify(stopped.output).problems == []
    run_here(stopped)
    assert unfinished(read_results(stopped.output)) == ""


def test_a_run_returns_the_cells_of_its_own_plan(tmp_path: Path, data: Path) -> None:
    """Other commands may have written to the same folder, with the same model, method and benchmark."""
    plans = [make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),), max_new_tokens=n) for n in (3, 5, 3)]
    found = [run_here(plan)[0]["cells"] for plan in plans]
    assert [[cell["decoding"]["max_new_tokens"] for cell in cells] for cells in found] == [[3], [5], [3]]
    assert len(read_results(tmp_path / "out")["cells"]) == 2


def test_compare_says_first_that_a_run_is_incomplete(stopped: Plan) -> None:
    shown = CliRunner().invoke(app, ["compare", str(stopped.output)])
    assert shown.stdout.startswith("This run is incomplete: 2 of 3")
    with pytest.raises(RevisitError, match=r"no finished method yet\. This run is incomplete: 1 of 1"):
        compare_folder(stopped_at_once(stopped))


class Interrupting(Reporter):
    """Interrupts a run when its first cell begins."""

    def start(self, title: str, total: int, done: int) -> None:
        raise KeyboardInterrupt


def stopped_at_once(plan: Plan) -> Path:
    output = plan.output.with_name("nothing")
    with pytest.raises(KeyboardInterrupt):
        run(replace(plan, output=output, methods=dict.fromkeys(plan.methods, (Shift(),))), Interrupting(), HashEngine)
    return output


def test_view_and_export_leave_out_answers_to_an_item_that_has_changed_since(tmp_path: Path, data: Path) -> None:
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),))
    run_here(plan)
    (data / "items.txt").write_text((data / "items.txt").read_text().replace("prompt 2 ", "another prompt 2 "))
    run_here(plan)
    ((_, lines, scores, _),) = begun_cells(plan.output, read_results(plan.output), [])
    assert len({line.id for line in lines}) == len(lines) == 23
    assert scores is not None
    assert {line.id: line.item for line in lines} == scores.items


def test_view_shows_what_was_asked_and_says_that_the_run_is_incomplete(stopped: Plan, data: Path) -> None:
    (data / "items.txt").write_text("another question\n" * 23)  # changed since
    columns, samples, notes = read_samples(stopped.output)
    assert notes[0].startswith("This run is incomplete: 2 of 3")
    assert [method["name"] for method in columns.methods] == ["shift"] * 3  # also the one that was not begun
    assert len(samples) == 23
    assert {sample.prompt for sample in samples} == {f"prompt {i} {'x' * (i * 7 % 13)}" for i in range(23)}
    assert all("v" in sample.answers[0] for sample in samples)  # verdicts of the complete cell
    partial = [sample.answers[1] for sample in samples if 1 in sample.answers]
    assert ["v" in answer for answer in partial] == [False] * 8


def test_a_larger_limit_is_unfinished_until_its_answers_are_there(tmp_path: Path, data: Path) -> None:
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),), limit=8)
    run_here(plan)

    for limit, expected in ((8, ("complete", 8, 8)), (20, ("unfinished", 8, 20))):  # all that is planned; some of it
        with pytest.raises(KeyboardInterrupt):
            run(replace(plan, limits={"letters": limit}), Interrupting(), HashEngine)
        (cell,) = read_results(plan.output)["cells"]
        assert (cell["status"], cell["answers"], cell["items"]) == expected


# --- unreadable images ----------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    data = write_items(tmp_path / "many", 500)
    (data / "images").mkdir()
    for i in range(500):
        Image.new("RGB", (4, 4), (i % 256, i // 256, 0)).save(data / "images" / f"{i}.png")
    return data


def spoil(data: Path) -> None:
    (data / "images" / "4.png").unlink()
    (data / "images" / "9.png").write_bytes((data / "images" / "9.png").read_bytes()[:50])


def test_unreadable_images_among_500_are_reported_and_nothing_is_scored(tmp_path: Path, pictures: Path) -> None:
    whole, _ = run_here(one_cell(tmp_path / "whole", pictures))
    good = {i: (pictures / "images" / f"{i}.png").read_bytes() for i in (4, 9)}
    spoil(pictures)
    plan = one_cell(tmp_path / "out", pictures)
    with pytest.raises(RevisitError, match=r"2 images could not be read: .*--skip-bad-images") as caught:
        run_here(plan)
    assert "4.png" in str(caught.value)
    assert "9.png" in str(caught.value)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["status"] == "incomplete"
    (cell,) = results["cells"]
    assert "metrics" not in cell
    assert cell["answers"] == 498
    with pytest.raises(RevisitError, match="no finished method"):
        compare_folder(tmp_path / "out")
    # Put right, the same command asks for what is missing and scores everything.
    for i, data in good.items():
        (pictures / "images" / f"{i}.png").write_bytes(data)
    again, _ = run_here(plan)
    assert numbers_of(again["cells"]) == numbers_of(whole["cells"])


def one_cell(output: Path, data: Path, **changes: Any) -> Plan:
    return make_plan(output, data, **{"models": ("m1",), "methods": (Shift(),), "batch_size": 50, **changes})


def test_skipping_is_on_request_and_listed(tmp_path: Path, pictures: Path) -> None:
    spoil(pictures)
    results, _ = run_here(one_cell(tmp_path / "out", pictures, skip_bad_images=True))
    (cell,) = results["cells"]
    assert [entry["id"] for entry in cell["skipped"]] == ["q4", "q9"]
    assert cell["items"] == 500
    assert cell["metrics"]["yes"]["n"] == cell["counts"]["items"] == 498
    (table,) = compare_folder(tmp_path / "out")
    assert table.n == 498
    assert any("2 items were skipped" in note for note in table.notes)


def test_without_any_readable_picture_skipping_is_not_advised_again(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 2)
    (data / "images").mkdir()
    with pytest.raises(RevisitError, match=r"2 images could not be read: .* Fix the files and rerun the command\.$"):
        run_here(one_cell(tmp_path / "out", data, skip_bad_images=True))


def test_a_changed_picture_is_asked_again(tmp_path: Path, pictures: Path) -> None:
    plan = one_cell(tmp_path / "out", pictures, limit=20, batch_size=1)
    run_here(plan)
    Image.new("RGB", (4, 4), (0, 99, 0)).save(pictures / "images" / "7.png")
    _, engines = run_here(plan)
    assert engines[0].asked == [["q7"]]


def test_results_of_another_format_are_left_alone(tmp_path: Path, data: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('{"mine": 1}')
    with pytest.raises(RevisitError, match="was not written by `revisit eval`"):
        run_here(make_plan(tmp_path / "out", data))
    assert (tmp_path / "out" / "results.json").read_text() == '{"mine": 1}'
    (tmp_path / "out" / "results.json").write_text('{"schema": 77, "cells": []}')
    with pytest.raises(RevisitError, match="has format 77; this version reads 3"):
        run_here(make_plan(tmp_path / "out", data))


class Notes(runner.Reporter):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def test_a_damaged_run_goes_on_saying_what_was_damaged(tmp_path: Path, data: Path) -> None:
    plan = make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),))
    first, _ = run_here(plan)
    (folder,) = (tmp_path / "out").glob("cells/*")
    stored = sorted(lines_of(tmp_path / "out")[folder.name], key=lambda line: line["id"])
    answers = folder / "answers.jsonl"
    text = answers.read_text()
    place = text.index('"text":"') + 8
    answers.write_text(text[:place] + ("b" if text[place] == "a" else "a") + text[place + 1 :])
    (folder / "scores.json").write_text("{")
    (tmp_path / "out" / "results.json").write_text("[]")
    assert len(verify(tmp_path / "out").problems) == 2  # results.json, and one line of answers
    notes, engines = Notes(), []
    engine = HashEngine("m1")
    results = run(plan, notes, engine_for=lambda _: engine)
    engines.append(engine)
    assert any("1 answer is damaged" in sentence for sentence in notes.said)
    assert any("results.json is damaged" in sentence for sentence in notes.said)
    assert asked(engines) == 4  # the batch of the damaged answer
    assert sorted(lines_of(tmp_path / "out")[folder.name], key=lambda line: line["id"]) == stored
    assert numbers_of(results["cells"]) == numbers_of(first["cells"])
    assert verify(tmp_path / "out").problems == []


def test_verify_compares_numbers_with_what_they_were_made_from(tmp_path: Path, data: Path) -> None:
    run_here(make_plan(tmp_path / "out", data, models=("m1",), methods=(Shift(),)))
    verdict = verify(tmp_path / "out")
    assert (verdict.cells, verdict.answers, verdict.problems) == (1, 23, [])
    path = tmp_path / "out" / "results.json"
    results = json.loads(path.read_text())
    results["cells"][0]["metrics"]["vowels"]["value"] += 0.01
    path.write_text(json.dumps(sealed(results)))  # as if somebody had meant it
    (problem,) = verify(tmp_path / "out").problems
    assert problem.startswith("vowels of m1-shift-letters")
    (folder,) = (tmp_path / "out").glob("cells/*")
    lines = (folder / "answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "answers.jsonl").write_text("".join(lines[1:]))
    assert "lacks 1 scored answers" in verify(tmp_path / "out").problems[0]
    with pytest.raises(RevisitError, match="is not a folder"):
        verify(tmp_path / "nothing")


# --- plans ----------------------------------------------------------------------------------------------------------


def test_labels_name_what_is_not_default() -> None:
    assert label(Shift()) == "shift"
    assert label(Shift(2)) == "shift(by=2)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"methods": (Shift(), Shift())}, "'shift' is listed twice"),
        ({"models": ()}, "at least one model"),
    ],
)
def test_plans_refuse_nonsense(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(RevisitError, match=words):
        make_plan(tmp_path, tmp_path, **change)


def test_two_items_with_one_id_are_refused(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Letters.load
    monkeypatch.setattr(Letters, "load", lambda self, folder: load(self, folder) * 2)
    with pytest.raises(RevisitError, match="two items with the id 'q0'"):
        run_here(make_plan(tmp_path / "out", data))


def test_the_source_is_read_ahead_of_the_consumer() -> None:
    read: list[int] = []

    def source() -> Any:
        for i in range(5):
            read.append(i)
            yield i

    seen = []
    for element in ahead_of(source(), 2):
        seen.append((element, len(read)))
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


def test_mean_of_settings_gets_a_stratified_interval() -> None:
    parts = {f"{s}/F1": {f"{s}{i}": (float(i % 3 > 0), 1.0) for i in range(30)} for s in "ab"}
    found = runner.metric_interval("F1", 2 / 3, parts)
    assert found is not None
    assert found.low < 2 / 3 < found.high
    assert runner.metric_interval("F1", 0.5, parts) is None  # not their mean: no interval is better than a wrong one


def test_a_seed_without_draws_is_no_other_cell(tmp_path: Path, data: Path) -> None:
    plan = make_plan(tmp_path / "out", data)
    run_here(plan)
    results, engines = run_here(replace(plan, seeds=(5,)))
    assert asked(engines) == 0
    assert len(results["cells"]) == 4


def test_methods_answered_by_other_weights_are_not_compared(tmp_path: Path, data: Path) -> None:
    """Each has a table of its own, which says so."""
    output = tmp_path / "out"
    for by, weights in ((0, "aaaaaaaaaa"), (3, "bbbbbbbbbb")):
        run_here(make_plan(output, data, models=("m1",), methods=(Shift(by),)), weights=weights)
    tables = compare_folder(output, resamples=99)
    assert [table.variant for table in tables] == ["weights aaaaaaaa", "weights bbbbbbbb"]
    assert [[row.method for row in table.rows] for table in tables] == [["shift"], ["shift(by=3)"]]
    assert "letters · m1, weights aaaaaaaa" in WRITERS[".md"](tables)


def test_tables_of_other_lengths_say_so(tmp_path: Path, data: Path) -> None:
    output = tmp_path / "out"
    for length in (5, 9):
        run_here(make_plan(output, data, models=("m1",), max_new_tokens=length))
    tables = compare_folder(output, resamples=99)
    assert [table.variant for table in tables] == ["max_new_tokens 5", "max_new_tokens 9"]
    assert "max_new_tokens 9" in to_csv(tables)


def test_what_cannot_be_compared_does_not_hide_the_rest(tmp_path: Path, data: Path) -> None:
    output = tmp_path / "out"
    run_here(make_plan(output, data, methods=(Shift(0),), limit=6))
    run_here(make_plan(output, data, models=("m1",), methods=(Shift(3),), limit=4))
    with pytest.raises(RevisitError, match="not run on the same items"):
        compare_folder(output, resamples=99)
    problems: list[str] = []
    tables = compare_folder(output, resamples=99, problems=problems)
    assert [table.model for table in tables] == ["m2"]
    assert len(problems) == 1
