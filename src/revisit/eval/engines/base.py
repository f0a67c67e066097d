"""The interface between an evaluation and a model, wherever the model runs.

An engine is opened for one model and answers with any method. It is given batches of items and returns answers in any order, so it may
keep many batches in flight, or send them to other machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks.base import Item
from revisit.eval.controls import noise_like
from revisit.eval.log import Answer

if TYPE_CHECKING:  # PIL and torch are slow to import
    from PIL.Image import Image

    from revisit.models.types import Model, Processor


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

        By default `answer` decodes batch after batch.
        """
        for batch in batches:
            yield self.answer(method, decoding, seed, batch, [item_images(item) for item in batch])

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release the engine's resources."""


def item_images(item: Item, files: Sequence[bytes] | None = None) -> list[Image]:
    """Return the images of an item as upright RGB, from these bytes or from disk."""
    from revisit.models.images import open_image

    images = [open_image(source) for source in (item.images if files is None else files)]
    return [noise_like(image, item.hash) for image in images] if item.noise else images


def open_engine(kind: str, model: str | tuple[Model, Processor], **options: Any) -> Engine:
    """Return the engine `kind` for a model, which is loaded at the first answer."""
    name = {"local": "LocalEngine", "ray": "RayEngine", "vllm": "VllmEngine"}[kind]
    engine: Engine = getattr(import_module(f"revisit.eval.engines.{kind}"), name)(model, **options)
    return engine
