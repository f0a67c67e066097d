"""Evaluations with an engine that needs no model: kills, resumes, changed settings, cached scores, unreadable images."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from fake_grid import HashEngine, Letters, Shift, answers_of, check_equal, make_config, numbers_of, write_items
from PIL import Image
from typer.testing import CliRunner

from revisit import errors
from revisit.cli.main import app
from revisit.errors import Incomplete, RevisitError
from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.compare import compare
from revisit.eval.config import EvalConfig
from revisit.eval.log import Answer, Log, read_logs, unfinished
from revisit.eval.report.sample_browser import read_samples
from revisit.eval.run import Reporter, run
from revisit.eval.statistics import wilson

SCRIPT = Path(__file__).with_name("fake_grid.py")
ONE = {"model": "m1", "method": (Shift(),)}


def run_here(config: EvalConfig, **engine: Any) -> tuple[list[Log], list[HashEngine]]:
    engines: list[HashEngine] = []

    def open_one(model: str) -> HashEngine:
        engines.append(HashEngine(model, **engine))
        return engines[-1]

    return run(config, engine_for=open_one), engines


def generated(engines: list[HashEngine]) -> int:
    """Return the number of answers that were generated."""
    return sum(len(batch) for engine in engines for batch in engine.batches)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_items(tmp_path / "data", 23)


def test_an_evaluation_from_nothing(tmp_path: Path, data: Path) -> None:
    logs, engines = run_here(make_config(tmp_path / "out", data, method=(Shift(by=3), Shift(by=1))))
    names = [("m1", "shift(by=3)"), ("m1", "shift(by=1)"), ("m2", "shift(by=3)"), ("m2", "shift(by=1)")]
    assert [(log.spec.model, log.spec.method) for log in logs] == names
    assert [(log.spec.model, log.spec.method) for log in read_logs(tmp_path / "out")] == names
    assert generated(engines) == 4 * 23
    assert all(engine.closed for engine in engines)
    prompts = {item.id: len(item.prompt) for item in Letters().load(data)}
    lengths = [prompts[id] for batch in engines[0].batches[:6] for id in batch]
    assert lengths == sorted(lengths, reverse=True)  # similar lengths together, the longest first
    assert [len(batch) for batch in engines[0].batches[:6]] == [4, 4, 4, 4, 4, 3]
    log = logs[0]
    assert (log.answered, log.request.items) == (23, 23)
    assert log.spec.decoding["max_new_tokens"] == 7  # the benchmark's own length
    assert log.totals() == {"steps": 23 * 7, "applied": 23 * 3, "new_tokens": 23 * 7, "seconds": 0.0}
    texts = [answer.text for answer in log.current()]
    assert log.scores is not None
    value = log.scores.metrics["vowels"]
    assert value == pytest.approx(sum(c in "aeiou" for t in texts for c in t) / (23 * 7))
    vowels, yes = log.scores.intervals["vowels"], log.scores.intervals["yes"]
    assert vowels is not None
    assert vowels.kind == "bootstrap"
    assert vowels.low < value < vowels.high
    assert yes is not None
    assert (yes.low, yes.high) == pytest.approx(wilson(sum(t[0] < "n" for t in texts), 23))
    entry = json.loads((tmp_path / "out" / "results.json").read_text())["logs"][0]
    printed = float(log.scores.shown["vowels"].text(value))  # the numbers of the printed tables
    assert entry["metrics"]["vowels"]["value"] == pytest.approx(printed, abs=0.05)
    assert (entry["complete"], entry["answers"], entry["method"]) == (True, 23, "shift(by=3)")


def test_a_missing_package_raises_before_the_first_answer(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "statsmodels" else find(name))
    with pytest.raises(RevisitError, match="needs statsmodels, which is not installed: pip install"):
        run_here(make_config(tmp_path / "out", data))
    assert not (tmp_path / "out").exists()


def test_a_finished_evaluation_is_neither_generated_nor_scored_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a paid judge, scoring old answers again would cost money and change old numbers."""
    config = make_config(tmp_path / "out", data)
    first, _ = run_here(config)
    (tmp_path / "out" / "results.json").write_text("not read back")
    stored = {path: path.read_bytes() for path in (tmp_path / "out/logs").iterdir()}
    scored: list[int] = []
    original = Letters.score

    def counting(self: Letters, items: list[Item], answers: Mapping[str, str]) -> Scores:
        scored.append(len(items))
        return original(self, items, answers)

    monkeypatch.setattr(Letters, "score", counting)
    second, engines = run_here(config)
    assert (generated(engines), scored) == (0, [])
    assert {path: path.read_bytes() for path in (tmp_path / "out/logs").iterdir()} == stored
    assert numbers_of(second) == numbers_of(first)
    run_here(config.replace(method=(Shift(by=0), Shift(by=3), Shift(by=5))))
    assert scored == [23, 23]  # the new method with both models


