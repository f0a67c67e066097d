"""Evaluations with an engine that needs no model: kills, resumes, changed settings, cached scores, unreadable images."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_grid import HashEngine, Letters, Shift, make_config, numbers_of, rows_of, write_items
from PIL import Image
from typer.testing import CliRunner

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.compare import compare
from revisit.eval.config import EvalConfig
from revisit.eval.log import Log, item_seed, read_logs, unfinished
from revisit.eval.report.comparisons import value_table
from revisit.eval.report.sample_browser import read_samples
from revisit.eval.run import Reporter, run
from revisit.eval.statistics import metric_interval, wilson

SCRIPT = Path(__file__).with_name("fake_grid.py")
ONE = {"model": "m1", "method": (Shift(),)}


def run_here(config: EvalConfig, **engine: Any) -> tuple[list[Log], list[HashEngine]]:
    engines: list[HashEngine] = []

    def open_one(model: str) -> HashEngine:
        engines.append(HashEngine(model, **engine))
        return engines[-1]

    return run(config, engine_for=open_one), engines


def asked(engines: list[HashEngine]) -> int:
    return sum(len(batch) for engine in engines for batch in engine.asked)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_items(tmp_path / "data", 23)


def test_an_evaluation_from_nothing(tmp_path: Path, data: Path) -> None:
    logs, engines = run_here(make_config(tmp_path / "out", data))
    names = [("m1", "shift"), ("m1", "shift(by=3)"), ("m2", "shift"), ("m2", "shift(by=3)")]
    assert [(log.spec.model, log.spec.method) for log in logs] == names
    assert asked(engines) == 4 * 23
    assert all(engine.closed for engine in engines)
    log = logs[1]
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


def test_results_json_has_the_numbers_of_the_printed_tables(tmp_path: Path, data: Path) -> None:
    logs, _ = run_here(make_config(tmp_path / "out", data, **ONE))
    (entry,) = json.loads((tmp_path / "out" / "results.json").read_text())["logs"]
    assert logs[0].scores is not None
    printed = float(logs[0].scores.shown["vowels"].text(logs[0].scores.metrics["vowels"]))
    assert entry["metrics"]["vowels"]["value"] == pytest.approx(printed, abs=0.05)
    assert (entry["complete"], entry["answers"], entry["method"]) == (True, 23, "shift")
    (tmp_path / "out" / "results.json").write_text("not read back")
    _, engines = run_here(make_config(tmp_path / "out", data, **ONE))
    assert asked(engines) == 0


def test_a_finished_evaluation_is_neither_asked_nor_scored_again(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a paid judge, scoring old answers again would cost money and change old numbers."""
    config = make_config(tmp_path / "out", data)
    first, _ = run_here(config)
    stored = {path: path.read_bytes() for path in (tmp_path / "out/logs").iterdir()}
    scored: list[int] = []
    original = Letters.score

    def counting(self: Letters, items: list[Item], answers: Mapping[str, str]) -> Scores:
        scored.append(len(items))
        return original(self, items, answers)

    monkeypatch.setattr(Letters, "score", counting)
    second, engines = run_here(config)
    assert (asked(engines), scored) == (0, [])
    assert {path: path.read_bytes() for path in (tmp_path / "out/logs").iterdir()} == stored
    assert numbers_of(second) == numbers_of(first)
    run_here(config.replace(method=(Shift(by=0), Shift(by=3), Shift(by=5))))
    assert scored == [23, 23]  # the new method with both models


def test_changed_answers_are_scored_again(tmp_path: Path, data: Path) -> None:
    config = make_config(tmp_path / "out", data, **ONE)
    (first,), _ = run_here(config)
    first.path.with_suffix(".scores.json").write_text("{")
    (second,), engines = run_here(config)
    assert asked(engines) == 0
    assert second.scores == first.scores
    rows = first.path.read_bytes().splitlines(keepends=True)
    first.path.write_bytes(b"".join(rows[:5] + rows[6:]))
    (log,) = read_logs(tmp_path / "out")
    assert log.scores is None  # of answers that are not there any more
    (third,), engines = run_here(config)
    assert asked(engines) == 4
    assert third.scores == first.scores


