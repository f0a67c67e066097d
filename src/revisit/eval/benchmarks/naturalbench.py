"""NaturalBench: two questions about two images in each group, with opposite answers: Q_Acc, I_Acc, G_Acc and Acc.

Q_Acc counts questions that are answered right for both images, I_Acc images with both questions right, G_Acc groups with all
four right. The option that comes first in an answer (yes or no, A or B) counts as the answer. The rule is that of
naturalbench_vqa.py (Baiqi-Li/NaturalBench), which derives the right answers from the positions: the first question is yes (A) for
the first image only, the second for the second. Data: the Hub dataset BaiqiL/NaturalBench.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores
from revisit.eval.benchmarks.io.data import Draft
from revisit.io import records
from revisit.io.records import Record

SUFFIXES = {
    "yes_no": "Please answer Yes or No.",
    "multiple_choice": "Please output the letter corresponding to the correct option.",
}
OPTIONS = {"yes_no": ("yes", "no"), "multiple_choice": ("A", "B")}
# (question, image) -> True if the first option is the right one
RIGHT = {(0, 0): True, (0, 1): False, (1, 0): False, (1, 1): True}


def parse(answer: str, kind: str = "yes_no") -> bool | None:
    """Return whether the first option comes before the other, as a word in any case; None if neither is in the answer."""
    found = (re.search(rf"\b{option}\b", answer, re.IGNORECASE) for option in OPTIONS[kind])
    first, second = (None if match is None else match.start() for match in found)
    if first is None or second is None:
        return None if first is second else second is None
    return first < second


def score_groups(groups: Mapping[str, Mapping[tuple[int, int], bool | None]]) -> Scores:
    """Compute the four accuracies from the parsed answer to each (question, image) of every group."""
    right = {name: {cell: parsed[cell] is first for cell, first in RIGHT.items()} for name, parsed in groups.items()}
    parts_of: dict[str, list[tuple[tuple[int, int], ...]]] = {
        "Q_Acc": [((0, 0), (0, 1)), ((1, 0), (1, 1))],
        "I_Acc": [((0, 0), (1, 0)), ((0, 1), (1, 1))],
        "G_Acc": [tuple(RIGHT)],
        "Acc": [(cell,) for cell in RIGHT],
    }
    per_item = {
        metric: {
            name: (float(sum(all(cells[cell] for cell in part) for part in parts)), float(len(parts)))
            for name, cells in right.items()
        }
        for metric, parts in parts_of.items()
    }
    unread = sum(parsed is None for cells in groups.values() for parsed in cells.values())
    return Scores.of(per_item, {"groups": len(groups), "unread_answers": unread})


class NaturalBench(Benchmark):
    """NaturalBench's visual questions; a group is scored when all four of its questions are answered."""

    name = "naturalbench"
    max_new_tokens = 64
    headline = "G_Acc"
    metrics = tuple(Metric(name, "higher", 100, 1) for name in ("Q_Acc", "I_Acc", "G_Acc", "Acc"))

    def load(self, data_dir: Path) -> list[Item]:
        (path,) = self.files(data_dir)
        items = []
        for row in records.read_records(path):
            kind, number = row.need_choice("type", OPTIONS), row.need_int("index")
            questions, images = (row.need_list(name) for name in ("questions", "images"))
            for question, image in RIGHT:
                meta = {"group": str(number), "cell": (question, image), "kind": kind}
                prompt = f"{questions[question]}{SUFFIXES[kind]}"
                items.append(Item(f"{number}/q{question}_i{image}", prompt, (path.parent / images[image],), meta))
        return items

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write one line per group."""
        for number, row in enumerate(rows):
            images = [out.image(f"naturalbench/images/{number}_{i}", row[f"Image_{i}"], row.where) for i in (0, 1)]
            entry = {
                "index": number,
                "type": row.need_choice("Question_Type", OPTIONS),
                "questions": [row.need_text(f"Question_{i}") for i in (0, 1)],
                "images": [image.removeprefix("naturalbench/") for image in images],
            }
            out.add("naturalbench/questions.jsonl", entry)

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        groups: dict[str, dict[tuple[int, int], bool | None]] = {}
        for item in items:
            parsed = parse(answers[item.id], item.meta["kind"])
            groups.setdefault(item.meta["group"], {})[tuple(item.meta["cell"])] = parsed
        whole = {name: cells for name, cells in groups.items() if len(cells) == len(RIGHT)}
        if not whole:
            raise RevisitError(
                "NaturalBench scores groups of four questions, and no group is complete: score more items."
            )
        return score_groups(whole)
