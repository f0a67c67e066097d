"""The interface between an evaluation and a model, wherever the model runs.

An engine is opened for one model and answers with any method. It receives batches of items and returns answers in any order, so it may
decode many batches at once, or send them to other machines.
"""

from __future__ import annotations

import hashlib
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

    from revisit.models.images import Scale
    from revisit.models.types import Model, Processor


class Engine(ABC):
    """A model that answers items with any method."""

    @abstractmethod
    def identity(self, batch_size: int, items: Sequence[Item]) -> Mapping[str, Any]:
        """Return the fields of `Spec` that the engine decides: model, fingerprint, device, dtype, engine, libraries, batching.

        `batching` is None if the answer to an item is the same in any batch.
        """

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], images: Sequence[list[Image]]
    ) -> list[Answer]:
        """Return one answer per item, in their order; `seed` is that of the run."""
        raise NotImplementedError  # engines with a `stream` of their own need not define it

    def stream(
        self, method: Method, decoding: Decoding, seed: int, batches: Iterable[Sequence[Item]]
    ) -> Iterator[list[Answer]]:
        """Yield the answers to all items, in any order, as soon as they can be stored.

        By default `answer` decodes batch after batch.
        """
        for batch in batches:
            yield self.answer(method, decoding, seed, batch, [item_images(item) for item in batch])

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release the engine's resources."""


def item_images(item: Item, files: Sequence[bytes] | None = None, scale: Scale | None = None) -> list[Image]:
    """Return the images of an item as upright RGB, from these bytes or from disk, read smaller by `scale`."""
    from revisit.models.images import open_image

    images = [open_image(source, scale=scale) for source in (item.images if files is None else files)]
    return [noise_like(image, item.hash) for image in images] if item.noise else images


def item_seed(seed: int, id: str) -> int:
    """Return the seed of one item, the same in any batch and any order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:7], "big")


def open_engine(kind: str, model: str | tuple[Model, Processor], **options: Any) -> Engine:
    """Return the engine `kind` for a model, which is loaded for the first answer."""
    name = {"local": "LocalEngine", "ray": "RayEngine", "vllm": "VllmEngine"}[kind]
    engine: Engine = getattr(import_module(f"revisit.eval.engines.{kind}"), name)(model, **options)
    return engine
