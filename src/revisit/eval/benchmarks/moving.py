"""Moving scenes: yes/no questions about presence, direction and order in generated clips, whose truth is known.

`--data scenes:moving:NUMBER:SEED` generates the clips. Half of the questions of each kind are yes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import Item, Scores
from revisit.eval.benchmarks.videos import VideoBenchmark
from revisit.eval.benchmarks.yes_no import YesNo, score_answers
from revisit.io import records

FOLDER, FILE = "moving", "questions.jsonl"


class MovingScenes(VideoBenchmark):
    """Questions about generated clips, by POPE's rule."""

    name = "moving"
    title = "Moving scenes"
    source = "--data scenes:moving:100"
    license = "generated; the objects are Twemoji (CC BY 4.0)"
    max_new_tokens = 32
    headline = "accuracy"
    metrics = YesNo.metrics

    @property
    def default_data(self) -> str:
        return "scenes:moving:100"

    def files(self, data_dir: Path) -> list[Path]:
        return [self.require(data_dir / FOLDER / FILE)]

    def load(self, data_dir: Path) -> list[Item]:
        items = []
        for row in records.read_records(*self.files(data_dir)):
            meta = {"label": row.need_choice("label", ("yes", "no")), "kind": row.need_text("kind")}
            video = f"{FOLDER}/{row.need_text('video')}"
            items.append(self.video_item(data_dir, row.need_text("id"), row.need_text("question"), meta, video))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        whole = score_answers((item.id, answers[item.id], item.meta["label"]) for item in items)
        for kind in dict.fromkeys(item.meta["kind"] for item in items):
            own = {item.id for item in items if item.meta["kind"] == kind}
            units = {id: term for id, term in whole.per_item["accuracy"].items() if id in own}
            part = Scores.of({f"{kind}/accuracy": units}, {})
            whole.metrics.update(part.metrics)
            whole.per_item.update(part.per_item)
        return whole
