"""Run folders: killed at random moments and damaged in every way, they give the same results or say one sentence."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import damage
import pytest

from revisit.errors import RevisitError
from revisit.evaluation.comparison import compare_folder
from revisit.evaluation.runner import run
from revisit.report.run_report import read_runs
from run_folders import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
from fake_grid import HashEngine, lines_of, make_plan, write_items

SERVER = Path(__file__).with_name("grid_server.py")
ITEMS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_items(tmp_path_factory.mktemp("data"), ITEMS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(make_plan(out, data), engine_for=HashEngine)
    return out


def answers(out: Path) -> dict[str, list[Any]]:
    return {cell: sorted(lines, key=lambda line: line["id"]) for cell, lines in lines_of(out).items()}


def scores(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in out.glob("cells/*/scores.json")}


def check_kills(tmp_path: Path, data: Path, whole: Path, wanted: int) -> None:
    """Kills runs at random moments, `wanted` times in all; every run that ends at last equals the undisturbed one."""
    dice, kills, number = random.Random(wanted), 0, 0
    command = [sys.executable, str(SERVER), str(tmp_path), str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        while kills < wanted:
            print(number, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            time.sleep(dice.expovariate(4))
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(child, signal.SIGKILL)
            ended = int(server.stdout.readline())
            kills += ended == -signal.SIGKILL
            if ended == 0:
                check_whole(tmp_path / str(number), whole)
                number += 1
        server.stdin.close()
    run(make_plan(tmp_path / str(number), data), engine_for=HashEngine)
    check_whole(tmp_path / str(number), whole)


def check_whole(out: Path, whole: Path) -> None:
    assert answers(out) == answers(whole)
    assert scores(out) == scores(whole)
    assert verify(out).problems == []


def test_six_kills_leave_the_same_results(tmp_path: Path, data: Path, whole: Path) -> None:
    check_kills(tmp_path, data, whole, 6)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_two_hundred_kills_leave_the_same_results(tmp_path: Path, data: Path, whole: Path) -> None:
    check_kills(tmp_path, data, whole, 200)


def one_sentence(work: Callable[[], Any]) -> str:
    """What refused the work, checked to be one sentence; nothing if it was done. Any other error is a failure."""
    try:
        work()
    except RevisitError as error:
        text = str(error)
    else:
        return ""
    assert "\n" not in text
    assert len(text) < 1500
    return text


def check_damaged_folder(tmp_path: Path, data: Path, whole: Path, number: int) -> str:
    """What became of one damaged folder: `same`, or the sentence that refused it."""
    dice = random.Random(number)
    out = tmp_path / f"run{number}"
    shutil.copytree(whole, out)
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.name not in (".lock", ".holder")]
    for path in dice.sample(files, dice.choice([1, 1, 1, 2, 4])):
        damage.WAYS[(number + dice.randrange(2)) % len(damage.WAYS)](path, dice)
    verify(out)  # always a list of sentences
    for read in (lambda: compare_folder(out, resamples=99), lambda: read_runs(out)):
        one_sentence(read)
    if refused := one_sentence(lambda: run(make_plan(out, data), engine_for=HashEngine)):
        return refused
    kept = {cell: lines for cell, lines in answers(out).items() if cell in answers(whole)}
    assert kept == answers(whole)
    assert {cell: data for cell, data in scores(out).items() if cell in kept} == scores(whole)
    shutil.rmtree(out)
    return "same"


@pytest.mark.parametrize("number", range(len(damage.WAYS)))
def test_a_damaged_folder_is_repaired_or_refused_in_one_sentence(
    tmp_path: Path, data: Path, whole: Path, number: int
) -> None:
    check_damaged_folder(tmp_path, data, whole, number)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_links_and_no_pipe_is_waited_for(
    tmp_path: Path, data: Path, whole: Path, kind: str
) -> None:
    cell = next(iter(answers(whole)))
    inside = [f"cells/{cell}/{name}" for name in ("cell.json", "scores.json", ".answers.jsonl.tmp", "damaged.jsonl")]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("of somebody else, without a line end")
    for number, name in enumerate(
        (*inside, f"cells/{cell}/answers.jsonl", "results.json", ".results.json.tmp", ".lock", ".holder")
    ):
        out = tmp_path / str(number)
        shutil.copytree(whole, out)
        with (out / "cells" / cell / "answers.jsonl").open("a") as file:
            file.write("damaged\n")  # so that the file is written again
        path = out / name
        path.unlink(missing_ok=True)
        path.symlink_to(elsewhere) if kind == "link" else os.mkfifo(path)
        assert verify(out).problems
        for read in (lambda: compare_folder(out, resamples=99), lambda: read_runs(out)):  # noqa: B023
            one_sentence(read)
        refused = one_sentence(lambda: run(make_plan(out, data), engine_for=HashEngine))  # noqa: B023
        assert refused or answers(out) == answers(whole)
        assert elsewhere.read_text() == "of somebody else, without a line end"


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_hundred_damaged_folders(tmp_path: Path, data: Path, whole: Path) -> None:
    ends = [check_damaged_folder(tmp_path, data, whole, 1000 + number) for number in range(120)]
    repaired = ends.count("same")
    assert repaired >= 60, [end for end in ends if end != "same"]
