"""The interface between an evaluation and a model, wherever the model runs.

An engine is opened for one model and answers with any method. It is given batches of items and returns answers in any order, so it may
decode images in threads, keep many batches in flight, or send them to other machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import unknown
from revisit.eval.benchmarks.base import Item
from revisit.eval.config import ENGINES
from revisit.eval.controls import noise_like
from revisit.eval.log import Answer

if TYPE_CHECKING:  # PIL and torch are slow to import
    from PIL.Image import Image

    from revisit.models.types import Model, Processor

THREADS = 2  # that decode images
AHEAD = 2  # batches decoded in advance

T = TypeVar("T")


class Engine(ABC):
    """A model that answers items with any method."""

    @abstractmethod
    def about(self) -> Mapping[str, Any]:
        """Return the fields of `Spec` that describe the model and the engine: model, fingerprint, device, dtype, engine, libraries."""

    def batching(self, batch_size: int, items: Sequence[Item]) -> dict[str, Any] | None:
        """Return what an answer depends on beside its item; None if it is the same in any batch."""
        return None

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], images: Sequence[list[Image]]
    ) -> list[Answer]:
        """Return one answer per item, in their order; `seed` is that of the run."""
        raise NotImplementedError  # by an engine that has a `stream` of its own

    def stream(
        self, method: Method, decoding: Decoding, seed: int, batches: Iterable[Sequence[Item]]
    ) -> Iterator[list[Answer]]:
        """Yield the answers to all items in lists that may be stored as they come; the order is free.

        By default `answer` decodes batch after batch, and threads read the images of the next batches meanwhile.
        """
        with ThreadPoolExecutor(THREADS, thread_name_prefix="images") as pool:
            waiting = ((batch, [pool.submit(item_images, item) for item in batch]) for batch in batches)
            for batch, images in ahead_of(waiting, AHEAD):
                yield self.answer(method, decoding, seed, batch, [future.result() for future in images])

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release the engine's resources."""


def ahead_of(source: Iterable[T], count: int) -> Iterator[T]:
    """Yield the elements of `source`, which is kept `count` elements ahead of the consumer."""
    waiting: deque[T] = deque()
    for element in source:
        waiting.append(element)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


def item_images(item: Item, files: Sequence[bytes] | None = None) -> list[Image]:
    """Return the images of an item as upright RGB, from these bytes or from disk."""
    from revisit.models.images import open_image

    images = [open_image(source) for source in (item.images if files is None else files)]
    return [noise_like(image, item.hash) for image in images] if item.noise else images


def open_engine(kind: str, model: str | tuple[Model, Processor], **options: Any) -> Engine:
    """Return the engine `kind` for a model, which is loaded at the first answer."""
    if kind == "local":
        from revisit.eval.engines.local import LocalEngine

        return LocalEngine(model, **options)
    if kind == "ray":
        from revisit.eval.engines.ray import RayEngine

        return RayEngine(str(model), **options)
    if kind == "vllm":
        from revisit.eval.engines.vllm import VllmEngine

        return VllmEngine(str(model), **options)
    raise unknown("engine", kind, ENGINES)
