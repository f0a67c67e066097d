"""The interface between an evaluation and a model, wherever the model runs.

An engine is opened for one model and answers with any method. It is given batches of items and returns answers in any order, so it may
decode images in threads, keep many batches in flight, or send them to other machines.
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


@dataclass(frozen=True)
class BadImage:
    """An image that could not be read, and the id of its item, which gets no answer."""

    path: Path
    reason: str
    id: str = ""


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
    ) -> Iterator[list[Answer | BadImage]]:
        """Yield every item's answer, or its unreadable image, in lists that may be stored as they come; the order is free.

        By default `answer` decodes batch after batch, and threads decode the images of the next batches meanwhile.
        """
        with ThreadPoolExecutor(THREADS, thread_name_prefix="images") as pool:
            waiting = ([(item, pool.submit(decode_images, item)) for item in batch] for batch in batches)
            for pairs in ahead_of(waiting, AHEAD):
                decoded = [(item, future.result()) for item, future in pairs]
                yield answers_to(decoded, partial(self.answer, method, decoding, seed))

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


def answers_to(
    decoded: Sequence[tuple[Item, list[Image] | BadImage]],
    answer: Callable[[list[Item], list[list[Image]]], list[Answer]],
) -> list[Answer | BadImage]:
    """Answer the items whose images could be read, all together; the others keep their unreadable image."""
    good = [(item, images) for item, images in decoded if not isinstance(images, BadImage)]
    bad = [images for _, images in decoded if isinstance(images, BadImage)]
    return [*bad, *(answer([item for item, _ in good], [images for _, images in good]) if good else ())]


def decode_images(item: Item, files: Sequence[bytes] | None = None) -> list[Image] | BadImage:
    """Return the item's images as upright RGB, from these bytes or from disk; or the first that cannot be read, and why."""
    from revisit.models.images import open_image, read_image

    images = []
    for number, path in enumerate(item.images):
        try:
            images.append(open_image(path) if files is None else read_image(files[number], repr(str(path))))
        except Exception as error:  # Pillow has no common error for broken files; whatever it is, it is reported
            return BadImage(path, str(error) or type(error).__name__, item.id)
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
