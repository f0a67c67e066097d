"""Pointing: when ReVisiT writes the word for an object, is the selected patch on that object?

A step counts if its token is the word of an object with a box in the annotations and a vision token was selected. There are two criteria:
the selected patch touches one of the object's boxes, or has its center inside one. Chance is the share of all patches of the image that
meet the criterion. Steps of one image depend on each other, so intervals resample images.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from revisit.decoding.trace import RowTrace
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.report.document import Block, Cell, Table, Text
from revisit.eval.run import Reporter
from revisit.eval.statistics import mean_interval
from revisit.io.records import read_json
from revisit.methods import as_method
from revisit.methods.revisit import ReVisiT
from revisit.models.geometry import Layout, layout_of
from revisit.models.parts import ModelParts
from revisit.paper.objects import ObjectVocabulary
from revisit.paper.study import Result, Stored, Subject, images, share, track
from revisit.words import WORDS

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 in pixels of the original image
Boxes = dict[str, list[Box]]  # category -> its boxes in one image
Bools = NDArray[np.bool_]
MEASURES = ("touches", "touches_chance", "inside", "inside_chance")

# Compared by default: the recommendation, and one setting changed at a time.
METHODS = (
    "revisit",
    "revisit:layers=0",
    "revisit:layers=all",
    "revisit:weight=1,neighbors=1",
    "revisit:divergence=kl",
    "revisit:select=random",
)


def criteria(layout: Layout, boxes: Sequence[Box]) -> Bools:
    """Return whether the patch of each vision token touches one of an object's boxes, and has its center inside one.  -> (tokens, 2)

    A vision token without a position in the image meets neither criterion.
    """
    met = np.zeros((layout.tokens, 2), bool)
    for index in range(layout.tokens):
        region = layout.region(index)
        if region is not None:
            left, top, right, bottom = region.box
            x, y = (left + right) / 2, (top + bottom) / 2
            met[index, 0] = any(left < x1 and x0 < right and top < y1 and y0 < bottom for x0, y0, x1, y1 in boxes)
            met[index, 1] = any(x0 <= x < x1 and y0 <= y < y1 for x0, y0, x1, y1 in boxes)
    return met


class Count:
    """Counts of selected patches that met each criterion, and of random patches that would, by image."""

    def __init__(self) -> None:
        self.sums: dict[str, NDArray[np.float64]] = {}  # image -> steps, then the sum of each of MEASURES

    def add(self, image: str, index: int, met: Bools) -> None:
        """Add a step of an image at which this vision token was selected."""
        measured = np.array([1, *np.stack([met[index], met.mean(0)], axis=1).ravel()])
        self.sums[image] = self.sums.get(image, np.zeros(5)) + measured

    def row(self, **names: Any) -> Result:
        """Return the shares of all steps with 95 % intervals over images; None if nothing was counted."""
        total = sum(sums[0] for sums in self.sums.values())
        row: Result = {**names, "images": len(self.sums), "steps": int(total)}
        for place, name in enumerate(MEASURES, 1):
            terms = {image: (float(sums[place]), float(sums[0])) for image, sums in self.sums.items()}
            found = mean_interval([[terms]]) if len(terms) > 1 else None
            row[name] = {
                "share": sum(met for met, _ in terms.values()) / total if total else None,
                "low": found.low if found else None,
                "high": found.high if found else None,
            }
        return row


def run(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: one row per setting, and one row per layer from decoding with all layers."""
    boxes = read_boxes(subject.folder)
    model, vocabulary = subject.loaded[0], subject.vocabulary
    methods = {text: as_method(text, model) for text in subject.methods}
    boxed = [item for item in subject.items if boxes.get(item.id)]
    met: dict[str, dict[str, Bools]] = {}  # image -> category -> criteria
    for item in track(reporter, "boxes", boxed):
        layout = image_layout(subject, item)
        met[item.id] = {name: criteria(layout, here) for name, here in boxes[item.id].items()}
    counts = {text: Count() for text in methods}
    for text, method in methods.items():
        for item, answer in subject.decode(method, reporter, text, boxed):
            for category, selected, _ in object_steps(answer.trace.rows[0], vocabulary, met[item.id]):
                counts[text].add(item.id, selected, met[item.id][category])
    if not any(count.sums for count in counts.values()):
        raise RevisitError(
            f"No step could be measured: in {subject.folder} no boxed object was named by a word of one token."
        )
    states = range(ModelParts.of(model).depth + 1)
    layers = [Count() for _ in states]
    every_layer = ReVisiT.recommended(model, layers=tuple(states))
    for item, answer in subject.decode(every_layer, reporter, "every layer", boxed):
        for category, _, nearest in object_steps(answer.trace.rows[0], vocabulary, met[item.id]):
            for layer, index in enumerate(nearest):
                layers[layer].add(item.id, index, met[item.id][category])
    return {
        "images": len(subject.items),
        "vocabulary": vocabulary.summary(),
        "settings": [
            counts[text].row(setting=text, method={"name": m.name, **m.settings()}) for text, m in methods.items()
        ],
        "layers": [count.row(layer=layer) for layer, count in enumerate(layers)],
    }


