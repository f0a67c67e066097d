"""A checked text: its words with their support, and its page. Nothing here runs a model."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revisit.explain.checkable import is_content
from revisit.io.images import original_size
from revisit.pages.document import asset, check_page, data_uri, fill, static_page, write_page
from revisit.video.clip import TIME

if TYPE_CHECKING:
    from PIL.Image import Image


SENTENCE = re.compile(r".+?(?:[.!?]+[\"')\]]*(?:\s+|$)|\n+|$)", re.DOTALL)


@dataclass(frozen=True)
class Word:
    """A word of a checked text. Words outside the selected set have a support, but no patch.

    Attributes:
        text: The word as it appears in the text.
        start: Index of its first character.
        end: Index after its last character.
        support: How far the image supports the word, from 0 to 1.
        checkable: Whether the word belongs to the set that was selected for checking.
        vision_token: The vision token that supports it most, from 0.
        image: The number of the image, or of the frame of a video, that the vision token belongs to, from 1.
        patch_row: The row of its patch, from 1, if the layout is known.
        patch_col: The column of its patch, from 1.
        box: The patch in pixels of the image: left, top, right, bottom.
        time: The time of the frame in seconds, in a video.
    """

    text: str
    start: int
    end: int
    support: float
    checkable: bool
    vision_token: int
    image: int = 1
    patch_row: int | None = None
    patch_col: int | None = None
    box: Sequence[float] | None = None
    time: float | None = None


@dataclass
class Check:
    """The words of a text with their support. Notebooks display the text and the image.

    Attributes:
        text: The text that was checked.
        words: Its words, in order.
        threshold: Checkable words with less support are flagged.
        model: The model whose vision tokens were read.
        images: The images; empty if the check was read from a file.
        notes: Caveats, such as a model without a recommended threshold.
        id: The text's id in the file that it comes from.
        file: The name of the image in the folder of images.
    """

    text: str
    words: list[Word]
    threshold: float
    model: str
    images: list[Image]
    notes: list[str] = field(default_factory=list)
    id: str = ""
    file: str = ""

    @property
    def checked(self) -> list[Word]:
        """The words that belong to the selected set, in the order of the text."""
        return [word for word in self.words if word.checkable]

    def flagged(self) -> list[Word]:
        """Return the checked words with less support than the threshold, in the order of the text."""
        return [word for word in self.checked if word.support < self.threshold]

    def sentences(self) -> list[tuple[str, float]]:
        """Return the sentences of the text with the least support of a checked word in each; 1 if it has none."""
        found = []
        for match in SENTENCE.finditer(self.text):
            inside = (word.support for word in self.checked if match.start() <= word.start < match.end())
            found.append((match.group(), min(inside, default=1.0)))
        return found

    def kept(self) -> str:
        """Return the text without the sentences that hold a flagged word."""
        return "".join(sentence for sentence, least in self.sentences() if least >= self.threshold).strip()

    @property
    def least_support(self) -> float:
        """The smallest support of a checked word; 1 if there is none."""
        return min((word.support for word in self.checked), default=1.0)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], threshold: float | None = None) -> Check:
        """Rebuild a check that `to_dict` returned, without its images and with its threshold or another one."""
        words = [Word(**{name: word[name] for name in Word.__dataclass_fields__}) for word in stored["words"]]
        threshold = stored["threshold"] if threshold is None else threshold
        origin = stored.get("id", ""), stored.get("image", "")
        return cls(stored["text"], words, threshold, stored["model"], [], list(stored["notes"]), *origin)

    def to_dict(self) -> dict[str, Any]:
        """Return the check without its images, ready for JSON."""
        flagged = self.flagged()
        return {
            "text": self.text,
            "model": self.model,
            "threshold": self.threshold,
            "least_support": self.least_support,
            "flagged": [word.text for word in flagged],
            "words": [{**vars(word), "flagged": word in flagged} for word in self.words],
            "notes": self.notes,
        }

    def save(self, path: str | Path) -> Path:
        """Write the page (.html); return the path."""
        return write_page(check_page(path), render([self]))

    def __repr__(self) -> str:
        words = ", ".join(word.text for word in self.flagged()) or "none"
        return f"Check({len(self.words)} words, flagged: {words})"

    def _repr_html_(self) -> str:
        return fragment(self)


# -- the page -------------------------------------------------------------------------------------------------------


def render(checks: Iterable[Check], lead: str = "") -> str:
    """Render one page with these checks, in order."""
    bodies, flagged, last = list[str](), 0, None
    for last in checks:  # the images of each may be opened here, and are not kept
        bodies.append(fragment(last))
        flagged += bool(last.flagged())
    assert last is not None
    several = f"{flagged} of the {len(bodies)} texts shown have flagged words"
    title = headline(last) if len(bodies) == 1 else several
    return static_page(title, "".join(bodies), "check.css", lead or f"Checked with {last.model}")


def headline(check: Check) -> str:
    """Return the result of a check in one sentence."""
    if flagged := [f"‘{word.text}’" for word in check.flagged()]:
        *others, last = flagged
        listed = f"{', '.join(others)} or {last}" if others else last
        return f"The image does not support {listed}"
    if not check.checked:
        return "No word was checked"
    return f"No word is flagged: the image supports {', '.join(f'‘{word.text}’' for word in check.checked)}"


def fragment(check: Check) -> str:
    """Render one check as HTML for a notebook or a page: the image, the text, and a bar for each word."""
    return fill(
        "check.html",
        check=check,
        name=f"{check.id} ({check.file})" if check.id else "",
        key=f"c{zlib.crc32(json.dumps(check.to_dict()).encode()):08x}",
        unchecked=dict.fromkeys(word.text for word in check.words if not word.checkable and is_content(word.text)),
        images=[(original_size(image), data_uri(image), image.info.get(TIME)) for image in check.images],
        style=asset("check.css"),
    )
