"""Open many images for a model: in order, a batch ahead of the model, and no larger than it can use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from PIL import Image as pil

from revisit.errors import RevisitError
from revisit.io.finder import is_video
from revisit.io.images import Scale, Size, listed, open_image, reduction
from revisit.io.results import content_hash
from revisit.video.clip import Video, Visual
from revisit.video.reading import as_videos, open_video
from revisit.video.sampling import Sampling

if TYPE_CHECKING:
    from revisit.models.types import Processor

T = TypeVar("T")
Opened = TypeVar("Opened")
Result = TypeVar("Result")
Sources = tuple[Any, Any]  # the images of a prompt, and its videos: one, a list of them, or None
OnError = Literal["raise", "return"]  # what becomes of an item that cannot be answered

THREADS = 2  # open images while the model runs
GAP = 2  # an image that was read smaller has sides of at least this many times those that the model uses
PROBE = 2048  # side of the image whose use by the processor is measured
SMALL = 512  # images with a shorter side are never read smaller
_SIDES: WeakKeyDictionary[Processor, int] = WeakKeyDictionary()


def used_side(processor: Processor) -> int:
    """Return the side of a square with as many pixels as the model uses of a large image; 0 if it uses most of them."""
    if processor not in _SIDES:
        try:
            encoded = processor.image_processor(images=[pil.new("RGB", (PROBE, PROBE))], return_tensors="pt")
            side = int((encoded["pixel_values"].numel() / 3) ** 0.5)
        except Exception:  # a processor that needs more than an image, or returns something else
            side = PROBE
        _SIDES[processor] = side if side * GAP <= PROBE else 0
    return _SIDES[processor]


def scale_for(processor: Processor) -> Scale:
    """Return the rule by which image files are read smaller for a model.

    A file is read at 1/2, 1/4, … of its size if both sides are divisible, and if the processor still reduces the result at least `GAP`
    times. The processor then returns tensors of the same shape, whose values differ by rounding.
    """

    def scale(size: Size) -> int:
        if min(size) < SMALL or not (side := used_side(processor)):
            return 1
        return reduction(size, GAP * side)

    return scale


class OutOfMemory(RevisitError):
    """The device has too little memory for a batch of the wanted size; smaller ones are not tried instead."""


def open_ahead(
    batches: Iterable[Sequence[T]], open_one: Callable[[T], Opened]
) -> Iterator[list[tuple[T, Opened | RevisitError]]]:
    """Yield batches of items with their images or the error that each raised; the next batch is opened meanwhile."""

    def attempt(item: T) -> Opened | RevisitError:
        try:
            return open_one(item)
        except RevisitError as error:
            return _bare(error)

    ahead: list[tuple[T, Future[Opened | RevisitError]]] = []
    with ThreadPoolExecutor(THREADS, "images") as pool:
        try:
            for batch in batches:
                current, ahead = ahead, [(item, pool.submit(attempt, item)) for item in batch]
                if current:
                    yield [(item, future.result()) for item, future in current]
            if ahead:
                yield [(item, future.result()) for item, future in ahead]
        finally:
            pool.shutdown(cancel_futures=True)


def answers(
    batches: Iterable[Sequence[T]],
    open_one: Callable[[T], Opened],
    work: Callable[[Sequence[T], Sequence[Opened]], Iterable[Result]],
    needed: Callable[[T], bool] = lambda item: True,
) -> Iterator[list[tuple[T, Result | RevisitError]]]:
    """Yield batches of items with their results, in order; `work` runs the model on a batch.

    An item that cannot be opened or answered has its error as the result. If a whole batch fails, its items are tried one by one.
    Items that are not `needed` have no result: they only complete the batches of others.
    """

    def attempt(rows: Mapping[int, tuple[T, Any]]) -> dict[int, Result | RevisitError]:
        if not any(needed(item) for item, _ in rows.values()):
            return {}
        try:
            return dict(zip(rows, work(*zip(*rows.values(), strict=True)), strict=True))
        except OutOfMemory:
            raise
        except RevisitError as error:
            failed = _bare(error)
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's
                raise
            failed = RevisitError("The device ran out of memory: use a smaller batch or a smaller model.")
        if len(rows) == 1:
            return dict.fromkeys(rows, failed)
        return {row: result for n in rows for row, result in attempt({n: rows[n]}).items()}

    for batch in open_ahead(batches, open_one):
        results: dict[int, Any] = {n: opened for n, (_, opened) in enumerate(batch) if isinstance(opened, RevisitError)}
        results |= attempt({n: pair for n, pair in enumerate(batch) if n not in results})
        items = [item for item, _ in batch]
        del batch  # the images are not kept while the caller works on the results
        yield [(items[n], results[n]) for n in sorted(results) if needed(items[n])]


def answer_missing(
    items: Sequence[T],
    missing: Iterable[int],
    batch_size: int,
    images: Callable[[T], Sequence[str | Path]],
    probe: Callable[[T], Opened],
    start: Callable[
        [T, Opened], tuple[Callable[[T], Opened], Callable[[Sequence[T], Sequence[Opened]], Iterable[Result]]]
    ],
) -> Iterator[list[tuple[T, str | None, Result | RevisitError]]]:
    """Yield the items with these numbers, the hashes of their images, and their results, batch by batch.

    Batches are cut from all items, whatever is missing, so that resuming changes nothing. `start` returns what opens and what answers
    items for `answers`; it loads the model, and is called with the first item that `probe` can open, if there is one.
    """
    left = list(missing)
    while left:
        item = items[left[0]]
        try:
            first = probe(item)
        except RevisitError as error:
            yield [(item, None, _bare(error))]
            del left[0]
        else:
            break
    else:
        return
    open_one, work = start(item, first)
    del first

    def open_hashed(number: int) -> tuple[str | None, Opened]:
        return content_hash(images(items[number])), open_one(items[number])

    def work_hashed(numbers: Sequence[int], opened: Sequence[tuple[str | None, Opened]]) -> Iterable[Any]:
        results = work([items[number] for number in numbers], [images for _, images in opened])
        return zip((hash for hash, _ in opened), results, strict=True)

    needed = frozenset(left)
    batches = (batch for batch in batched(range(len(items)), batch_size) if not needed.isdisjoint(batch))
    for batch in answers(batches, open_hashed, work_hashed, needed.__contains__):
        yield [(items[n], *((None, found) if isinstance(found, RevisitError) else found)) for n, found in batch]


def answer_all(
    items: Sequence[T],
    batch_size: int,
    open_one: Callable[[T], Opened],
    work: Callable[[Sequence[T], Sequence[Opened]], Iterable[Result]],
    errors: OnError,
) -> Iterator[Result | RevisitError]:
    """Yield the result of each item in order; an error is raised, or returned in place of the result."""
    for batch in answers(batched(items, batch_size), open_one, work):
        for _, result in batch:
            if isinstance(result, RevisitError) and errors == "raise":
                raise result
            yield result


def opener(processor: Processor, sampling: Sampling) -> Callable[[Sources], list[Visual]]:
    """Return a function that opens the images and the videos of one prompt for a model."""
    return partial(open_visuals, sampling=sampling, scale=scale_for(processor))


def open_visuals(sources: Sources, sampling: Sampling, scale: Scale | None = None) -> list[Visual]:
    """Open the images of a prompt, and then its videos; files of videos among the images are known by their names."""
    images, videos = sources
    images = images() if callable(images) else images
    several = [] if images is None else listed(images)
    opened: list[Visual] = []
    for image in [images] if several is None else several:
        video = isinstance(image, Video) or (isinstance(image, (str, Path)) and is_video(image))
        opened.append(open_video(image, sampling) if video else open_image(image, scale=scale))
    return [*opened, *(open_video(video, sampling) for video in as_videos(videos))]


def paired(images: Sequence[Any] | None, videos: Sequence[Any] | None) -> list[Sources]:
    """Return the images and the videos of each prompt; raise RevisitError if there is a prompt without any."""
    if images is not None and not isinstance(
        images, (list, tuple)
    ):  # a column, whose images are read when they are used
        images = [partial(getitem, images, number) for number in range(len(images))]
    pairs = list(zip_longest(images or (), videos or ()))
    if images and videos and len(images) != len(videos):
        raise RevisitError(
            f"There are {len(images)} images but {len(videos)} videos: pass one of each for every prompt."
        )
    if not pairs or any(is_empty(image) and is_empty(video) for image, video in pairs):
        raise RevisitError("No image or video was given; pass at least one.")
    return pairs


def is_empty(source: object) -> bool:
    """Return whether there is no image or video."""
    return source is None or (isinstance(source, (list, tuple)) and not source)


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut items into batches."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _bare(error: RevisitError) -> RevisitError:
    """Copy an error without its traceback, which would keep the images in memory."""
    return type(error)(str(error))
