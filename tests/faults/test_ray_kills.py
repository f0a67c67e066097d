"""Workers of a Ray cluster, killed at random moments: no answer is lost or doubled.

Needs Ray (`make test-ray`). More kills: `REVISIT_KILLS=200 make test-ray`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
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
from fake_grid import HashEngine, check_equal, make_config, write_items

from revisit.errors import RevisitError
from revisit.eval.engines import ray as engine
from revisit.eval.run import run

TESTS = Path(__file__).parents[1]
KILLS = int(os.environ.get("REVISIT_KILLS", "20"))
ITEMS = 100
PAUSE = 0.05  # seconds for a batch of four


class HashRayEngine(engine.RayEngine):
    """The Ray engine with workers that load no model and leave their process ids in a folder."""

    def __init__(self, model: str, pids: Path) -> None:
        super().__init__(model, workers=2, pids=str(pids))

    @property
    def local(self) -> Any:
        return HashEngine(self.model)


class HashWorker(engine.RayWorker):
    """A worker that answers with hashes, like the local run."""

    def __init__(self, model: str, options: Any, placement: Any) -> None:
        self.engine: Any = HashEngine(model, PAUSE)
        (Path(options["pids"]) / str(os.getpid())).touch()

    def ready(self) -> bool:
        return True


class Killer(threading.Thread):
    """Kills workers at random moments, `wanted` in all."""

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
                with suppress(ProcessLookupError):  # it may have ended with its log
                    os.kill(int(victim.name), signal.SIGKILL)
                    self.kills += 1


@pytest.fixture
def _light_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a cluster on this machine, whose workers can import this file and the files that it imports."""
    monkeypatch.setattr(engine, "RayWorker", HashWorker)
    folders = [TESTS.parent / "src", TESTS / "faults", TESTS / "eval", TESTS]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.faults
@pytest.mark.timeout(20 * KILLS + 200)
@pytest.mark.usefixtures("_light_workers")
def test_killed_ray_workers_lose_nothing(tmp_path: Path) -> None:
    """Run evaluations until enough workers were killed; each must equal an undisturbed one."""
    data, pids = write_items(tmp_path / "data", ITEMS), tmp_path / "pids"
    pids.mkdir()
    run(make_config(tmp_path / "whole", data), engine_for=HashEngine)
    killer, runs = Killer(pids, KILLS), 0
    killer.start()
    try:
        while killer.kills < KILLS:
            config = make_config(tmp_path / str(runs), data)
            try:
                run(config, engine_for=partial(HashRayEngine, pids=pids))
            except RevisitError as error:
                if "workers in a row died" in str(error):  # by this test; the same command resumes
                    continue
                raise
            check_equal(tmp_path / str(runs), tmp_path / "whole")
            runs += 1
    finally:
        killer.over = True
        killer.join()
    assert runs > 0