def test_batches_have_prompts_of_similar_length_longest_first(tmp_path: Path, data: Path) -> None:
    _, engines = run_here(make_config(tmp_path / "out", data))
    prompts = {item.id: len(item.prompt) for item in Letters().load(data)}
    lengths = [prompts[i] for batch in engines[0].asked[:6] for i in batch]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(batch) for batch in engines[0].asked[:6]] == [4, 4, 4, 4, 4, 3]


def test_a_larger_limit_keeps_the_answers_of_the_smaller(tmp_path: Path, data: Path) -> None:
    run_here(make_config(tmp_path / "out", data, limit=8))
    logs, _ = run_here(make_config(tmp_path / "out", data))
    assert [log.answered for log in logs] == [23] * 4
    whole, _ = run_here(make_config(tmp_path / "whole", data))
    assert numbers_of(logs) == numbers_of(whole)
    for ours, theirs in zip(rows_of(tmp_path / "out").values(), rows_of(tmp_path / "whole").values(), strict=True):
        assert sorted(ours, key=lambda x: x["id"]) == sorted(theirs, key=lambda x: x["id"])


@pytest.mark.parametrize(
    "change",
    [
        {"sample": True, "seed": 1},
        {"max_new_tokens": 5},
        {"sample": True, "temperature": 0.7},
        {"method": (Shift(by=1), Shift(by=4))},
        {"benchmark": (Letters(rule="strict"),)},
        {"weights": "w2"},
    ],
    ids=str,
)
def test_no_changed_setting_reuses_an_answer(tmp_path: Path, data: Path, change: dict[str, Any]) -> None:
    sampled = {"sample": True} if "seed" in change else {}
    config = make_config(tmp_path / "out", data, **sampled)
    run_here(config)
    engine = {"weights": change["weights"]} if "weights" in change else {}
    _, engines = run_here(config.replace(**{k: v for k, v in change.items() if k != "weights"}), **engine)
    assert asked(engines) == 4 * 23


def test_changed_data_reuses_only_what_is_unchanged(tmp_path: Path, data: Path) -> None:
    run_here(make_config(tmp_path / "out", data, **ONE))
    lines = (data / "items.txt").read_text().splitlines()
    lines[5] = "another question"
    (data / "items.txt").write_text("\n".join(lines) + "\n")
    logs, engines = run_here(make_config(tmp_path / "out", data, **ONE, batch_size=1))
    assert engines[0].asked == [["q5"]]
    (stored,) = rows_of(tmp_path / "out").values()
    assert [row["id"] for row in stored].count("q5") == 2  # the file only grows
    assert (logs[0].answered, len(logs[0].current())) == (23, 23)


def test_batch_size_is_part_of_the_spec_only_if_batches_could_matter(tmp_path: Path, data: Path) -> None:
    for invariant, expected in ((True, 0), (False, 4 * 23)):
        out = tmp_path / str(invariant)
        run_here(make_config(out, data), invariant=invariant)
        _, engines = run_here(make_config(out, data, batch_size=8), invariant=invariant)
        assert asked(engines) == expected


def test_seeds_belong_to_items(tmp_path: Path, data: Path) -> None:
    assert item_seed(0, "a") == item_seed(0, "a") != item_seed(0, "b")
    assert item_seed(0, "a") != item_seed(1, "a")
    assert 0 <= item_seed(3, "x") < 2**56
    run_here(make_config(tmp_path / "out", data))
    _, engines = run_here(make_config(tmp_path / "out", data, seed=5))  # nothing is drawn
    assert asked(engines) == 0


def test_other_commands_add_to_a_folder_and_each_returns_its_own_logs(tmp_path: Path, data: Path) -> None:
    found = [run_here(make_config(tmp_path / "out", data, **ONE, max_new_tokens=n))[0] for n in (3, 5, 3)]
    assert [[log.spec.decoding["max_new_tokens"] for log in logs] for logs in found] == [[3], [5], [3]]
    assert len(read_logs(tmp_path / "out")) == 2
    (tmp_path / "out" / "logs" / found[0][0].path.name).unlink()
    assert [log.spec.decoding["max_new_tokens"] for log in read_logs(tmp_path / "out")] == [5]


