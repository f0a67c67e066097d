"""Checks of whole files of captions, one line each. Interrupted runs resume."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from revisit.benchmarks.io.answers import PICTURES, Answer, read_answers
from revisit.benchmarks.io.files import read_json
from revisit.errors import RevisitError
from revisit.explain.check import Check, check_many
from revisit.explain.check_page import page
from revisit.models.config import name_of
from revisit.models.images import open_image

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor

LINES, SETTINGS, TABLE, PAGE = "checks.jsonl", "settings.json", "summary.csv", "index.html"
IDS = ("image_id", "id", "question_id", "index", "doc_id")
SHOWN = 100  # texts on the page, the most doubtful first


class CheckOptions(TypedDict):
    """What `check_many` is asked for."""

    prompt: str | None
    threshold: float | None
    words: str | list[str]


@dataclass(frozen=True)
class Row:
    """One text of a file: its number, the picture's file, and the text."""

    number: int
    id: str
    picture: Path
    text: str


def read_rows(path: Path, images: Path, field: str | None = None) -> list[Row]:
    """The texts of a file in any layout that `revisit score` reads, each with its picture in a folder."""
    if not images.is_dir():
        raise RevisitError(f"{images} is not a folder of pictures.")
    answers = read_answers(path, field=field)
    files = {file.name: file for file in sorted(images.iterdir()) if file.is_file()}
    by_number = {int(found[1]): file for file in files.values() if (found := re.search(r"(\d+)$", file.stem))}
    return [
        Row(number, answer.key(IDS) or str(number), _picture(answer, images, files, by_number), answer.text)
        for number, answer in enumerate(answers, 1)
    ]


def _picture(answer: Answer, images: Path, files: dict[str, Path], by_number: dict[int, Path]) -> Path:
    """The picture of a text: the file that the row names, or the one whose name ends in the row's id."""
    for name in PICTURES:
        value = answer.record.get(name)
        if isinstance(value, str) and value:
            return files.get(Path(value).name, images / value)
    key = answer.need(IDS)
    same = next((file for file in files.values() if file.stem == key), None)
    if same is None and key.isdecimal():
        same = by_number.get(int(key))
    if same is None:
        raise RevisitError(f"{answer.where}: no picture in {images} is named or numbered {key!r}.")
    return same


def check_rows(
    model: tuple[Model, Processor],
    rows: Sequence[Row],
    out: Path,
    settings: CheckOptions,
    *,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Check the rows that `out` does not hold yet; returns all checks, most doubtful first, and a sentence for each failure."""
    out.mkdir(parents=True, exist_ok=True)
    _same_settings(out / SETTINGS, {"model": name_of(model[0]), **settings})
    done = {(line["number"], line["image"], line["text"]): line for line in _stored(out / LINES)}
    left = [row for row in rows if (row.number, row.picture.name, row.text) not in done]
    advance(len(rows) - len(left))
    failures: list[str] = []
    with (out / LINES).open("a", encoding="utf-8") as file:
        for start in range(0, len(left), batch_size):
            part = left[start : start + batch_size]
            for row, found in _checks(model, part, settings):
                if isinstance(found, str):
                    failures.append(f"Text {row.number} ({row.picture.name}): {found}")
                    continue
                line = {"number": row.number, "id": row.id, "image": row.picture.name, **found.to_dict()}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                done[row.number, row.picture.name, row.text] = line
            file.flush()
            advance(len(part))
    kept = [done[key] for row in rows if (key := (row.number, row.picture.name, row.text)) in done]
    return sorted(kept, key=lambda line: -line["doubt"]), failures


def _checks(
    model: tuple[Model, Processor], rows: Sequence[Row], settings: CheckOptions
) -> Iterator[tuple[Row, Check | str]]:
    """The check of each row, or why there is none; one bad row does not take the others with it."""
    pictures = [row.picture for row in rows]
    try:
        found = check_many(model, pictures, [row.text for row in rows], batch_size=len(rows), **settings)
        yield from zip(rows, found, strict=True)
    except RevisitError as error:
        if len(rows) == 1:
            yield rows[0], str(error)
            return
        for row in rows:
            yield from _checks(model, [row], settings)


def _same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raises RevisitError if the folder holds checks of another model or with other settings."""
    if path.exists():
        if read_json(path) != settings:
            raise RevisitError(f"{path.parent} holds checks with other settings (see {path}); give another --out.")
        return
    if (path.parent / LINES).exists():
        raise RevisitError(f"{path.parent} holds {LINES} without {SETTINGS}; give another --out.")
    path.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def _stored(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of checks; a last line that was cut off is removed from the file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        path.write_bytes(whole)
    try:
        return [json.loads(line) for line in whole.decode("utf-8").splitlines()]
    except ValueError as error:
        raise RevisitError(f"{path} is damaged ({error}); remove it to check all texts again.") from None


def write_summary(out: Path, lines: Sequence[dict[str, Any]], rows: Sequence[Row]) -> None:
    """The table of all texts and the page of some, the most doubtful first."""
    with (out / TABLE).open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["number", "id", "image", "doubt", "flagged", "text"])
        for line in lines:
            shown = [line[name] for name in ("number", "id", "image")]
            table.writerow([*shown, f"{line['doubt']:.4f}", " ".join(line["flagged"]), line["text"]])
    files = {row.number: row.picture for row in rows}
    top = lines[:SHOWN]
    checks = [Check.from_dict(line, [open_image(files[line["number"]])]) for line in top]
    if checks:
        doubtful = sum(bool(line["flagged"]) for line in lines)
        words = Counter(word.lower() for line in lines for word in line["flagged"]).most_common(10)
        often = ", ".join(f"{word} ({count})" for word, count in words)
        lead = (
            f"{len(lines)} texts, {doubtful} of them with doubtful words{f', most often: {often}' if often else ''}. "
            f"Shown: the {len(top)} most doubtful."
        )
        (out / PAGE).write_text(page(checks, lead, [f"{line['id']} ({line['image']})" for line in top]), "utf-8")
