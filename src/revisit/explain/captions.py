"""Check a file of captions against a folder of images. Supports are stored, and flags are computed from them for any threshold."""

from __future__ import annotations

import csv
import heapq
import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.explain.checkable import Words, need_words
from revisit.explain.checked import Check, render
from revisit.io.files import inside, scan_lines, write_json, write_text
from revisit.io.finder import IDS, ImageFinder
from revisit.io.images import reduction
from revisit.io.records import Record, plain_cell, read_answers
from revisit.io.results import Line, Results
from revisit.models import DESCRIBE
from revisit.models.reader import answer_missing, open_visuals
from revisit.registry import Share, validated
from revisit.video.clip import Visual, shown_images
from revisit.video.sampling import EIGHT_FRAMES

if TYPE_CHECKING:
    from revisit.models.types import Model, Processor

LINES, FLAGGED, SUMMARY, PAGE = "checks.jsonl", "flagged.csv", "summary.json", "index.html"
SHOWN = 100  # texts on the page, those with the least support first
SIDE = 512  # shorter side of an image on the page
Key = tuple[int, str]


@dataclass(frozen=True)
class Caption:
    """One text of a file, with its number, its id, its row, and its image or the reason why there is none."""

    number: int
    id: str
    text: str
    record: Record
    image: Path | RevisitError
    name: str  # of the image within the folder

    @property
    def key(self) -> Key:
        """The identity of the caption in the results; the image's hash is compared, too."""
        return self.number, self.text

    @property
    def images(self) -> list[Path]:
        """The image, if there is one."""
        return [] if isinstance(self.image, RevisitError) else [self.image]


def read_captions(path: Path, images: Path, field: str | None = None) -> list[Caption]:
    """Read the texts of a file in any layout that `revisit score` reads, and find the image of each in a folder."""
    answers, finder = read_answers(path, field=field), ImageFinder(images)
    captions = []
    for number, answer in enumerate(answers, 1):
        image: Path | RevisitError
        try:
            image, *others = finder.find(answer.record)
            if others:
                raise RevisitError(f"{answer.where} has {len(others) + 1} images; a text is checked against one.")
        except RevisitError as error:
            image = error
        name = "" if isinstance(image, RevisitError) else finder.name(image)
        captions.append(Caption(number, answer.key(IDS) or str(number), answer.text, answer.record, image, name))
    errors = [caption.image for caption in captions if isinstance(caption.image, RevisitError)]
    if errors and len(errors) == len(captions):
        raise errors[0]
    return captions


def check_captions(
    load: Callable[[Visual, str], tuple[Model, Processor]],
    captions: Sequence[Caption],
    out: Path,
    identity: Mapping[str, Any],
    *,
    prompt: str | None,
    words: Words,
    batch_size: int,
    advance: Callable[[int, int], None],
) -> list[Line]:
    """Check the captions that the folder `out` does not contain yet; return those that failed, with their errors.

    `load` loads the model that `identity` identifies; it is called with the first image that can be read and its name, unless nothing
    is left to check. `advance` is called with the number of finished captions, and of those that failed.
    """

    def probe(caption: Caption) -> list[Visual]:
        need_words(caption.text)
        if isinstance(caption.image, RevisitError):
            raise caption.image
        return open_visuals((caption.image, None), EIGHT_FRAMES)

    def start(first: Caption, visuals: list[Visual]) -> Any:
        from revisit.explain.check import checker  # imports torch

        open_pair, check = checker(*load(visuals[0], str(first.image)), prompt or DESCRIBE, words=words)

        def open_one(caption: Caption) -> list[Visual]:
            if isinstance(caption.image, RevisitError):
                raise caption.image
            return open_pair(((caption.image, None), caption.text))

        return open_one, lambda batch, images: check([((c.image, None), c.text) for c in batch], images)

    settings = {**identity, "prompt": prompt, "words": words}
    with closing(Results(out / LINES, settings, _key, only=True)) as results:
        missing = results.missing((caption.key, caption.images) for caption in captions)
        advance(len(captions) - len(missing), 0)
        checked = answer_missing(captions, missing, batch_size, lambda caption: caption.images, probe, start)
        lines = ([_line(*entry) for entry in batch] for batch in checked)
        return results.fill([caption.key for caption in captions], lines, advance)


