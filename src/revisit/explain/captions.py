"""Check a file of captions against a folder of images; an interrupted run resumes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.io.files import LineFile, path_within, write_text
from revisit.io.records import IMAGES, AnswerRow, read_answers
from revisit.models.config import name_of
from revisit.models.images import open_image

if TYPE_CHECKING:
    from revisit.explain.check import Check
    from revisit.models.types import Model, Processor

IDS = ("image_id", "id", "question_id", "index", "doc_id")
LINES, PAGE = "checks.jsonl", "index.html"
SHOWN = 100  # texts on the page, those with the least support first


@dataclass(frozen=True)
class Caption:
    """One text of a file, with its number, its id and the file of its image."""

    number: int
    id: str
    image: Path
    text: str

    @property
    def key(self) -> tuple[int, str, str]:
        """The identity of the caption in the results."""
        return self.number, self.image.name, self.text


def read_captions(path: Path, images: Path, field: str | None = None) -> list[Caption]:
    """Read the texts of a file in any layout that `revisit score` reads, and find the image of each in a folder."""
    if not images.is_dir():
        raise RevisitError(f"{images} is not a folder of images.")
    answers = read_answers(path, field=field)
    files = {file.name: file for file in sorted(images.iterdir()) if file.is_file()}
    by_number = {int(found[1]): file for file in files.values() if (found := re.search(r"(\d+)$", file.stem))}
    return [
        Caption(number, answer.key(IDS) or str(number), _image(answer, images, files, by_number), answer.text)
        for number, answer in enumerate(answers, 1)
    ]


def _image(answer: AnswerRow, images: Path, files: dict[str, Path], by_number: dict[int, Path]) -> Path:
    """Find the image of a text: the file that its row names, or the one whose name ends in the row's id."""
    for name in IMAGES:
        value = answer.record.get(name)
        if isinstance(value, str) and value:
            return files.get(Path(value).name) or path_within(images, value)
    key = answer.need(IDS)
    file = next((file for file in files.values() if file.stem == key), None)
    if file is None and key.isdecimal():
        file = by_number.get(int(key))
    if file is None:
        raise RevisitError(f"{answer.where}: no image in {images} is named or numbered {key!r}.")
    return file


def check_captions(
    model: tuple[Model, Processor],
    captions: Sequence[Caption],
    out: Path,
    settings: Mapping[str, Any],
    *,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Check the captions that the folder `out` does not contain yet, with these options of `check_many`.

    Returns all checks, those with the least support first, and one sentence for each caption that failed. `advance` is called with
    the number of finished captions.
    """
    failures: list[str] = []
    with closing(LineFile(out / LINES)) as file:
        done = _stored(file, {"model": name_of(model[0]), **settings})
        left = [caption for caption in captions if caption.key not in done]
        advance(len(captions) - len(left))
        for start in range(0, len(left), batch_size):
            batch = left[start : start + batch_size]
            for caption, result in _checks(model, batch, settings):
                if isinstance(result, str):
                    failures.append(f"Text {caption.number} ({caption.image.name}): {result}")
                    continue
                line = {"number": caption.number, "id": caption.id, "image": caption.image.name, **result.to_dict()}
                file.append([line])
                done[caption.key] = line
            advance(len(batch))
    kept = [done[caption.key] for caption in captions if caption.key in done]
    return sorted(kept, key=lambda line: line["least_support"]), failures


def _checks(
    model: tuple[Model, Processor], captions: Sequence[Caption], settings: Mapping[str, Any]
) -> Iterator[tuple[Caption, Check | str]]:
    """Yield the check of each caption, or its error message; one bad caption does not affect the others."""
    from revisit.explain.check import check_many  # imports torch

    try:
        images, texts = [caption.image for caption in captions], [caption.text for caption in captions]
        yield from zip(captions, check_many(model, images, texts, batch_size=len(captions), **settings), strict=True)
    except RevisitError as error:
        if len(captions) == 1:
            yield captions[0], str(error)
            return
        for caption in captions:
            yield from _checks(model, [caption], settings)


def _stored(file: LineFile, settings: dict[str, Any]) -> dict[tuple[int, str, str], dict[str, Any]]:
    """Return the checks in a file by number, image and text; raise RevisitError if they have other settings."""
    stored = next((line["settings"] for line in file.objects if "settings" in line), None)
    if stored is None:
        file.append([{"settings": settings}])
    elif stored != settings:
        raise RevisitError(f"{file.path} has checks with other settings ({stored}); use another --out.")
    return {(line["number"], line["image"], line["text"]): line for line in file.objects if "number" in line}


def write_summary(out: Path, lines: Sequence[dict[str, Any]], captions: Sequence[Caption]) -> None:
    """Write the page of the texts with the least support."""
    from revisit.explain.check import Check, render

    files = {caption.number: caption.image for caption in captions}
    top = lines[:SHOWN]
    checks = [Check.from_dict(line, [open_image(files[line["number"]])]) for line in top]
    if checks:
        flagged_texts = sum(bool(line["flagged"]) for line in lines)
        words = Counter(word.lower() for line in lines for word in line["flagged"]).most_common(10)
        often = ", ".join(f"{word} ({count})" for word, count in words)
        lead = (
            f"{len(lines)} texts, {flagged_texts} of them with flagged words{f', most often: {often}' if often else ''}. "
            f"Shown: the {len(top)} texts with the least support."
        )
        write_text(out / PAGE, render(checks, lead, [f"{line['id']} ({line['image']})" for line in top]))