def read_boxes(folder: Path) -> dict[str, Boxes]:
    """Read the boxes of every image, by its id, from COCO's instances file, or that of generated scenes."""
    found = sorted([*folder.glob("instances_*.json"), *folder.glob("annotations/instances_*.json")])
    if not found:
        raise RevisitError(f"{folder} has no instances_*.json, which pointing needs for the objects' boxes.")
    boxes: dict[str, Boxes] = {}
    for path in found:
        notes = read_json(path)
        try:
            names = {category["id"]: str(category["name"]) for category in notes["categories"]}
            for entry in notes["annotations"]:
                x, y, width, height = map(float, entry["bbox"])
                here = boxes.setdefault(str(entry["image_id"]), {})
                name = names[entry["category_id"]]
                here.setdefault(WORDS.get(name, name), []).append((x, y, x + width, y + height))
        except (ValueError, KeyError, TypeError) as error:
            raise RevisitError(f"{path} is not a file of COCO instances ({type(error).__name__}: {error}).") from error
    return boxes


def image_layout(subject: Subject, item: Item) -> Layout:
    """Return the layout of one image's vision tokens; raise RevisitError if it is unknown."""
    found = layout_of(*subject.loaded, [images(item)], subject.inputs([item]))
    if not found.grids:
        raise RevisitError(f"Pointing cannot be measured with this model: {found.reason}")
    return found


def object_steps(
    row: RowTrace, vocabulary: ObjectVocabulary, boxes: Container[str]
) -> Iterator[tuple[str, int, list[int]]]:
    """Yield (category, selected vision token, nearest vision token of each layer) of every step that names a boxed object."""
    named = {token: WORDS[word] for word, token in zip(vocabulary.words, vocabulary.ids, strict=True)}
    for record in row.records:
        category = named.get(record.token) if record.token is not None else None
        if category in boxes and record.vision_token is not None and record.divergences is not None:
            nearest = record.divergences.nan_to_num(nan=float("inf")).argmin(-1)  # (layers, tokens) -> (layers,)
            yield str(category), record.vision_token, nearest.tolist()


def draw(result: Stored) -> list[Block]:
    """Draw a table by setting and one by layer."""

    def table(rows: Sequence[Stored], head: str, caption: str) -> Table:
        heads = (head, "steps", "touches (%)", "by chance", "center inside (%)", "by chance")
        lines: list[tuple[Cell | str, ...]] = [
            (str(row[head.lower()]), str(row["steps"]), *(share(row[m], "share") for m in MEASURES)) for row in rows
        ]
        return Table(heads, lines, caption)

    text = (
        f"{result['images']} images. A step counts if the token is the word of a boxed object; the selected patch touches one of its "
        "boxes, or has its center inside one. By chance: the share of all patches that do. Brackets: 95 % intervals over images."
    )
    by_layer = "The nearest patch of each layer alone, from decoding with all layers."
    settings = table(result["settings"], "Setting", "The selected patch, by setting.")
    return [Text(text), settings, table(result["layers"], "Layer", by_layer)]