def test_many_logs_need_few_open_files(tmp_path: Path, data: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    try:
        config = make_config(tmp_path / "out", data, **ONE, sample=True, seeds=tuple(range(60)), limit=1)
        logs, engines = run_here(config)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (len(logs), generated(engines)) == (60, 60)
    assert [log.spec.seed for log in logs] == list(range(60))


def test_changed_answers_are_scored_again(tmp_path: Path, data: Path) -> None:
    config = make_config(tmp_path / "out", data, **ONE)
    (first,), _ = run_here(config)
    rows = first.path.read_bytes().splitlines(keepends=True)
    first.path.write_bytes(b"".join(rows[:-1]) + rows[-1].replace(b"vowels", b"vowel"))
    (second,), engines = run_here(config)
    assert generated(engines) == 0
    assert second.scores == first.scores
    first.path.write_bytes(b"".join(rows[:5] + rows[6:]))
    (log,) = read_logs(tmp_path / "out")
    assert log.scores is None  # of answers that are not there any more
    (third,), engines = run_here(config)
    assert generated(engines) == 4
    assert third.scores == first.scores


def test_the_log_of_the_latest_command_is_shown_though_the_clock_was_set_back(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "out", data, **ONE)
    clock = iter(range(99, 0, -1))
    monkeypatch.setattr("revisit.eval.log.datetime", SimpleNamespace(now=lambda _: datetime(2000 + next(clock), 1, 1)))
    for weights in ("w1", "w2", "w1", "w1", "w3"):
        run_here(config, weights=weights)
        (log,) = read_logs(tmp_path / "out")
        assert log.spec.fingerprint == weights
    assert [len(Log.read(path).requests) for path in (tmp_path / "out/logs").iterdir()].count(2) == 1


@pytest.mark.parametrize(
    ("change", "engine", "reused"),
    [
        ({"sample": True, "seed": 1}, {}, False),
        ({"max_new_tokens": 5}, {}, False),
        ({"sample": True, "temperature": 0.7}, {}, False),
        ({"method": (Shift(by=1), Shift(by=4))}, {}, False),
        ({"benchmark": (Letters(rule="strict"),)}, {}, False),
        ({}, {"weights": "w2"}, False),
        ({"batch_size": 8}, {"invariant": False}, False),
        ({"batch_size": 8}, {}, True),
    ],
    ids=str,
)
def test_answers_are_reused_only_with_the_same_settings(
    tmp_path: Path, data: Path, change: dict[str, Any], engine: dict[str, Any], reused: bool
) -> None:
    config = make_config(tmp_path / "out", data, sample="seed" in change)
    run_here(config, **{key: value for key, value in engine.items() if key != "weights"})
    _, engines = run_here(config.replace(**change), **engine)
    assert generated(engines) == (0 if reused else 4 * 23)


def test_changed_data_reuses_only_what_is_unchanged(tmp_path: Path, data: Path) -> None:
    run_here(make_config(tmp_path / "out", data, **ONE))
    lines = (data / "items.txt").read_text().splitlines()
    lines[5] = "another question"
    (data / "items.txt").write_text("\n".join(lines) + "\n")
    logs, engines = run_here(make_config(tmp_path / "out", data, **ONE, batch_size=1))
    assert engines[0].batches == [["q5"]]
    (stored,) = answers_of(tmp_path / "out").values()
    assert [row["id"] for row in stored].count("q5") == 2  # the file only grows
    assert (logs[0].answered, len(logs[0].current())) == (23, 23)


# --- killed at any moment -------------------------------------------------------------------------------------------


def start(out: Path, data: Path, pause: float = 0.004) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(out), str(data), json.dumps({"pause": pause, "model": ["m1"]})],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def stored_bytes(out: Path) -> int:
    return sum(path.stat().st_size for path in out.glob("logs/*.jsonl"))


