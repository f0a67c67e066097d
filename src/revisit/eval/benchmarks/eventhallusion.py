"""EventHallusion: yes/no questions about events in videos (the binary part; the judged descriptions are not included).

An answer counts by how it begins, in any case; one that begins with neither yes nor no is wrong, and `not_matching` is the share of
these. The rule is that of eval.py (Stevetich/EventHallusion).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import Item, Metric, PerUnit, Scores
from revisit.eval.benchmarks.videos import VideoBenchmark
from revisit.io import records

SPLITS = ("entire", "interleave", "misleading")
SUFFIX = "\nPlease answer yes or no:"


def parse(answer: str) -> str:
    """Return "yes" or "no" by the beginning of an answer; empty if it begins with neither."""
    lower = answer.lower()
    return next((word for word in ("yes", "no") if lower.startswith(word)), "")


class EventHallusion(VideoBenchmark):
    """EventHallusion's yes/no questions."""

    name = "eventhallusion"
    max_new_tokens = 32
    headline = "accuracy"
    metrics = (Metric("accuracy", "higher", 100, 1), Metric("not_matching", "lower", 100, 1))

    def files(self, data_dir: Path) -> list[Path]:
        return [self.require(data_dir / "questions" / f"{split}_questions.json") for split in SPLITS]

    def load(self, data_dir: Path) -> list[Item]:
        items = []
        for split, path in zip(SPLITS, self.files(data_dir), strict=True):
            for row in records.read_records(path):
                id = row.need_text("id")
                for number, entry in enumerate(row.need_list("questions")):
                    question = records.record(entry, f"{row.where}, question {number + 1}")
                    meta = {"split": split, "label": question.need_choice("answer", ("yes.", "no.")).rstrip(".")}
                    prompt = question.need_text("question") + SUFFIX
                    items.append(self.item(f"{id}/{number}", prompt, meta, data_dir / "videos" / split / f"{id}.mp4"))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        per_item: dict[str, PerUnit] = {"accuracy": {}, "not_matching": {}}
        for item in items:
            word = parse(answers[item.id])
            right = float(word == item.meta["label"]), 1.0
            per_item["accuracy"][item.id] = right
            per_item["not_matching"][item.id] = float(not word), 1.0
            per_item.setdefault(f"{item.meta['split']}/accuracy", {})[item.id] = right
        return Scores.of(per_item, {"right": sum(n for n, _ in per_item["accuracy"].values()), "answers": len(items)})
