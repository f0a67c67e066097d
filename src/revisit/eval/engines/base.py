"""The interface between an evaluation and a model, wherever the model runs.

An engine serves one model and can run any method. It receives batches of items and returns answers in any order, so it may
decode many batches at once, or send them to other machines.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.controls import edited
from revisit.eval.log import Answer
from revisit.io.finder import is_video
from revisit.io.records import Fields

if TYPE_CHECKING:  # PIL and torch are slow to import
    from revisit.io.images import Scale
    from revisit.models.types import Model, Processor
    from revisit.video.clip import Visual


class Engine(ABC):
    """A model that answers items with any method."""

    @abstractmethod
    def identity(self, batch_size: int, items: Sequence[Item]) -> Fields:
        """Return the fields of `Spec` that the engine decides: model, fingerprint, device, dtype, engine, libraries, batching.

        `batching` is None if the answer to an item is the same in any batch.
        """

    def answer(
        self, method: Method, decoding: Decoding, seed: int, items: Sequence[Item], visuals: Sequence[Sequence[Visual]]
    ) -> list[Answer]:
        """Return one answer per item, in their order; `seed` is that of the run."""
        raise NotImplementedError  # engines with a `stream` of their own need not define it

    def stream(
        self, method: Method, decoding: Decoding, seed: int, batches: Iterable[Sequence[Item]]
    ) -> Iterator[list[Answer]]:
        """Yield the answers to all items, in any order, as soon as they can be stored.

        By default `answer` decodes batch after batch, while the images of the next one are opened. An item that cannot be opened or
        answered has an answer with its error.
        """
        return self.answers(method, decoding, seed, batches, self.open_item)

    def answers(
        self,
        method: Method,
        decoding: Decoding,
        seed: int,
        batches: Iterable[Sequence[Item]],
        open_one: Callable[[Item], list[Visual]],
    ) -> Iterator[list[Answer]]:
        """Yield the answers to each batch, whose images `open_one` opens."""
        from revisit.models.reader import answers

        def work(items: Sequence[Item], visuals: Sequence[list[Visual]]) -> list[Answer]:
            return self.answer(method, decoding, seed, items, visuals)

        for batch in answers(batches, open_one, work):
            yield [
                Answer.failure(item, str(result)) if isinstance(result, RevisitError) else result
                for item, result in batch
            ]

    def open_item(self, item: Item) -> list[Visual]:
        """Return the images and videos of an item."""
        return item_visuals(item)

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release the engine's resources."""


def item_visuals(item: Item, files: Sequence[bytes] | None = None, scale: Scale | None = None) -> list[Visual]:
    """Return the images and then the videos of an item, from these bytes or from disk; images are read smaller by `scale`."""
    from revisit.models.reader import open_visuals

    read = list(zip(item.images, item.images if files is None else files, strict=True))
    images = [source for path, source in read if not is_video(path)]
    visuals = open_visuals((images, [source for path, source in read if is_video(path)]), item.sampling, scale)
    return [edited(visual, item.edit, item.hash) for visual in visuals] if item.edit else visuals


def item_seed(seed: int, id: str) -> int:
    """Return the seed of one item, the same in any batch and any order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:7], "big")


def open_engine(kind: str, model: str | tuple[Model, Processor], **options: Any) -> Engine:
    """Return the engine `kind` for a model, which is loaded for the first answer."""
    name = {"local": "LocalEngine", "ray": "RayEngine", "vllm": "VllmEngine"}[kind]
    engine: Engine = getattr(import_module(f"revisit.eval.engines.{kind}"), name)(model, **options)
    return engine