def test_new_weights_replace_the_old_log_but_not_the_old_answers(tmp_path: Path, data: Path) -> None:
    config = make_config(tmp_path / "out", data, **ONE)
    run_here(config)
    run_here(config, weights="w2")
    assert [log.spec.fingerprint for log in read_logs(tmp_path / "out")] == ["w2"]
    assert len(rows_of(tmp_path / "out")) == 2


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
    reference, _ = run_here(make_config(whole, data, model="m1"))
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
    assert rows_of(out) == rows_of(whole)  # nothing lost, nothing twice, in the same order
    assert numbers_of(read_logs(out)) == numbers_of(reference)


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
    assert asked(engines) == 2 * 23
    assert [log.spec.benchmark for log in logs] == ["letters", "letters(suffix= In one word.)"]
    assert "suffix_In_one_word" in logs[1].path.name
    assert [table.variant for table in compare(logs, resamples=99)] == ["suffix ", "suffix  In one word."]
    alone, _ = run_here(make_config(tmp_path / "alone", data, **ONE, benchmark=TWO_PROTOCOLS[:1]))
    assert alone[0].scores == logs[0].scores != logs[1].scores


# --- stopped in the middle ------------------------------------------------------------------------------------------


class Stops(HashEngine):
    """Stops in the middle of the second log."""

    def answer(self, *arguments: Any) -> Any:
        if len(self.asked) == 6 + 2:
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


def test_view_shows_what_was_asked_and_that_the_run_is_incomplete(stopped: EvalConfig, data: Path) -> None:
    (data / "items.txt").write_text("another question\n" * 23)  # changed since
    columns, samples, notes = read_samples(read_logs(Path(stopped.out)))
    assert notes[0].startswith("This run is incomplete: 2 of 3")
    assert [method["name"] for method in columns.methods] == ["shift"] * 3  # also the one that was not begun
    assert len(samples) == 23
    assert {sample.prompt for sample in samples} == {f"prompt {i} {'x' * (i * 7 % 13)}" for i in range(23)}
    assert all("v" in sample.answers[0] for sample in samples)  # verdicts of the complete log
    partial = [sample.answers[1] for sample in samples if 1 in sample.answers]
    assert ["v" in answer for answer in partial] == [False] * 8


class Interrupting(Reporter):
    """Interrupts a run when its first log begins."""

    def start(self, title: str, total: int, done: int) -> None:
        raise KeyboardInterrupt


def test_a_larger_limit_is_unfinished_until_its_answers_are_there(tmp_path: Path, data: Path) -> None:
    config = make_config(tmp_path / "out", data, **ONE, limit=8)
    run_here(config)
    for limit, complete in ((8, True), (20, False), (8, True)):  # all that is requested, or some of it
        with pytest.raises(KeyboardInterrupt):
            run(config.replace(limit=limit), Interrupting(), HashEngine)
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


def test_unreadable_images_raise_before_anything_is_written(tmp_path: Path, images: Path) -> None:
    (images / "images" / "4.png").unlink()
    (images / "images" / "9.png").write_bytes((images / "images" / "9.png").read_bytes()[:50])
    with pytest.raises(RevisitError, match=r"2 images of letters cannot be read: .*4\.png.*9\.png"):
        run_here(make_config(tmp_path / "out", images, **ONE))
    assert not (tmp_path / "out").exists()


def test_a_changed_image_is_asked_again(tmp_path: Path, images: Path) -> None:
    config = make_config(tmp_path / "out", images, **ONE, limit=20, batch_size=1)
    (log,), _ = run_here(config)
    assert log.current()[0].images == ("images/0.png",)
    Image.new("RGB", (4, 4), (0, 99, 0)).save(images / "images" / "7.png")
    _, engines = run_here(config)
    assert engines[0].asked == [["q7"]]


