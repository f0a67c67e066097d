"""Texts with labels for wrong words, and how well detectors find these words.

DetailVerifyBench (arXiv:2604.05623) marks them with tags in the text, HalLoc (arXiv:2506.10286) lists them separately. A detector gives
each word a score, which is higher for words that the image supports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.benchmarks.chair import PROMPT
from revisit.eval.report.document import Block, Table
from revisit.eval.run import Reporter
from revisit.explain.sweep import Flags, Floats, auroc, best_threshold, quality
from revisit.io.records import Record, find_image, read_records, record
from revisit.paper.study import Result, Stored, Subject, number, track
from studies.check import Reader, Stated
from studies.detectors import DETECTORS, average_precision

WORD = re.compile(r"[^\W_]+(?:[-'’.@_][^\W_]+)*")
TAG = re.compile(r"<(/?)hallucination>", re.IGNORECASE)
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Span:
    """A wrong part of a text: from `start` to `end` (exclusive), and the kind of mistake."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class LabeledText:
    """A text about an image, and its wrong parts."""

    image: str  # file name or id
    text: str
    wrong: tuple[Span, ...]

    def words(self) -> list[tuple[int, int, str | None]]:
        """Return start, end and kind of mistake of every word; None for words that are right."""
        return [
            (*found.span(), next((s.kind for s in self.wrong if s.start < found.end() and found.start() < s.end), None))
            for found in WORD.finditer(self.text)
        ]


# -- readers --------------------------------------------------------------------------------------------------------


def read_detail_verify(path: Path) -> list[LabeledText]:
    """Read DetailVerifyBench's real_test.jsonl or synthetic_test.jsonl."""
    return [_detail_verify(row) for row in read_records(path)]


def _detail_verify(row: Record) -> LabeledText:
    tagged = row.need_text("description_tag")
    image = str(row["image_path"] if "image_path" in row else row.need("filename"))
    kinds: dict[str, list[str]] = {}  # text of a label -> its kinds, in the order of the file
    for label in row.get("hallucination_labels") or ():
        if label.get("applied", True):
            text = label.get("text") or label.get("final_replacement") or ""
            kind = label.get("attribute_type") or next(iter(label.get("labels") or ()), UNKNOWN)
            kinds.setdefault(_key(text), []).append(str(kind).lower())
    parts = TAG.split(tagged)  # text, "" or "/", text, ...
    text, spans = parts[0], []
    for at in range(1, len(parts), 2):
        if (parts[at] == "/") != (at % 4 == 3):
            raise RevisitError(f"{row.where}: <Hallucination> tags must open and close in turn.")
        if at % 4 == 1:
            listed = kinds.get(_key(parts[at + 1]), [])
            spans.append(Span(len(text), len(text + parts[at + 1]), listed.pop(0) if listed else UNKNOWN))
        text += parts[at + 1]
    if len(parts) % 4 == 3:
        raise RevisitError(f"{row.where}: the last <Hallucination> tag is not closed.")
    return LabeledText(image, text, tuple(spans))


def _key(text: str) -> str:
    return re.sub(r"[^\w\s]", "", text.strip().lower())


def read_halloc(path: Path) -> list[LabeledText]:
    """Read one of HalLoc's files (halloc_vqa.json, halloc_instruct.json, halloc_caption.json).

    `annotations` is a list of objects with `type` and either `start` and `end` or the wrong words as `text`, or a mapping from types to
    lists of wrong words.
    """
    return [_halloc(row) for row in read_records(path)]


def _halloc(row: Record) -> LabeledText:
    text, annotations = row.need_text("hallucinated_text"), row.need("annotations")
    if isinstance(annotations, dict):
        annotations = [{"type": kind, "text": words} for kind, found in annotations.items() for words in found]
    spans, after = [], dict[str, int]()  # the same words twice: labels are in the order of the text
    for count, value in enumerate(annotations, 1):
        label = record(value, f"{row.where}, annotation {count}")
        if "start" in label:
            start, end = label.need_int("start"), label.need_int("end")
        else:
            words = label.need_text("text")
            start = text.find(words, after.get(words, 0))
            end = after[words] = start + len(words)
        if not 0 <= start < end <= len(text):
            raise RevisitError(f"{label.where} is not part of the text: {dict(label)}.")
        spans.append(Span(start, end, label.need_text("type").lower()))
    return LabeledText(str(row.need("image_id")), text, tuple(spans))


def labeled_items(path: Path, folder: Path) -> list[Item]:
    """Read a file of either benchmark; return its texts with their images, which are below a folder or its `images`."""
    first = [name for row in read_records(path)[:1] for name in row]
    if "description_tag" not in first and "hallucinated_text" not in first:
        raise RevisitError(f"{path} is a file of neither DetailVerifyBench nor HalLoc: see docs/research/studies.md.")
    texts = read_detail_verify(path) if "description_tag" in first else read_halloc(path)
    names = [text.image if Path(text.image).suffix else f"{text.image}.jpg" for text in texts]
    return [
        Item(str(number), PROMPT, (find_image(folder, name, "images", "."),), {"labeled": text})
        for number, (name, text) in enumerate(zip(names, texts, strict=True), 1)
    ]