def _key(line: Mapping[str, Any]) -> Key:
    return line["number"], line["text"]


def _line(caption: Caption, hash: str | None, result: Check | RevisitError) -> dict[str, Any]:
    """Return an error, or what is stored of a check: everything but flags, which depend on the threshold of a command."""
    place = {"number": caption.number, "id": caption.id, "image": caption.name, "text": caption.text}
    if isinstance(result, RevisitError):
        return {**place, "error": str(result)}
    stored = {name: value for name, value in result.to_dict().items() if name != "flagged"}
    words = [{name: value for name, value in word.items() if name != "flagged"} for word in stored["words"]]
    return {**place, "hash": hash, **stored, "words": words}


# -- results --------------------------------------------------------------------------------------------------------


@validated
def read_checks(folder: str | Path, threshold: Share | None = None) -> list[Check]:
    """Return the checks in the --out folder of `revisit check FILE`, in the order of the file, without their images.

    Args:
        folder: The folder.
        threshold: Words with less support are flagged; by default the model's recommendation.
    """
    return [Check.from_dict(line, threshold) for line in stored_lines(Path(folder))]


def stored_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of all checks in a folder; raise RevisitError if it has none."""
    try:
        yield from (line for _, line in scan_lines(folder / LINES) if line is not None)
    except OSError:
        raise RevisitError(f"{folder} has no {LINES}; give the --out folder of `revisit check FILE`.") from None


def write_summary(
    captions: Sequence[Caption], out: Path, threshold: float | None, failures: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write flagged.csv, index.html and summary.json from the stored checks; return the summary."""
    known = {caption.key: caption for caption in captions}

    def checks() -> Iterator[tuple[Caption, Check]]:
        for line in stored_lines(out):
            if caption := known.get(_key(line)):
                yield caption, Check.from_dict(line, threshold)

    count, without, flagged, words = 0, 0, list[dict[str, Any]](), Counter[str]()
    for caption, check in checks():
        count += 1
        without += not check.checked
        if texts := [word.text for word in check.flagged()]:
            words.update(text.lower() for text in texts)
            own = {"flagged_words": ", ".join(texts), "least_support": check.least_support}
            flagged.append({**caption.record, **own})
        threshold = check.threshold
    _write_table(inside(out, FLAGGED), flagged)
    summary = {
        "texts": len(captions),
        "checked": count,
        "flagged": len(flagged),
        "without_words": without,
        "failed": len(failures),
        "threshold": threshold,
        "most_flagged": dict(words.most_common(10)),
        "failures": list(failures),
    }
    write_json(inside(out, SUMMARY), summary)
    if count:
        least = heapq.nsmallest(SHOWN, checks(), key=lambda pair: (pair[1].least_support, pair[0].number))
        often = ", ".join(f"{word} ({number})" for word, number in words.most_common(10))
        lead = (
            f"{count} texts, {len(flagged)} of them with flagged words{f', most often: {often}' if often else ''}. "
            f"Shown: the {len(least)} texts with the least support."
        )
        write_text(inside(out, PAGE), render((_with_image(*pair) for pair in least), lead))
    return summary


def _with_image(caption: Caption, check: Check) -> Check:
    with suppress(RevisitError):  # it was readable when it was checked
        opened = open_visuals((caption.images, None), EIGHT_FRAMES, lambda size: reduction(size, SIDE))
        return replace(check, images=shown_images(opened))
    return check


def _write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names, out = list(dict.fromkeys(name for row in rows for name in row)), io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in (names, *([row.get(name, "") for name in names] for row in rows)):
        writer.writerow(plain_cell(value) if isinstance(value, str) else value for value in line)
    write_text(path, out.getvalue())
