"""Check a file of captions against a folder of images; an interrupted run resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.errors import RevisitError
from revisit.io.files import LineFile, file_digest, inside, write_text
from revisit.io.finder import IDS, ImageFinder
from revisit.io.records import read_answers
from revisit.models.config import name_of
from revisit.models.identity import loaded_fingerprint
from revisit.models.images import open_image

if TYPE_CHECKING:
    from revisit.explain.check import Check
    from revisit.models.types import Model, Processor

LINES, PAGE = "checks.jsonl", "index.html"
SHOWN = 100  # texts on the page, those with the least support first


@dataclass(frozen=True)
class Caption:
    """One text of a file, with its number, its id, and its image's path and name within the folder of images."""

    number: int
    id: str
    image: Path
    name: str
    text: str

    @property
    def key(self) -> tuple[int, str, str]:
        """The identity of the caption in the results."""
        return self.number, self.name, self.text


def read_captions(path: Path, images: Path, field: str | None = None) -> list[Caption]:
    """Read the texts of a file in any layout that `revisit score` reads, and find the image of each in a folder."""
    answers, finder = read_answers(path, field=field), ImageFinder(images)
    captions = []
    for number, answer in enumerate(answers, 1):
        image, *others = finder.find(answer.record)
        if others:
            raise RevisitError(f"{answer.where} has {len(others) + 1} images; a text is checked against one.")
        captions.append(Caption(number, answer.key(IDS) or str(number), image, finder.name(image), answer.text))
    return captions


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
    from revisit.explain.check import settings_of  # imports torch

    layer, threshold, _ = settings_of(model[0], settings["threshold"])
    identity = {"model": name_of(model[0]), "fingerprint": loaded_fingerprint(*model), "layer": layer}
    with closing(LineFile(inside(out, LINES))) as file:
        done = _stored(file, {**identity, **settings, "threshold": threshold})
        left = [caption for caption in captions if done.get(caption.key, {}).get("hash") != image_hash(caption)]
        for caption in left:
            done.pop(caption.key, None)  # a check of another image
        advance(len(captions) - len(left))
        for start in range(0, len(left), batch_size):
            batch = left[start : start + batch_size]
            hashes = {caption.number: image_hash(caption) for caption in batch}
            for caption, result in _checks(model, batch, settings):
                if isinstance(result, str):
                    failures.append(f"Text {caption.number} ({caption.name}): {result}")
                    continue
                source = {"image": caption.name, "hash": hashes[caption.number]}
                line = {"number": caption.number, "id": caption.id, **source, **result.to_dict()}
                file.append([line])
                done[caption.key] = line
            advance(len(batch))
    kept = [done[caption.key] for caption in captions if caption.key in done]
    return sorted(kept, key=lambda line: line["least_support"]), failures


def image_hash(caption: Caption) -> str | None:
    """Return the SHA-256 of a caption's image, or None if it cannot be read; the check then gives the reason."""
    with suppress(OSError):
        return file_digest(caption.image)
    return None


def _checks(
    model: tuple[Model, Processor], captions: Sequence[Caption], settings: Mapping[str, Any]
) -> Iterator[tuple[Caption, Check | str]]:
    """Yield the check of each caption, or its error message; one bad caption does not affect the others."""
    from revisit.explain.check import check_many  # imports torch

    try:
        images, texts = [caption.image for caption in captions], [caption.text for caption in captions]
        yield from zip(
            captions, list(check_many(model, images, texts, batch_size=len(captions), **settings)), strict=True
        )
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
    elif "fingerprint" not in stored:
        raise RevisitError(f"{file.path} was written by an older version of revisit; use another --out.")
    elif stored != settings:
        changed = ", ".join(name for name in settings if stored.get(name) != settings[name])
        raise RevisitError(f"{file.path} has checks with other settings ({changed}); use another --out.")
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
        write_text(inside(out, PAGE), render(checks, lead, [f"{line['id']} ({line['image']})" for line in top]))
