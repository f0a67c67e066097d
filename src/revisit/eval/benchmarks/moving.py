"""Moving scenes: yes/no questions about presence, direction and order in generated clips, whose truth is known.

`--data scenes:moving:NUMBER:SEED` generates the clips. Half of the questions of each kind are yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.benchmarks.videos import VideoBenchmark
from revisit.eval.benchmarks.yes_no import YesNo, score_settings
from revisit.io import records


class MovingScenes(VideoBenchmark):
    """Questions about generated clips, by POPE's rule, as the mean over the kinds of questions."""

    name = "moving"
    max_new_tokens = 32
    headline = "accuracy"
    metrics = YesNo.metrics
    data_files = ("questions.jsonl",)

    @property
    def default_data(self) -> str:
        return "scenes:moving:100"

    def load(self, data_dir: Path) -> list[Item]:
        (path,) = self.files(data_dir)
        items = []
        for row in records.read_records(path):
            meta = {"label": row.need_choice("label", ("yes", "no")), "kind": row.need_text("kind")}
            video = path.parent / row.need_text("video")
            items.append(self.item(row.need_text("id"), row.need_text("question"), meta, video))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        return score_settings((i.id, answers[i.id], i.meta["label"], i.meta["kind"]) for i in items)