# -- scores of a detector -------------------------------------------------------------------------------------------

Scored = Sequence[tuple[int, int, float]]  # start and end of a detector's word, and its score


def choose_threshold(texts: Sequence[LabeledText], scores: Sequence[Scored]) -> float:
    """Return the threshold with the largest F1 over all words."""
    rows = [row for text, found in zip(texts, scores, strict=True) for row in _joined(text, found)]
    return best_threshold(*_columns(rows))


def score_words(texts: Sequence[LabeledText], scores: Sequence[Scored], threshold: float) -> dict[str, Any]:
    """Return AUROC, average precision and token F1 over all words, and by kind of mistake.

    A word gets the lowest score of the detector's words that overlap it. Words without a score are not flagged in F1, and are left out
    of the other two. A kind is compared with all right words. `f1` counts words; `text_f1` is the mean over texts, as DetailVerifyBench
    reports it, with 0 for a text without wrong words.
    """
    rows = [list(_joined(text, found)) for text, found in zip(texts, scores, strict=True)]
    flat = [row for text in rows for row in text]
    each = [quality(*_columns(text, missing=np.inf), threshold).f1 if text else 0.0 for text in rows]
    kinds = sorted({kind for _, kind in flat if kind is not None})
    return {
        "texts": len(texts),
        **_measures(flat, threshold),
        "text_f1": float(np.mean(each)) if each else None,
        "kinds": {kind: _measures([row for row in flat if row[1] in (None, kind)], threshold) for kind in kinds},
    }


def _joined(text: LabeledText, scores: Scored) -> Iterator[tuple[float | None, str | None]]:
    for start, end, kind in text.words():
        yield min((score for a, b, score in scores if a < end and start < b), default=None), kind


def _columns(rows: Sequence[tuple[float | None, str | None]], missing: float | None = None) -> tuple[Floats, Flags]:
    kept = [
        (missing if score is None else score, kind) for score, kind in rows if score is not None or missing is not None
    ]
    return np.array([score for score, _ in kept], float), np.array([kind is None for _, kind in kept], bool)


def _measures(rows: Sequence[tuple[float | None, str | None]], threshold: float) -> dict[str, Any]:
    known, every = _columns(rows), _columns(rows, missing=np.inf)
    wrong = ~every[1]
    flagged = (every[0] < threshold)[wrong]
    values = {
        "auroc": auroc(*known),
        "average_precision": average_precision(*known),
        "f1": quality(*every, threshold).f1,
        "recall": float(flagged.mean()) if len(flagged) else np.nan,
    }
    counts = {"words": len(rows), "wrong": len(flagged), "scored": len(known[0])}
    return {**counts, **{name: None if np.isnan(value) else value for name, value in values.items()}}


# -- the study ------------------------------------------------------------------------------------------------------


def run(subject: Subject, reporter: Reporter, labels: Path) -> Result:
    """Run the study: AUROC, average precision and F1 of every detector over all words, and by kind of mistake.

    The first half of the texts sets each threshold, the second half measures.
    """
    items = labeled_items(labels, subject.folder)[: subject.limit]
    reader, texts = Reader(subject), [item.meta["labeled"] for item in items]
    found: dict[str, list[Scored]] = {name: [] for name in DETECTORS}
    for item, text in zip(track(reporter, "texts", items), texts, strict=True):
        words = list(reader.words(item, {"": Stated(text.text, lambda _: ("word", True))}))
        for name, scored in found.items():
            scored.append([(*place, scores[name]) for _, place, _, scores in words])
    half = len(texts) // 2
    rows = [
        {"name": name, **score_words(texts[half:], scored[half:], choose_threshold(texts[:half], scored[:half]))}
        for name, scored in found.items()
    ]
    return {"texts": len(texts) - half, "rows": rows}


def draw(result: Stored) -> list[Block]:
    """Draw one row per detector, and its AUROC by kind of mistake."""
    measures = ("auroc", "average_precision", "f1", "text_f1")
    lines = [(row["name"], *(number(row[key], 3) for key in measures)) for row in result["rows"]]
    first = result["rows"][0]
    kinds = list(first["kinds"])
    by_kind = [(row["name"], *(number(row["kinds"][kind]["auroc"], 3) for kind in kinds)) for row in result["rows"]]
    caption = (
        f"{first['words']} words of {result['texts']} texts, {first['wrong']} of them wrong. Token F1 over all words, and its mean over "
        "texts, in which a text without wrong words counts 0."
    )
    return [
        Table(("Score", "AUROC", "average precision", "F1", "F1 by text"), lines, caption),
        Table(("Score", *kinds), by_kind, "AUROC by kind of mistake, against all right words."),
    ]
