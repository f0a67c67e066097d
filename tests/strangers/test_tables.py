"""Images and texts in columns of tables: datasets and pandas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import revisit

TEXTS = ["A dog on the floor.", "A cat on a bed."]


def columns(kind: str, images: Any) -> tuple[Any, Any]:
    """Return a column of images and one of texts."""
    if kind != "pandas":
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_dict({"image": images, "text": TEXTS}).cast_column("image", datasets.Image())
        table = table.to_iterable_dataset() if kind == "streamed" else table
        return table["image"], table["text"]
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"image": images, "text": TEXTS}, index=[7, 3])  # as after a filter
    return table["image"], table["text"]


@pytest.fixture(params=["datasets", "streamed", "pandas", "tuple"])
def table(request: Any, images: Any) -> tuple[Any, Any]:
    return (tuple(images), tuple(TEXTS)) if request.param == "tuple" else columns(request.param, images)


@pytest.mark.parametrize(
    "run",
    [
        lambda pair, images, texts: [str(a) for a in revisit.ask_many(pair, images, batch_size=1, max_new_tokens=8)],
        lambda pair, images, texts: [c.to_dict() for c in revisit.check_many(pair, images, texts)],
        lambda pair, images, texts: str(revisit.ask(pair, images, max_new_tokens=8)),  # in one prompt
        lambda pair, images, texts: revisit.prepare(pair[1], texts, images)["input_ids"].tolist(),
        lambda pair, images, texts: revisit.prepare(pair[1], TEXTS[0], images)["pixel_values"].tolist(),
    ],
)
def test_a_column_is_a_list(pair: Any, images: Any, table: Any, run: Callable[..., Any]) -> None:
    assert run(pair, *table) == run(pair, images, TEXTS)


def test_images_of_a_column_are_read_when_they_are_used(pair: Any, images: Any) -> None:
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"image": images * 2}).cast_column("image", datasets.Image())["image"]
    read = []

    class Counted(type(column)):  # type: ignore[misc]
        def __getitem__(self, key: Any) -> Any:
            read.append(key)
            return super().__getitem__(key)

    counted = Counted(column.source, column.column_name)
    answers = revisit.ask_many(pair, counted, batch_size=1, max_new_tokens=2)
    next(answers)
    assert 1 in read  # one batch ahead
    assert 2 not in read
    answers.close()


@pytest.mark.parametrize("images", ["photo.jpg", b"bytes", {"image": 1}, 5])
def test_one_image_is_not_a_list(pair: Any, images: Any) -> None:
    with pytest.raises(revisit.RevisitError, match="list or a column"):
        revisit.ask_many(pair, images)
    with pytest.raises(revisit.RevisitError, match="list or a column"):
        revisit.check_many(pair, images, TEXTS)


def test_a_column_of_paths(pair: Any, images: Any, tmp_path: Any) -> None:
    pandas = pytest.importorskip("pandas")
    paths = [str(tmp_path / f"{number}.png") for number in range(len(images))]
    for image, path in zip(images, paths, strict=True):
        image.save(path)
    column = pandas.Series(paths, index=[5, 9])
    answers = revisit.ask_many(pair, column, max_new_tokens=4)
    assert [str(answer) for answer in answers] == [str(a) for a in revisit.ask_many(pair, images, max_new_tokens=4)]
