"""The engine on a Ray cluster: this process sends batches to actors with one model each.

Answers equal those of the local engine, so both have the same identity, and a run can continue with either. Images are sent with the
items; only the model has to be reachable from the workers' machines.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, need
from revisit.eval.benchmarks.base import Item
from revisit.eval.engines.base import Engine
from revisit.eval.log import Answer
from revisit.io.files import read_file
from revisit.io.images import MAX_BYTES
from revisit.io.records import Fields

if TYPE_CHECKING:  # torch is slow to import
    from revisit.eval.engines.local import LocalEngine

WAIT = 360.0  # seconds after which a run stops if the cluster has not started a single worker
ATTEMPTS = 3  # deaths per worker without an answer in between after which a run stops


def _local_engine(model: str, options: Fields) -> LocalEngine:
    from revisit.eval.engines.local import LocalEngine

    return LocalEngine(model, **options)


class RayEngine(Engine):
    """An engine for one model on many machines. `workers` defaults to one per GPU, or one per node without GPUs."""

    def __init__(
        self,
        model: str = "tiny",
        workers: int | None = None,
        address: str | None = None,
        **options: Any,
    ) -> None:
        self.model, self.workers, self.address, self.options = model, workers, address, options
        self._started = False

    @cached_property
    def local(self) -> LocalEngine:
        """The engine of a worker, here only for its identity: no model is loaded."""
        return _local_engine(self.model, self.options)

    @cached_property
    def ray(self) -> Any:
        """Ray, connected to the cluster, or to a new one on this machine."""
        need("ray")
        import ray

        if not ray.is_initialized():
            check_reachable(self.address)
            try:
                ray.init(address=self.address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RevisitError(f"There is no Ray cluster at {self.address!r}: {error}") from None
            self._started = True
        return ray

    def identity(self, batch_size: int, items: Sequence[Item]) -> Fields:
        return self.local.identity(batch_size, items)

    def stream(
        self, method: Method, decoding: Decoding, seed: int, batches: Iterable[Sequence[Item]]
    ) -> Iterator[list[Answer]]:
        """Send batches to free workers. A worker that dies is replaced, and its batch is sent to another one."""
        ray = self.ray
        gpus = int(ray.cluster_resources().get("GPU", 0))
        workers = self.workers or gpus or sum(bool(node["Alive"]) for node in ray.nodes())
        remote = ray.remote(num_cpus=1, num_gpus=int(gpus > 0), max_restarts=0)(RayWorker)
        waiting = deque(batches)
        pending: dict[Any, tuple[Any, Sequence[Item] | None]] = {}  # handle -> worker and its batch; None: it starts
        free: list[Any] = []
        deaths, started = 0, False
        died = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.OutOfMemoryError)

        def start() -> None:
            worker = remote.remote(self.model, self.options, self.local.placement)
            pending[worker.started.remote()] = (worker, None)

        try:
            for _ in range(workers):
                start()
            while waiting or any(batch is not None for _, batch in pending.values()):
                while waiting and free:
                    worker, items = free.pop(), waiting.popleft()
                    files = [[read_file(path, MAX_BYTES) for path in item.images] for item in items]
                    bare = [replace(item, meta={}) for item in items]
                    pending[worker.answer.remote(method, decoding, seed, bare, files)] = (worker, items)
                done, _ = ray.wait(list(pending), num_returns=1, timeout=WAIT)
                if not done:
                    if started:  # loading or a batch may take hours, and Ray reports the death of a worker
                        continue
                    raise RevisitError(
                        f"No worker has started within {WAIT:.0f} seconds: the cluster may lack free CPUs, GPUs or memory; "
                        "use fewer workers."
                    )
                worker, batch = pending.pop(done[0])
                try:
                    result = ray.get(done[0])
                except ray.exceptions.RayTaskError as error:
                    raise error.as_instanceof_cause() from None
                except died as error:
                    deaths += 1
                    if deaths >= ATTEMPTS * workers:
                        raise RevisitError(
                            f"{deaths} workers in a row died; their machines probably lack the memory for the model, or for a batch of "
                            "this size: use a smaller --batch-size."
                        ) from error
                    if batch is not None:
                        waiting.appendleft(batch)
                    start()
                    continue
                if result is None:
                    started = True
                    pending[worker.ready.remote()] = (worker, None)
                    continue
                free.append(worker)
                if batch is not None:
                    deaths = 0
                    yield result
        finally:
            for worker in [*free, *(worker for worker, _ in pending.values())]:
                ray.kill(worker)

    def close(self) -> None:
        if self._started:
            self.ray.shutdown()
            self._started = False
            del self.ray  # another answer connects again


def check_reachable(address: str | None) -> None:
    """Raise RevisitError if nothing listens at an address; Ray itself would try for many minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=20).close()
    except OSError as error:
        raise RevisitError(f"There is no Ray cluster at {address!r}: {error.strerror or error}.") from None


class RayWorker:
    """One model in one process of the cluster, which must have the device and dtype of the spec."""

    def __init__(self, model: str, options: Fields, placement: tuple[str, str]) -> None:
        import torch

        torch.set_num_threads(1)  # a worker has one CPU of the cluster
        self.engine = _local_engine(model, options)
        self.engine.placement = placement  # loading the model compares it with the actual one

    def started(self) -> None:
        """Do nothing; returns as soon as the cluster has room for the worker."""

    def ready(self) -> bool:
        """Load the model; return True when it is loaded."""
        return self.engine.loaded is not None

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], files: Sequence[Sequence[bytes]]
    ) -> list[Answer]:
        """Return the answers to one batch."""
        contents = {item.id: content for item, content in zip(items, files, strict=True)}
        opened = self.engine.answers(
            method, decoding, seed, [items], lambda item: self.engine.open_item(item, contents[item.id])
        )
        return next(opened)