def test_killed_at_twelve_random_moments_equals_uninterrupted(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 300)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    run_here(make_config(whole, data, model="m1"))
    moments = random.Random(20)
    # Kills over both logs, each at a random size of the store and a random instant after it.
    targets = sorted(int(stored_bytes(whole) * moments.random()) for _ in range(12))
    kills = cut = 0
    for target in targets:
        with start(out, data) as process:
            while process.poll() is None and stored_bytes(out) <= target:
                time.sleep(0.002)
            time.sleep(moments.random() * 0.004)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += process.returncode == -signal.SIGKILL
        paths = sorted(out.glob("logs/*.jsonl"), key=lambda p: p.stat().st_mtime_ns)
        if paths and moments.random() < 0.6:  # and as if the power had failed in the middle of the line
            size = paths[-1].stat().st_size
            if size > 200:
                os.truncate(paths[-1], size - moments.randrange(1, 100))
                cut += 1
    assert kills >= 9  # a kill that comes after the end proves nothing
    assert cut >= 3
    with start(out, data) as process:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error.decode()
    assert answers_of(out) == answers_of(whole)  # also in the same order
    check_equal(out, whole)


def test_a_second_process_on_the_same_logs_raises(tmp_path: Path, data: Path) -> None:
    out = tmp_path / "out"
    with start(out, data, pause=1.0) as process:
        while len(list(out.glob("logs/*.jsonl"))) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        with pytest.raises(RevisitError, match="in use"):
            run_here(make_config(out, data, model="m1"))
        process.kill()


# --- protocols of one benchmark -------------------------------------------------------------------------------------


TWO_PROTOCOLS = (Letters(), Letters(suffix=" In one word."))


def test_two_protocols_of_a_benchmark_are_two_logs_of_one_command(tmp_path: Path, data: Path) -> None:
    logs, engines = run_here(make_config(tmp_path / "out", data, **ONE, benchmark=TWO_PROTOCOLS))
    assert generated(engines) == 2 * 23
    assert [log.spec.benchmark for log in logs] == ["letters", "letters(suffix= In one word.)"]
    assert "suffix_In_one_word" in logs[1].path.name
    assert [table.variant for table in compare(logs, resamples=99)] == ["suffix ", "suffix  In one word."]
    alone, _ = run_here(make_config(tmp_path / "alone", data, **ONE, benchmark=TWO_PROTOCOLS[:1]))
    assert alone[0].scores == logs[0].scores != logs[1].scores


# --- stopped in the middle ------------------------------------------------------------------------------------------


class Stops(HashEngine):
    """Stops in the middle of the second log."""

    def answer(self, *arguments: Any) -> Any:
        if len(self.batches) == 6 + 2:
            raise KeyboardInterrupt
        return super().answer(*arguments)


@pytest.fixture
def stopped(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> EvalConfig:
    """Three methods, stopped after 8 of the second one's 23 answers."""
    monkeypatch.setattr(sys, "argv", ["revisit", "eval", "--out", "my runs"])
    config = make_config(tmp_path / "out", data, model="m1", method=(Shift(by=0), Shift(by=3), Shift(by=4)))
    with pytest.raises(KeyboardInterrupt):
        run(config, engine_for=Stops)
    return config


def test_a_stopped_run_shows_what_is_missing_and_how_to_finish_it(stopped: EvalConfig) -> None:
    logs = read_logs(Path(stopped.out))
    assert [(log.scores is not None, log.answered) for log in logs] == [(True, 23), (False, 8), (False, 0)]
    notice = unfinished(logs)
    assert notice.startswith("This run is incomplete: 2 of 3")
    assert "m1 · shift(by=3) · letters: 8 of 23 answers; m1 · shift(by=4) · letters: 0 of 23" in notice
    assert notice.endswith("run: revisit eval --out 'my runs'")
    (table,) = compare(logs, resamples=99)
    assert table.notes[0].startswith("Partial, not in this table: m1 · shift(by=3) · letters: 8 of 23 answers; m1")
    assert CliRunner().invoke(app, ["compare", stopped.out]).stdout.startswith("This run is incomplete: 2 of 3")
    with pytest.raises(RevisitError, match="No method is finished yet"):
        compare(logs[1:])
    run_here(stopped)
    assert unfinished(read_logs(Path(stopped.out))) == ""


def test_view_shows_the_stored_prompts_and_that_the_run_is_incomplete(stopped: EvalConfig, data: Path) -> None:
    (data / "items.txt").write_text("another question\n" * 23)  # changed since
    columns, samples, notes = read_samples(read_logs(Path(stopped.out)))
    assert notes[0].startswith("This run is incomplete: 2 of 3")
    assert [method["name"] for method in columns.methods] == ["shift"] * 3  # also the one that was not begun
    assert len(samples) == 23
    assert {sample.prompt for sample in samples} == {f"prompt {i} {'x' * (i * 7 % 13)}" for i in range(23)}
    assert all("v" in sample.answers[0] for sample in samples)  # verdicts of the complete log
    partial = [sample.answers[1] for sample in samples if 1 in sample.answers]
    assert ["v" in answer for answer in partial] == [False] * 8


def test_a_larger_limit_is_unfinished_until_its_answers_are_there(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "out", data, **ONE, limit=8)
    run_here(config)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reporter, "start", interrupt)
    for limit, complete in ((8, True), (20, False), (8, True)):
        with pytest.raises(KeyboardInterrupt):
            run_here(config.replace(limit=limit))
        (log,) = read_logs(tmp_path / "out")
        assert (log.scores is not None, log.answered, log.request.items) == (complete, 8, limit)


