"""VideoHallucer: pairs of a basic and a hallucinated question about a video; a pair counts if both answers are right.

An answer is right if it contains the label as a word, in any case, so "Yes, but maybe no" is right for both labels. The rule is that of
evaluation_utils.py (patrick-tssn/VideoHallucer, MIT); `all` is the mean over the sets. The temporal set has 176 pairs in the released
file and 200 in the paper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric, PerUnit, Scores, mean_of
from revisit.eval.benchmarks.videos import VideoBenchmark
from revisit.io import records
from revisit.io.files import path_within

ROOT = "videohallucer_datasets"
Subset = Literal[
    "object_relation",
    "temporal",
    "semantic_detail",
    "external_factual",
    "external_nonfactual",
    "interaction",
    "fact_detect",
]
SETS = get_args(Subset)[:5]  # those of the paper's average
SUFFIX = "\nAnswer the question using 'yes' or 'no'."
ROLES = ("basic", "hallucination")


def is_right(answer: str, label: str) -> bool:
    """Return whether an answer contains the label as a word."""
    return re.search(rf"\b{label}\b", answer, re.IGNORECASE) is not None


class VideoHallucer(VideoBenchmark):
    """VideoHallucer's pairs of questions; pairs with a missing question are left out.

    Args:
        sets: The sets to use, such as "temporal"; by default those of the paper whose files are in the folder.
    """

    sets: tuple[Subset, ...] = ()

    name = "videohallucer"
    max_new_tokens = 32
    headline = "accuracy"
    metrics = tuple(Metric(name, "higher", 100, 1) for name in ("accuracy", "basic_accuracy", "halluc_accuracy"))

    def files(self, data_dir: Path) -> list[Path]:
        paths = [data_dir / ROOT / name / f"{name}.json" for name in self.sets or SETS]
        present = paths if self.sets else [path for path in paths if path.exists()]
        return [self.require(path) for path in present or paths[:1]]

    def load(self, data_dir: Path) -> list[Item]:
        items = []
        for path in self.files(data_dir):
            name = path.stem
            for number, pair in enumerate(records.read_records(path)):
                for role in ROLES:
                    row = records.record(pair.need(role), f"{pair.where}, {role}")
                    meta = {"pair": f"{name}/{number}", "role": role, "label": row.need_choice("answer", ("yes", "no"))}
                    video = path_within(path.parent, Path("videos") / row.need_text("video"))
                    items.append(self.item(f"{name}/{number}/{role}", row.need_text("question") + SUFFIX, meta, video))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        pairs: dict[str, dict[str, bool]] = {}  # pair -> role -> right
        for item in items:
            right = is_right(answers[item.id], item.meta["label"])
            pairs.setdefault(item.meta["pair"], {})[item.meta["role"]] = right
        parts: dict[str, dict[str, PerUnit]] = {metric.name: {} for metric in self.metrics}  # metric -> set -> pairs
        for pair, roles in pairs.items():
            if len(roles) == len(ROLES):
                for metric, value in zip(parts, (all(roles.values()), *map(roles.get, ROLES)), strict=True):
                    parts[metric].setdefault(pair.partition("/")[0], {})[pair] = float(bool(value)), 1.0
        if not parts["accuracy"]:
            raise RevisitError("VideoHallucer scores pairs, and no pair is complete: score more items.")
        per_item = {f"all/{metric}": mean_of(sets) for metric, sets in parts.items()}
        per_item |= {f"{name}/{metric}": units for metric, sets in parts.items() for name, units in sets.items()}
        return Scores.of(per_item, {"pairs": sum(map(len, parts["accuracy"].values()))})
