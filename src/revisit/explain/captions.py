"""Read files of captions, and find the image of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from revisit.errors import RevisitError
from revisit.explain.files import below
from revisit.explain.records import IMAGES, AnswerRow, read_answers

IDS = ("image_id", "id", "question_id", "index", "doc_id")


@dataclass(frozen=True)
class Caption:
    """One text of a file: its number, its id, and the file of its image."""

    number: int
    id: str
    image: Path
    text: str

    @property
    def key(self) -> tuple[int, str, str]:
        """What identifies the caption in the results."""
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
            return files.get(Path(value).name) or below(images, value)
    key = answer.need(IDS)
    same = next((file for file in files.values() if file.stem == key), None)
    if same is None and key.isdecimal():
        same = by_number.get(int(key))
    if same is None:
        raise RevisitError(f"{answer.where}: no image in {images} is named or numbered {key!r}.")
    return same
