"""Work on workers that die: nothing is lost and nothing is done twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from revisit.errors import RevisitError
from revisit.evaluation.engines.dispatch import Lost, dispatch


class Fake:
    """Workers that finish in any order, and die when the dice say so, taking their work with them."""

    def __init__(self, seed: int, death: float, failed_starts: float = 0.0, poison: int | None = None) -> None:
        self.dice = random.Random(seed)
        self.death, self.failed_starts, self.poison = death, failed_starts, poison
        self.handles: dict[int, tuple[int, Any]] = {}  # handle -> (worker, batch or None)
        self.dead: set[int] = set()
        self.discarded: set[int] = set()
        self.started = self.made = 0

    def _handle(self, worker: int, batch: Any) -> int:
        self.made += 1
        self.handles[self.made] = (worker, batch)
        return self.made

    def start(self) -> tuple[int, int]:
        self.started += 1
        return self.started, self._handle(self.started, None)

    def submit(self, worker: int, batch: Any) -> int:
        assert worker not in self.discarded
        return self._handle(worker, batch)

    def wait(self, handles: Sequence[int]) -> int:
        return self.dice.choice(list(handles))

    def result(self, handle: int) -> Any:
        worker, batch = self.handles[handle]
        chance = self.failed_starts if batch is None else self.death
        if worker in self.dead or self.dice.random() < chance or (self.poison is not None and batch == self.poison):
            self.dead.add(worker)
            raise Lost
        return batch

    def discard(self, worker: int) -> None:
        self.discarded.add(worker)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 40), st.integers(1, 5))
def test_every_batch_comes_back_once_while_workers_die(seed: int, count: int, workers: int) -> None:
    pool = Fake(seed, death=0.05)
    try:
        done = list(dispatch(range(1000, 1000 + count), pool, workers))
    except RevisitError:  # three deaths over one batch, which dice may bring about
        assume(False)
    assert sorted(done) == list(range(1000, 1000 + count))
    assert pool.discarded == set(range(1, pool.started + 1))  # nobody is left running


def test_a_batch_that_kills_every_worker_is_named_as_the_cause() -> None:
    with pytest.raises(RevisitError, match="smaller batch size"):
        list(dispatch(range(10), Fake(0, 0.0, poison=7), 2))


def test_workers_that_never_start_end_the_run() -> None:
    with pytest.raises(RevisitError, match="loading the model"):
        list(dispatch(range(10), Fake(0, 0.0, failed_starts=1.0), 2))


def test_a_cluster_without_room_is_not_waited_for_forever() -> None:
    class Full(Fake):
        def wait(self, handles: Sequence[int]) -> Any:
            return None

    with pytest.raises(RevisitError, match="0 of 2 started"):
        list(dispatch(range(10), Full(0, 0.0), 2))


def test_an_error_of_the_work_itself_is_raised() -> None:
    class Broken(Fake):
        def result(self, handle: int) -> Any:
            if self.handles[handle][1] == 3:
                raise ValueError("no such layer")
            return super().result(handle)

    pool = Broken(0, 0.0)
    with pytest.raises(ValueError, match="no such layer"):
        list(dispatch(range(10), pool, 2))
    assert pool.discarded == {1, 2}
