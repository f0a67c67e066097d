"""Images are opened in order, a batch ahead, no larger than the model can use; failures are values."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import families
import revisit
from revisit import RevisitError
from revisit.embedded.scenes import render, scene
from revisit.io.images import open_image, original_size
from revisit.models import reader
from revisit.models.prompts import prepare
from revisit.models.reader import GAP, answers, batched, open_ahead, scale_for, used_side


def photo(size: tuple[int, int], kind: str = "JPEG", **options: Any) -> bytes:
    """Encode a picture of soft colors with grain, as a camera would."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)).astype(float)
    pixels += np.random.default_rng(1).normal(0, 5, pixels.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("size", "factor"),
    [((4000, 3000), 8), ((3000, 4000), 8), ((4004, 3004), 4), ((4001, 3000), 1), ((1024, 8192), 4), ((510, 4000), 1)],
)
def test_files_are_read_smaller_where_the_processor_would_scale_them(size: tuple[int, int], factor: int) -> None:
    scale = scale_for(revisit.load("tiny")[1])  # which uses 128 × 128 pixels
    assert scale(size) == factor
    assert factor == 1 or min(size) / factor >= GAP * 128
    for kind in ("JPEG", "PNG") if size == (4004, 3004) else ():
        read = open_image(photo(size, kind), scale=scale)
        assert (read.size, original_size(read)) == ((size[0] // 4, size[1] // 4), size)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "internvl", "smolvlm", "llava_next", "gemma3"])
def test_what_the_model_gets_differs_by_rounding_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and grids are equal; values differ by at most 3 % of their range, and by 0.5 % on average."""
    monkeypatch.setattr(reader, "SMALL", 0)  # these models use a few pixels only
    _, processor = families.build(family)
    side = used_side(processor)
    assert 0 < side <= reader.PROBE // GAP
    size = (side * GAP * 2, side * GAP * 3)
    data = photo(size, quality=95)
    assert scale_for(processor)(size) == 2
    whole, smaller = (prepare(processor, "What is it?", image) for image in (open_image(data), data))
    assert whole.keys() == smaller.keys()
    for name, value in whole.items():
        assert value.shape == smaller[name].shape, name
        if value.is_floating_point():
            spread, differences = value.max() - value.min(), (value - smaller[name]).abs()
            assert differences.max() < 0.03 * spread
            assert differences.mean() < 0.005 * spread
        elif name != "image_sizes":  # of the images as they were read
            assert value.tolist() == smaller[name].tolist(), name


def test_answers_and_grids_do_not_depend_on_how_large_a_file_is_read() -> None:
    pair = revisit.load("tiny")
    for number in range(8):
        file = io.BytesIO()
        large = render(scene("unusual", 7, number)).resize((2048, 2048), Image.Resampling.BICUBIC)
        large.save(file, "JPEG", quality=92)
        smaller, whole = (revisit.ask(pair, image) for image in (file.getvalue(), open_image(file.getvalue())))
        assert (smaller.images[0].size, whole.images[0].size) == ((256, 256), (2048, 2048))
        assert smaller.text == whole.text
        assert smaller.page.layout == whole.page.layout
        for mine, other in zip(smaller.check().words, whole.check().words, strict=True):
            assert mine.support == pytest.approx(other.support, rel=0.1, abs=0.01)


def test_rotated_files_are_read_smaller_and_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    read = open_image(photo((4000, 3000), exif=exif), scale=lambda size: 4)
    assert (read.size, original_size(read)) == ((750, 1000), (3000, 4000))
    assert open_image(read).info["revisit_scale"] == 1  # an image in memory has its own size


def test_batches_are_opened_ahead_and_failures_are_values() -> None:
    opened: list[int] = []
    third = threading.Event()

    def open_one(n: int) -> int:
        opened.append(n)
        if n == 5:
            third.set()
        if n == 1:
            raise RevisitError("unreadable")
        return n

    def work(items: Any, images: Any) -> list[int]:
        assert third.wait(10)  # the next batch is opened during the first
        assert max(opened) <= 5 or min(items) > 2
        if 4 in items:
            raise RevisitError("too long")
        return [10 * n for n in images]

    batches = list(answers(batched(range(9), 3), open_one, work))
    assert [[item for item, _ in batch] for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    results = [result for batch in batches for _, result in batch]
    assert [str(result) for result in results] == ["0", "unreadable", "20", "30", "too long", "50", "60", "70", "80"]
    assert all(result.__traceback__ is None for result in results if isinstance(result, RevisitError))


def test_batches_that_do_not_fit_into_memory_are_answered_one_by_one() -> None:
    def work(items: Any, images: Any) -> list[int]:
        if len(items) > 1 or items[0] == 2:
            raise torch.OutOfMemoryError("no room")
        return [10 * n for n in images]

    (batch,) = answers(batched(range(4), 4), lambda n: n, work)
    assert [result for _, result in batch if not isinstance(result, RevisitError)] == [0, 10, 30]
    assert "smaller batch" in str(batch[2][1])


def test_items_that_are_not_needed_only_complete_batches() -> None:
    worked: list[Any] = []

    def work(items: Any, images: Any) -> list[int]:
        worked.append(list(items))
        return [10 * n for n in images]

    def open_one(n: int) -> int:
        if n in (3, 7):
            raise RevisitError("unreadable")
        return n

    batches = list(answers(batched(range(9), 3), open_one, work, {1, 3}.__contains__))
    assert [[(item, str(result)) for item, result in batch] for batch in batches] == [
        [(1, "10")],
        [(3, "unreadable")],
        [],
    ]
    assert worked == [[0, 1, 2]]


def test_memory_does_not_depend_on_the_number_of_images() -> None:
    class Held:
        pass

    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def open_one(_: int) -> Held:
        held = Held()
        alive.add(held)
        return held

    most = 0
    for batch in open_ahead(batched(range(400), 4), open_one):
        del batch
        gc.collect()
        most = max(most, len(alive))
    assert most <= 12  # this batch, the next one, and the one after it


def test_failures_in_python(tmp_path: Path) -> None:
    pair = families.llava()
    images: list[Any] = [families.image(n, (40, 40)) for n in range(5)]
    images[1:1] = [tmp_path / "none.png", b"no image"]
    asked = list(revisit.ask_many(pair, images, max_new_tokens=2, batch_size=3, errors="return"))
    texts = ["A dog."] * 6 + [" "]
    checked = list(revisit.check_many(pair, images, texts, batch_size=3, errors="return"))
    assert [isinstance(answer, RevisitError) for answer in asked] == [False, True, True, False, False, False, False]
    assert [isinstance(check, RevisitError) for check in checked] == [False, True, True, False, False, False, True]
    raising = revisit.ask_many(pair, images, max_new_tokens=2)
    assert isinstance(next(raising), revisit.ExplainedAnswer)
    with pytest.raises(RevisitError, match=r"none\.png"):
        next(raising)
    with pytest.raises(RevisitError, match="raise"):
        revisit.ask_many(pair, images, errors="ignore")