# --- unreadable images ----------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    data = write_items(tmp_path / "many", 120)
    (data / "images").mkdir()
    for i in range(120):
        Image.new("RGB", (4, 4), (i, 0, 0)).save(data / "images" / f"{i}.png")
    return data


def test_items_that_cannot_be_read_are_listed_and_the_rest_is_complete(tmp_path: Path) -> None:
    data = write_items(tmp_path / "data", 1000)
    (data / "images").mkdir()
    for i in range(1000):
        Image.new("RGB", (4, 4), (i % 256, i // 256, 0)).save(data / "images" / f"{i}.png")
    shutil.copytree(data, tmp_path / "whole")
    folder = data / "images"
    Image.new("CMYK", (4, 4)).save(folder / "17.png", "JPEG")
    Image.new("I;16", (4, 4)).save(folder / "18.png", "PNG")
    (folder / "4.png").unlink()
    (folder / "9.png").write_bytes((folder / "9.png").read_bytes()[:50])
    (folder / "500.png").write_bytes(b"damaged")
    config = make_config(tmp_path / "out", data, model="m1")
    logs, engines = run_here(config)
    assert generated(engines) == 2 * 997
    for log in logs:
        assert {answer.id: bool(answer.error) for answer in log.failed} == {"q4": True, "q9": True, "q500": True}
        assert log.scores is not None
        assert len(log.scores.items) == log.answered == len(log.current()) == 997
    entry = json.loads((tmp_path / "out/results.json").read_text())["logs"][0]
    assert (entry["complete"], entry["answers"], list(entry["failed"])) == (False, 997, ["q4", "q9", "q500"])
    stored = read_logs(tmp_path / "out")
    (table,) = compare(stored, resamples=99)
    assert table.n == 997
    assert [note for note in table.notes if "3 of 1000 items have no answer" in note]
    assert "3 items could not be answered (letters: q4:" in unfinished(stored)
    _, samples, _ = read_samples(stored)
    (shown,) = (sample for sample in samples if sample.id == "q9")
    assert all(answer["v"].startswith("no answer: ") and answer["bad"] for answer in shown.answers.values())
    before = {path: path.read_bytes() for path in (tmp_path / "out/logs").iterdir()}
    _, engines = run_here(config)
    assert (generated(engines), before) == (0, {path: path.read_bytes() for path in before})
    for name in ("4.png", "9.png", "17.png", "18.png", "500.png"):
        shutil.copy(tmp_path / "whole/images" / name, folder)
    _, engines = run_here(config.replace(batch_size=1))
    assert generated(engines) == 2 * 5
    assert unfinished(read_logs(tmp_path / "out")) == ""
    run_here(make_config(tmp_path / "undisturbed", tmp_path / "whole", model="m1"))
    scores = [[log.scores for log in read_logs(tmp_path / name)] for name in ("out", "undisturbed")]
    assert scores[0] == scores[1]


def test_nothing_is_written_if_no_image_can_be_read(tmp_path: Path, data: Path) -> None:
    (data / "images").mkdir()
    with pytest.raises(RevisitError, match=r"No item of letters can be read: .*0\.png"):
        run_here(make_config(tmp_path / "out", data, **ONE))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"q7", "q8"}, {f"q{i}" for i in range(23)}], ids=len)
