"""The same evaluation on a Ray cluster: actors that hold one model each, fed by the runner of this process.

Answers are those of the local engine, so its identity is used and a run may go on with either. Pictures travel with
the jobs; only the model has to be reachable from the workers' machines.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError, need
from revisit.evaluation.engines.base import BadImage, Engine, Job, answers_to, decode_images
from revisit.evaluation.engines.dispatch import Lost, dispatch
from revisit.evaluation.records import Answer

WAIT = 120.0  # seconds between signs of life


class RayEngine(Engine):
    """One model on many machines. `workers` defaults to one per GPU, or one per node where there are none."""

    def __init__(
        self,
        model: str = "tiny",
        workers: int | None = None,
        address: str | None = None,
        cpus_per_worker: int = 1,
        gpus_per_worker: int | None = None,
        **options: Any,
    ) -> None:
        if workers is not None and workers < 1:
            raise RevisitError(f"workers must be at least 1, not {workers}.")
        self.model, self.workers, self.address, self.options = model, workers, address, options
        self.cpus, self.gpus = cpus_per_worker, gpus_per_worker
        self._ours = False

    @cached_property
    def local(self) -> Any:
        """The engine that a worker runs; here it only says what it is, its model is never loaded."""
        from revisit.evaluation.engines.local import LocalEngine

        return LocalEngine(self.model, **self.options)

    @cached_property
    def ray(self) -> Any:
        """Ray, connected to the cluster (or to one of its own on this machine)."""
        need("ray")
        import ray

        if not ray.is_initialized():
            check_reachable(self.address)
            try:
                ray.init(address=self.address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise RevisitError(f"There is no Ray cluster at {self.address!r}: {error}") from None
            self._ours = True
        return ray

    def identity(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.local.identity()
        return found

    def batch_invariant(self, decoding: Decoding) -> bool:
        return bool(self.local.batch_invariant(decoding))

    def stream(
        self, method: Method, decoding: Decoding, batches: Iterable[Sequence[Job]]
    ) -> Iterator[list[Answer | BadImage]]:
        """Batches go to whichever worker is free; those of a worker that dies go to another."""
        pool = Actors(self, method, decoding)
        return dispatch((list(batch) for batch in batches), pool, self.workers or self._default_workers())

    def _default_workers(self) -> int:
        gpus = int(self.ray.cluster_resources().get("GPU", 0))
        return gpus // (self.gpus or 1) or sum(bool(node["Alive"]) for node in self.ray.nodes())

    def close(self) -> None:
        if self._ours:
            self.ray.shutdown()
            self._ours = False


def check_reachable(address: str | None) -> None:
    """Raises RevisitError at once where nobody listens; Ray itself would try for many minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=20).close()
    except OSError as error:
        raise RevisitError(f"There is no Ray cluster at {address!r}: {error.strerror or error}.") from None


class Actors:
    """Ray actors as a `dispatch.Pool`."""

    def __init__(self, engine: RayEngine, method: Method, decoding: Decoding) -> None:
        self.engine, self.method, self.decoding = engine, method, decoding
        ray = engine.ray
        gpus = engine.gpus if engine.gpus is not None else int(ray.cluster_resources().get("GPU", 0) > 0)
        self.remote = ray.remote(num_cpus=engine.cpus, num_gpus=gpus, max_restarts=0)(Worker)

    def start(self) -> tuple[Any, Any]:
        actor = self.remote.remote(self.engine.model, self.engine.options, self.engine.cpus)
        return actor, actor.ready.remote()

    def submit(self, worker: Any, batch: Sequence[Job]) -> Any:
        return worker.answer.remote(self.method, self.decoding, [(job, read_files(job)) for job in batch])

    def wait(self, handles: Sequence[Any]) -> Any | None:
        done, _ = self.engine.ray.wait(list(handles), num_returns=1, timeout=WAIT)
        return done[0] if done else None

    def result(self, handle: Any) -> Any:
        errors = self.engine.ray.exceptions
        try:
            return self.engine.ray.get(handle)
        except errors.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        except (errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError) as error:
            raise Lost(str(error)) from None

    def discard(self, worker: Any) -> None:
        self.engine.ray.kill(worker)


class Worker:
    """One model in one process of the cluster."""

    def __init__(self, model: str, options: Mapping[str, Any], cpus: int) -> None:
        import torch

        from revisit.evaluation.engines.local import LocalEngine

        torch.set_num_threads(max(1, cpus))
        self.engine = LocalEngine(model, **options)

    def ready(self) -> bool:
        """True once the model is loaded."""
        return self.engine.loaded is not None

    def answer(
        self, method: Method, decoding: Decoding, jobs: Sequence[tuple[Job, list[bytes] | BadImage]]
    ) -> list[Answer | BadImage]:
        """The answers to one batch."""
        decoded = [(job, files if isinstance(files, BadImage) else decode_images(job, files)) for job, files in jobs]
        return answers_to(decoded, partial(self.engine.answer, method, decoding))


def read_files(job: Job) -> list[bytes] | BadImage:
    """The bytes of a job's pictures, or the first that cannot be read and why."""
    files = []
    for path in job.images:
        try:
            files.append(path.read_bytes())
        except OSError as error:
            return BadImage(path, error.strerror or str(error), job.id)
    return files