@pytest.mark.parametrize("name", ["/dev/zero", "../../outside.png", "pipe.png"])
def test_images_outside_the_data_folder_and_pipes_are_not_read(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    os.mkfifo(data / "pipe.png")
    monkeypatch.setattr(Letters, "load", lambda self, folder: [Item("q0", "What?", (folder / name,))])
    with pytest.raises(RevisitError, match=r"1 image of letters cannot be read: .*(outside|regular)"):
        run_here(make_config(tmp_path / "out", data, **ONE))


# --- odd folders and configurations -------------------------------------------------------------------------------------


class Notes(Reporter):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_damaged_lines_are_reported_and_generated_again(tmp_path: Path, data: Path) -> None:
    config = make_config(tmp_path / "out", data, **ONE)
    (first,), _ = run_here(config)
    text = first.path.read_text()
    place = text.index('"text":"') + 8
    first.path.write_text(text[:place] + ("b" if text[place] == "a" else "a") + text[place + 1 :])
    notes, engine = Notes(), HashEngine("m1")
    logs = run(config, notes, engine_for=lambda _: engine)
    assert any("1 damaged line" in sentence for sentence in notes.notes)
    assert asked([engine]) == 4  # the batch of the damaged answer
    assert numbers_of(logs) == numbers_of([first])


@pytest.mark.parametrize(
    ("change", "words"),
    [({"method": (Shift(), Shift())}, "'shift' is listed twice"), ({"model": ()}, "at least one model")],
)
def test_nonsense_raises_before_anything_is_written(tmp_path: Path, data: Path, change: Any, words: str) -> None:
    with pytest.raises(RevisitError, match=words):
        run_here(make_config(tmp_path / "out", data, **change))
    assert not (tmp_path / "out").exists()


def test_two_items_with_one_id_raise(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Letters.load
    monkeypatch.setattr(Letters, "load", lambda self, folder: load(self, folder) * 2)
    with pytest.raises(RevisitError, match="two items with the id 'q0'"):
        run_here(make_config(tmp_path / "out", data))


def test_mean_of_settings_gets_a_stratified_interval() -> None:
    parts = {f"{s}/F1": {f"{s}{i}": (float(i % 3 > 0), 1.0) for i in range(30)} for s in "ab"}
    found = metric_interval("F1", 2 / 3, parts)
    assert found is not None
    assert found.low < 2 / 3 < found.high
    assert metric_interval("F1", 0.5, parts) is None  # not their mean: no interval is better than a wrong one


def test_methods_answered_by_other_weights_are_not_compared(tmp_path: Path, data: Path) -> None:
    for by, weights in ((0, "aaaaaaaaaa"), (3, "bbbbbbbbbb")):
        run_here(make_config(tmp_path / "out", data, model="m1", method=Shift(by=by)), weights=weights)
    tables = compare(read_logs(tmp_path / "out"), resamples=99)
    assert [table.variant for table in tables] == ["weights aaaaaaaa", "weights bbbbbbbb"]
    assert [list(table.values) for table in tables] == [["shift"], ["shift(by=3)"]]
    assert "letters, m1, weights aaaaaaaa (" in value_table(tables[0]).caption


def test_what_cannot_be_compared_does_not_hide_the_rest(
    tmp_path: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_here(make_config(tmp_path / "out", data, method=Shift(by=0), limit=6))
    run_here(make_config(tmp_path / "out", data, model="m1", method=Shift(by=3), limit=4))
    logs = read_logs(tmp_path / "out")
    assert [table.model for table in compare(logs, resamples=99)] == ["m2"]
    assert "not run on the same items" in caplog.text


# --- only visual items --------------------------------------------------------------------------------------------------


class Plain(Shift):
    """Plain decoding of the hash engine."""

    name = "greedy"


def test_items_that_are_answered_without_the_image_are_a_declared_subset(tmp_path: Path, images: Path) -> None:
    methods = (Plain(), Shift(by=3))
    config = make_config(tmp_path / "out", images, model="m1", method=methods, benchmark=Letters(rule="right"))
    whole, _ = run_here(config)
    logs, _ = run_here(config.replace(only_visual=True))
    blind = next(log for log in read_logs(tmp_path / "out") if log.spec.control == "no image")
    assert blind.scores is not None
    wrong = {id for id in blind.scores.items if blind.scores.verdict(id) == ("wrong", True)}
    assert 20 < len(wrong) < 100
    for log, before in zip(logs, whole, strict=True):
        assert (log.spec.subset, log.request.left_out) == ("only visual", 120 - len(wrong))
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


def test_a_folder_of_an_earlier_version_is_rejected(tmp_path: Path, data: Path) -> None:
    (tmp_path / "out/cells").mkdir(parents=True)
    with pytest.raises(RevisitError, match="use another --out"):
        run_here(make_config(tmp_path / "out", data))


def test_tables_keep_the_order_of_the_methods(tmp_path: Path, data: Path) -> None:
    methods = (Shift(by=3), Shift(by=1), Shift(by=2))
    run_here(make_config(tmp_path / "out", data, model="m1", method=methods))
    assert [log.spec.method for log in read_logs(tmp_path / "out")] == ["shift(by=3)", "shift(by=1)", "shift(by=2)"]


def test_a_log_without_answers_goes_with_the_error_that_caused_it(
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