def test_items_that_the_model_cannot_answer(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, wrong: set[str]
) -> None:
    config, decode, tried = make_config(tmp_path / "out", data, **ONE), HashEngine.answer, list[str]()

    def failing(self: HashEngine, method: Any, decoding: Any, seed: int, items: list[Item], *rest: Any) -> list[Answer]:
        tried.extend(item.id for item in items)
        if bad := [item.id for item in items if item.id in wrong]:
            raise RevisitError(f"The prompt of {bad[0]} is too long.")
        return decode(self, method, decoding, seed, items, *rest)

    monkeypatch.setattr(HashEngine, "answer", failing)
    if len(wrong) == 23:  # the settings are wrong, not the items
        with pytest.raises(RevisitError, match="is too long"):
            run_here(config)
        assert len(set(tried)) == 8
        assert not list((tmp_path / "out/logs").iterdir())
        return
    (log,), _ = run_here(config)
    assert {answer.id: answer.error for answer in log.failed} == {
        id: f"The prompt of {id} is too long." for id in wrong
    }
    assert log.answered == 21
    monkeypatch.undo()
    (log,), engines = run_here(config)
    assert 2 <= generated(engines) <= 8
    assert (log.failed, log.answered) == ([], 23)


def test_a_log_whose_other_items_cannot_be_scored_does_not_end_the_run(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = HashEngine.answer

    def failing(self: HashEngine, method: Any, decoding: Any, seed: int, items: list[Item], *rest: Any) -> list[Answer]:
        if method.by == 0 and any(item.id == "q7" for item in items):
            raise RevisitError("The prompt of q7 is too long.")
        return decode(self, method, decoding, seed, items, *rest)

    def score(self: Letters, items: list[Item], answers: Mapping[str, str]) -> Scores:
        if len(items) < 23:
            raise RevisitError("A group of questions is not complete.")
        return original(self, items, answers)

    original = Letters.score
    monkeypatch.setattr(HashEngine, "answer", failing)
    monkeypatch.setattr(Letters, "score", score)
    logs, _ = run_here(make_config(tmp_path / "out", data, model="m1"))
    assert [log.scores is not None for log in logs] == [False, True]
    assert [answer.id for log in logs for answer in log.failed] == ["q7"]


def test_failed_rows_of_an_own_file_are_listed_with_exit_status_3(tmp_path: Path) -> None:
    for i in range(3):
        Image.new("RGB", (64, 64), (80 * i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [f"{i}.png,Is the image red?,yes" for i in range(4)] + ["1.png,Is it blue?,perhaps"]
    (tmp_path / "own.csv").write_text("\n".join(["image,question,label", *rows]))
    arguments = ["--benchmark", f"yesno:{tmp_path / 'own.csv'}", "--method", "greedy", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert isinstance(result.exception, Incomplete)
    assert result.exception.status == 3
    assert "n = 3" in result.stdout
    listed = [line.split(": ")[1] for line in result.stderr.splitlines()[-2:]]
    assert listed == ["4", "5"]


def test_an_answer_to_a_changed_image_is_generated_again(tmp_path: Path, images: Path) -> None:
    config = make_config(tmp_path / "out", images, **ONE, limit=20, batch_size=1)
    (log,), _ = run_here(config)
    assert log.current()[0].images == ("images/0.png",)
    Image.new("RGB", (4, 4), (0, 99, 0)).save(images / "images" / "7.png")
    _, engines = run_here(config)
    assert engines[0].batches == [["q7"]]


@pytest.mark.parametrize("name", ["/dev/zero", "../../outside.png", "pipe.png"])
def test_images_outside_the_data_folder_and_pipes_are_not_read(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    os.mkfifo(data / "pipe.png")
    monkeypatch.setattr(Letters, "load", lambda self, folder: [Item("q0", "What?", (folder / name,))])
    with pytest.raises(RevisitError, match=r"No item of letters can be read: .*(outside|regular)"):
        run_here(make_config(tmp_path / "out", data, **ONE))


# --- damaged logs and wrong data ------------------------------------------------------------------------------------


def test_damaged_lines_are_reported_and_generated_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "out", data, **ONE)
    (first,), _ = run_here(config)
    text = first.path.read_text()
    place = text.index('"text":"') + 8
    first.path.write_text(text[:place] + ("b" if text[place] == "a" else "a") + text[place + 1 :])
    notes: list[str] = []
    monkeypatch.setattr(Reporter, "note", lambda self, note: notes.append(note))
    logs, engines = run_here(config)
    assert any("1 damaged line" in note for note in notes)
    assert generated(engines) == 4  # the batch of the damaged answer
    assert numbers_of(logs) == numbers_of([first])


def test_two_items_with_one_id_raise_before_anything_is_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Letters.load
    monkeypatch.setattr(Letters, "load", lambda self, folder: load(self, folder) * 2)
    with pytest.raises(RevisitError, match="two items with the id 'q0'"):
        run_here(make_config(tmp_path / "out", data))
    assert not (tmp_path / "out").exists()


# --- only visual items ----------------------------------------------------------------------------------------------


class Plain(Shift):
    """Plain decoding of the hash engine."""

    name = "greedy"


def test_items_that_are_answered_without_the_image_are_a_declared_subset(tmp_path: Path, images: Path) -> None:
    methods = (Plain(), Shift(by=3))
    config = make_config(tmp_path / "out", images, model="m1", method=methods, benchmark=Letters(rule="right"))
    whole, _ = run_here(config)
    logs, _ = run_here(config.replace(only_visual=True))
    blind = next(log for log in read_logs(tmp_path / "out") if log.spec.method.control == "no image")
    assert blind.scores is not None
    wrong = {id for id in blind.scores.items if blind.scores.verdict(id) == ("wrong", True)}
    assert 20 < len(wrong) < 100
    for log, before in zip(logs, whole, strict=True):
        assert (log.spec.subset, log.request.excluded) == ("only visual", 120 - len(wrong))
        assert log.scores is not None
        assert set(log.scores.items) == wrong
        texts = {answer.id: answer.text for answer in before.current()}
        assert all(texts[answer.id] == answer.text for answer in log.current())
    first, second = compare(read_logs(tmp_path / "out"), resamples=99)
    assert (first.variant, second.variant) == ("items all", "items only visual")
    assert (first.n, second.n) == (120, len(wrong))
    assert any(f"Subset only visual: {120 - len(wrong)} of 120 items" in note for note in second.notes)
    assert list(second.values) == ["greedy", "shift(by=3)"]
    assert list(first.values) == [*second.values, "greedy [no image]"]


class LoadingEngine(HashEngine):
    """Loads a model for its identity and for every answer, as device maps can require."""

    loaded: ClassVar[set[str]] = set()
    most: ClassVar[int] = 0

    def load(self) -> None:
        self.loaded.add(self.model)
        LoadingEngine.most = max(self.most, len(self.loaded))

    def identity(self, *args: Any) -> dict[str, Any]:
        self.load()
        return super().identity(*args)

    def answer(self, *args: Any) -> list[Answer]:
        self.load()
        return super().answer(*args)

    def close(self) -> None:
        self.loaded.discard(self.model)


@pytest.mark.parametrize("only_visual", [False, True])
def test_one_model_is_in_memory_at_a_time(tmp_path: Path, images: Path, only_visual: bool) -> None:
    options: dict[str, Any] = {"model": ("m1", "m2", "m3"), "method": (Plain(),), "benchmark": Letters(rule="right")}
    LoadingEngine.most = 0
    run(make_config(tmp_path / "out", images, only_visual=only_visual, **options), engine_for=LoadingEngine)
    assert (LoadingEngine.most, LoadingEngine.loaded) == (1, set())


def test_an_error_removes_the_log_without_answers_that_caused_it(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path / "out", data, model="m1", method=(Shift(by=0), Shift(by=1)))
    decode = HashEngine.stream

    def failing(self: HashEngine, method: Any, *rest: Any) -> Any:
        if method.by:
            raise RevisitError("Layer 99 does not exist.")
        return decode(self, method, *rest)

    monkeypatch.setattr(HashEngine, "stream", failing)
    with pytest.raises(RevisitError, match="Layer 99"):
        run_here(config)
    assert [log.spec.method for log in read_logs(tmp_path / "out")] == ["shift"]
