"""Work given to workers that may die: every batch is answered exactly once, whoever survives.

Nothing here knows what a worker is; `Pool` says how to start one, give it work and hear of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from revisit.errors import RevisitError

Batch = TypeVar("Batch")
DEPTH = 2  # batches a worker has in hand, so that it never waits for the next
ATTEMPTS = 3  # workers that may die over one batch


class Lost(Exception):
    """The worker is gone: its machine died, or its process did."""


class Pool(Protocol):
    """Workers of some kind. Handles are hashable and stand for one piece of work under way."""

    def start(self) -> tuple[Any, Any]:
        """A new worker, and the handle that is done when it is ready for work."""

    def submit(self, worker: Any, batch: Any) -> Any:
        """Give a worker a batch; the handle of the work."""

    def wait(self, handles: Sequence[Any]) -> Any | None:
        """One handle that is done; None if nothing happened for too long."""

    def result(self, handle: Any) -> Any:
        """What a done handle gave; raises `Lost` if its worker is gone, and any error of the work itself."""

    def discard(self, worker: Any) -> None:
        """A worker that is not used any more."""


@dataclass
class _Worker:
    handle: Any
    ready: bool = False
    work: dict[Any, Any] = field(default_factory=dict)  # handle -> batch


def dispatch(batches: Iterable[Batch], pool: Pool, workers: int, patience: int = 3) -> Iterator[Any]:
    """The results of all batches, in the order they come; work of lost workers goes to others.

    A lost worker is replaced as soon as the pool has room for it. `patience` is how many waits in a row may end with
    nothing before the run gives up.
    """
    source = iter(batches)
    again: deque[Batch] = deque()
    losses: dict[int, int] = {}
    pending: dict[Any, _Worker] = {}  # handle -> its worker: a start, or work under way
    alive: list[_Worker] = []
    idle = failed_starts = 0

    def start() -> None:
        worker, ready = pool.start()
        member = _Worker(worker)
        alive.append(member)
        pending[ready] = member

    def next_batch() -> Batch | None:
        return again.popleft() if again else next(source, None)

    def fill(member: _Worker) -> None:
        while member.ready and len(member.work) < DEPTH and (batch := next_batch()) is not None:
            handle = pool.submit(member.handle, batch)
            member.work[handle] = batch
            pending[handle] = member

    def replace(member: _Worker) -> None:
        nonlocal failed_starts
        failed_starts = 0 if member.ready else failed_starts + 1
        if failed_starts >= ATTEMPTS * workers:
            raise RevisitError(
                f"{failed_starts} workers in a row died while loading the model; their machines probably lack the memory for it."
            )
        for handle in [h for h, m in pending.items() if m is member]:
            del pending[handle]
        alive.remove(member)
        pool.discard(member.handle)
        for batch in reversed(member.work.values()):
            losses[id(batch)] = losses.get(id(batch), 0) + 1
            if losses[id(batch)] >= ATTEMPTS:
                raise RevisitError(
                    f"{ATTEMPTS} workers in a row died over the same batch; it is probably too large for their memory: use a smaller "
                    "batch size."
                )
            again.appendleft(batch)
        start()

    try:
        for _ in range(workers):
            start()
        while pending:
            handle = pool.wait(list(pending))
            if handle is None:
                idle += 1
                if idle >= patience:
                    raise RevisitError(
                        f"No worker has done anything for a long time ({sum(m.ready for m in alive)} of {len(alive)} started): the cluster "
                        "may lack free CPUs, GPUs or memory for them; ask for fewer workers."
                    )
                continue
            idle = 0
            member = pending[handle]
            try:
                result = pool.result(handle)
            except Lost:
                replace(member)
            else:
                del pending[handle]
                if member.ready:
                    done = member.work.pop(handle)
                    losses.pop(id(done), None)
                    fill(member)
                    yield result
                else:
                    member.ready = True
            for other in alive:
                fill(other)
            if not again and not any(m.work for m in alive):
                rest = next(source, None)
                if rest is None:
                    break
                again.append(rest)
    finally:
        for member in alive:
            pool.discard(member.handle)
