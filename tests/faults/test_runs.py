"""Runs killed at random moments, and damaged run folders: the same results, or an error of one sentence."""

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
from functools import partial
from pathlib import Path
from typing import Any

import damage
import pytest
from PIL import Image

from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.compare import compare
from revisit.eval.log import read_logs
from revisit.eval.run import run
from revisit.paper.report import find_runs

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
from fake_grid import HashEngine, Shift, answers_of, check_equal, make_config, write_items

SERVER = Path(__file__).with_name("grid_server.py")
ITEMS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_items(tmp_path_factory.mktemp("data"), ITEMS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(make_config(out, data), engine_for=HashEngine)
    return out


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_two_hundred_kills_leave_the_same_results(tmp_path: Path, data: Path, whole: Path) -> None:
    """Every run that ends equals the undisturbed one; the default suite kills twelve times (tests/eval/test_run.py)."""
    dice, kills, number = random.Random(200), 0, 0
    command = [sys.executable, str(SERVER), str(tmp_path), str(data)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        while kills < 200:
            print(number, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            time.sleep(dice.expovariate(4))
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(child, signal.SIGKILL)
            ended = int(server.stdout.readline())
            kills += ended == -signal.SIGKILL
            if ended == 0:
                check_equal(tmp_path / str(number), whole)
                number += 1
        server.stdin.close()
    run(make_config(tmp_path / str(number), data), engine_for=HashEngine)
    check_equal(tmp_path / str(number), whole)


def one_sentence(work: Callable[[], Any]) -> str:
    """Return the message of a RevisitError, which must be one sentence; empty without an error."""
    try:
        work()
    except RevisitError as error:
        text = str(error)
    else:
        return ""
    assert "\n" not in text
    assert len(text) < 1500
    return text


def contents(path: Path) -> dict[str, bytes]:
    """Return the content of a file, or of all files of a folder."""
    return {str(file): file.read_bytes() for file in [path, *path.rglob("*")] if file.is_file()}


def check_damaged_folder(tmp_path: Path, data: Path, whole: Path, number: int) -> str:
    """Damage a copy of a run and run it again; return `same` if it then equals the undisturbed one, or else the error."""
    dice = random.Random(number)
    out = tmp_path / f"run{number}"
    shutil.copytree(whole, out)
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    for path in dice.sample(files, dice.choice([1, 1, 1, 2, 4])):
        damage.WAYS[(number + dice.randrange(2)) % len(damage.WAYS)](path, dice)
    for read in (lambda: compare(read_logs(out), resamples=99), lambda: find_runs(out)):
        one_sentence(read)
    if raised := one_sentence(lambda: run(make_config(out, data), engine_for=HashEngine)):
        return raised
    check_equal(out, whole)
    shutil.rmtree(out)
    return "same"


@pytest.mark.parametrize("number", range(len(damage.WAYS)))
def test_a_damaged_folder_is_completed_or_raises_one_sentence(
    tmp_path: Path, data: Path, whole: Path, number: int
) -> None:
    check_damaged_folder(tmp_path, data, whole, number)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_are_not_followed_and_pipes_do_not_block(tmp_path: Path, data: Path, whole: Path, kind: str) -> None:
    log = next(iter(answers_of(whole)))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("of somebody else, without a line end")
    names = (f"logs/{log}", f"logs/{log.removesuffix('jsonl')}scores.json", "results.json", ".results.json.tmp")
    for number, name in enumerate(names):
        out = tmp_path / str(number)
        shutil.copytree(whole, out)
        path = out / name
        path.unlink(missing_ok=True)
        path.symlink_to(elsewhere) if kind == "link" else os.mkfifo(path)
        for read in (lambda: compare(read_logs(out), resamples=99), lambda: find_runs(out)):  # noqa: B023
            one_sentence(read)
        raised = one_sentence(lambda: run(make_config(out, data), engine_for=HashEngine))  # noqa: B023
        assert raised or answers_of(out) == answers_of(whole)
        assert elsewhere.read_text() == "of somebody else, without a line end"


@pytest.mark.parametrize(
    ("command", "name"),
    [("view", name) for name in ("view", "view/images", "view/images/000000.jpg", "view/index.html")]
    + [("report", name) for name in ("figures", "report.html", "report.md")]
    + [("eval", name) for name in ("logs", "results.json")],
)
def test_no_command_writes_through_a_link(tmp_path: Path, command: str, name: str) -> None:
    data, out, elsewhere = write_items(tmp_path / "data", 2), tmp_path / "out", tmp_path / "elsewhere"
    (data / "images").mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8)).save(data / "images" / f"{number}.png")
    config = make_config(out, data)
    run(config, engine_for=HashEngine)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    if (out / name).exists():
        (out / name).rename(elsewhere)
    elif "." in name:
        elsewhere.write_text("of somebody else")
    else:
        elsewhere.mkdir()
    (out / name).symlink_to(elsewhere)
    before = contents(elsewhere)
    if command == "eval":
        act = partial(run, config.replace(method=(Shift(by=5),)), engine_for=HashEngine)
    else:
        act = partial(app, [command, str(out)], standalone_mode=False)
    with pytest.raises(RevisitError, match=f"{Path(name).name} is a link"):
        act()
    assert contents(elsewhere) == before


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_hundred_damaged_folders(tmp_path: Path, data: Path, whole: Path) -> None:
    ends = [check_damaged_folder(tmp_path, data, whole, 1000 + number) for number in range(120)]
    completed = ends.count("same")
    assert completed >= 60, [end for end in ends if end != "same"]
