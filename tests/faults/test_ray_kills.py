"""Workers of a Ray cluster killed at random moments: nothing is lost and nothing is answered twice.

Needs Ray (`make test-ray` has it). More kills: `python tests/faults/test_ray_kills.py 200`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not in this environment: run `make test-ray`", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
import ray
from fake_grid import HashEngine, make_config, numbers_of, rows_of, write_items

from revisit.errors import RevisitError
from revisit.eval.engines import ray as engine
from revisit.eval.log import read_logs
from revisit.eval.run import run

TESTS = Path(__file__).parents[1]
KILLS = 20
ITEMS = 100
PAUSE = 0.05  # seconds for a batch of four


class HashRayEngine(engine.RayEngine):
    """The Ray engine with workers that load no model and leave their process ids in a folder."""

    def __init__(self, model: str, pids: Path) -> None:
        super().__init__(model, workers=2, pids=str(pids))

    @property
    def local(self) -> Any:
        return HashEngine(self.model)


class HashWorker(engine.Worker):
    """Answers by hash, as the local run does."""

    def __init__(self, model: str, options: Any) -> None:
        self.engine: Any = HashEngine(model, PAUSE)
        (Path(options["pids"]) / str(os.getpid())).touch()

    def ready(self) -> bool:
        return True


class Killer(threading.Thread):
    """Kills one of the workers every now and then, until it has killed as many as it should."""

    def __init__(self, pids: Path, wanted: int) -> None:
        super().__init__(daemon=True)
        self.pids, self.wanted, self.kills, self.over = pids, wanted, 0, False
        self.dice = random.Random(wanted)

    def run(self) -> None:
        while self.kills < self.wanted and not self.over:
            time.sleep(self.dice.expovariate(2))
            alive = sorted(self.pids.iterdir())
            if alive:
                victim = self.dice.choice(alive)
                victim.unlink()
                with suppress(ProcessLookupError):  # it may have ended with its cell
                    os.kill(int(victim.name), signal.SIGKILL)
                    self.kills += 1


def evaluate(out: Path, data: Path, pids: Path) -> bool:
    """Whether a run came to its end; where three workers were killed over one batch it goes on when started again."""
    try:
        run(make_config(out, data), engine_for=partial(HashRayEngine, pids=pids))
    except RevisitError as error:
        if "workers in a row died" in str(error):
            return False
        raise
    return True


def check_kills(folder: Path, wanted: int) -> int:
    """Evaluates until enough workers were killed; every run equals an undisturbed one. Gives the number of runs."""
    data, pids = write_items(folder / "data", ITEMS), folder / "pids"
    pids.mkdir()
    run(make_config(folder / "whole", data), engine_for=HashEngine)
    killer, runs, refused = Killer(pids, wanted), 0, 0
    killer.start()
    try:
        while killer.kills < wanted:
            out = folder / str(runs)
            while not evaluate(out, data, pids):
                refused += 1
            check_whole(out, folder / "whole")
            runs += 1
            print(f"{killer.kills} kills, {runs} runs equal, started again {refused} times", flush=True)
    finally:
        killer.over = True
        killer.join()
    return runs


def check_whole(out: Path, whole: Path) -> None:
    ours, theirs = rows_of(out), rows_of(whole)
    assert list(ours) == list(theirs)
    for log, rows in ours.items():
        assert len(rows) == ITEMS
        assert sorted(rows, key=lambda row: row["id"]) == sorted(theirs[log], key=lambda row: row["id"])
    assert numbers_of(read_logs(out)) == numbers_of(read_logs(whole))


def start_ray() -> None:
    """A cluster of this machine, whose workers find this file and those that it imports."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(TESTS.parent / "src"), *(str(TESTS / name) for name in ("faults", "eval", "."))]
    )
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)


@pytest.fixture
def _light_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine, "Worker", HashWorker)
    monkeypatch.setenv("PYTHONPATH", "")
    start_ray()
    yield
    ray.shutdown()


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_light_workers")
def test_killed_ray_workers_lose_nothing(tmp_path: Path) -> None:
    assert check_kills(tmp_path, KILLS) > 0


if __name__ == "__main__":
    import test_ray_kills  # workers know this file by its name

    engine.Worker = test_ray_kills.HashWorker  # type: ignore[misc, assignment]
    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        check_kills(Path(folder), int(sys.argv[1]))
