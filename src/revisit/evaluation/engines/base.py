"""What answers questions: the interface between the runner and a model, wherever the model runs.

An engine is opened for one model and answers for any method. The runner hands it batches of jobs and takes answers
in any order, so an engine may decode images in threads, keep many batches in flight, or send them to other machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import unknown
from revisit.evaluation.records import Answer

if TYPE_CHECKING:  # PIL and torch are slow to import
    from PIL.Image import Image

    from revisit.decoding.batch import Decoded

ENGINES = ("local", "ray", "vllm")
THREADS = 2  # that decode images
AHEAD = 2  # batches decoded in advance

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One question to be answered; `seed` depends on the item alone, not on the batch it is answered in."""

    id: str
    prompt: str
    images: tuple[Path, ...]
    seed: int
    content: str = ""  # SHA-256 of the prompt and the images, which ties the answer to them

    def answered(self, decoded: Decoded, seconds: float = 0.0) -> Answer:
        """The answer as it is stored."""
        return Answer(
            id=self.id,
            item=self.content,
            prompt=self.prompt,
            text=decoded.text,
            tokens=decoded.tokens,
            counters=decoded.counters(),
            seconds=round(seconds, 6),
            finish=decoded.finish,
        )


@dataclass(frozen=True)
class BadImage:
    """An image that could not be read, and the id of its job, which gets no answer."""

    path: Path
    reason: str
    id: str = ""


class Engine(ABC):
    """A model that answers jobs with any method."""

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Everything about the model and its surroundings that could change an answer; needs no loaded weights."""

    def answer(
        self, method: Method, decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Image]]
    ) -> list[Answer]:
        """One answer per job, in their order."""
        raise NotImplementedError  # by an engine that has a `stream` of its own

    def stream(
        self, method: Method, decoding: Decoding, batches: Iterable[Sequence[Job]]
    ) -> Iterator[list[Answer | BadImage]]:
        """Every job's answer, or its unreadable image, in lists that may be stored as they come; the order is free.

        Here by `answer`, batch by batch; images are decoded by threads while the model works on the batch before.
        """
        with ThreadPoolExecutor(THREADS, thread_name_prefix="images") as pool:
            jobs_with_images = ([(job, pool.submit(decode_images, job)) for job in batch] for batch in batches)
            for pairs in ahead_of(jobs_with_images, AHEAD):
                decoded = [(job, future.result()) for job, future in pairs]
                yield answers_to(decoded, partial(self.answer, method, decoding))

    def batch_invariant(self) -> bool:
        """Whether a job's answer is the same in any batch; if not, the batches become part of a cell's identity."""
        return True

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Releases what the engine holds."""


def ahead_of(source: Iterable[T], count: int) -> Iterator[T]:
    """The elements of `source`, which is kept `count` elements ahead of the consumer."""
    waiting: deque[T] = deque()
    for element in source:
        waiting.append(element)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def answers_to(
    decoded: Sequence[tuple[Job, list[Image] | BadImage]],
    answer: Callable[[list[Job], list[list[Image]]], list[Answer]],
) -> list[Answer | BadImage]:
    """The answers to jobs with their decoded images: those whose images could be read are answered together."""
    good = [(job, images) for job, images in decoded if not isinstance(images, BadImage)]
    bad = [images for _, images in decoded if isinstance(images, BadImage)]
    return [*bad, *(answer([job for job, _ in good], [images for _, images in good]) if good else ())]


def decode_images(job: Job, files: Sequence[bytes] | None = None) -> list[Image] | BadImage:
    """The job's images, in these bytes or on disk, as upright RGB pictures; or the first that cannot be read and why."""
    from revisit.models.images import open_image, read_image

    images = []
    for number, path in enumerate(job.images):
        try:
            images.append(open_image(path) if files is None else read_image(files[number], repr(str(path))))
        except Exception as error:  # Pillow has no common error for broken files; whatever it is, it is reported
            return BadImage(path, str(error) or type(error).__name__, job.id)
    return images


def open_engine(kind: str, model: str, **options: Any) -> Engine:
    """The engine `kind` for `model`; its model is loaded at the first answer."""
    if kind == "local":
        from revisit.evaluation.engines.local import LocalEngine

        return LocalEngine(model, **options)
    if kind == "ray":
        from revisit.evaluation.engines.ray import RayEngine

        return RayEngine(model, **options)
    if kind == "vllm":
        from revisit.evaluation.engines.vllm import VllmEngine

        return VllmEngine(model, **options)
    raise unknown("engine", kind, ENGINES)
