"""VideoHallucer: pairs of a basic and a hallucinated question about a video; a pair counts if both answers are right.

An answer is right if it contains the label as a word, in any case, so "Yes, but maybe no" is right for both labels. The rule is that of
evaluation_utils.py (patrick-tssn/VideoHallucer, MIT); `all` is the mean over the sets. The temporal set has 176 pairs in the released
file and 200 in the paper.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric, PerUnit, Scores
from revisit.eval.benchmarks.videos import VideoBenchmark, mean_of
from revisit.io import records

ROOT = "videohallucer_datasets"
SETS = ("object_relation", "temporal", "semantic_detail", "external_factual", "external_nonfactual")
MORE_SETS = ("interaction", "fact_detect")  # released, and not in the paper's average
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

    sets: tuple[str, ...] = ()

    name = "videohallucer"
    title = "VideoHallucer"
    source = "github.com/patrick-tssn/VideoHallucer; the videos: the Hub dataset ColorfulAI/VideoHallucer"
    license = "MIT (questions); the videos have the licenses of their sources"
    max_new_tokens = 32
    headline = "accuracy"
    metrics = tuple(Metric(name, "higher", 100, 1) for name in ("accuracy", "basic_accuracy", "halluc_accuracy"))

    def _file(self, data_dir: Path, name: str) -> Path:
        if name not in (*SETS, *MORE_SETS):
            raise RevisitError(f"VideoHallucer has no set {name!r}; its sets: {', '.join((*SETS, *MORE_SETS))}.")
        return data_dir / ROOT / name / f"{name}.json"

    def files(self, data_dir: Path) -> list[Path]:
        if self.sets:
            return [self.require(self._file(data_dir, name)) for name in self.sets]
        present = [path for name in SETS if (path := self._file(data_dir, name)).exists()]
        return present or [self.require(self._file(data_dir, SETS[0]))]

    def load(self, data_dir: Path) -> list[Item]:
        items = []
        for path in self.files(data_dir):
            name = path.stem
            for number, pair in enumerate(records.read_records(path)):
                for role in ROLES:
                    row = records.record(pair.need(role), f"{pair.where}, {role}")
                    video = f"{ROOT}/{name}/videos/{row.need_text('video')}"
                    meta = {"set": name, "pair": f"{name}/{number}", "role": role}
                    meta["label"] = row.need_choice("answer", ("yes", "no"))
                    prompt = row.need_text("question") + SUFFIX
                    items.append(self.video_item(data_dir, f"{name}/{number}/{role}", prompt, meta, video))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        hits: dict[str, dict[str, dict[str, bool]]] = {}  # set -> pair -> role -> right
        for item in items:
            pairs = hits.setdefault(item.meta["set"], {})
            pairs.setdefault(item.meta["pair"], {})[item.meta["role"]] = is_right(answers[item.id], item.meta["label"])
        parts: dict[str, dict[str, PerUnit]] = {"accuracy": {}, "basic_accuracy": {}, "halluc_accuracy": {}}
        for name, pairs in hits.items():
            whole = {unit: roles for unit, roles in pairs.items() if len(roles) == len(ROLES)}
            if whole:
                columns = {
                    "accuracy": {unit: all(roles.values()) for unit, roles in whole.items()},
                    "basic_accuracy": {unit: roles["basic"] for unit, roles in whole.items()},
                    "halluc_accuracy": {unit: roles["hallucination"] for unit, roles in whole.items()},
                }
                for metric, right in columns.items():
                    parts[metric][name] = {unit: (float(value), 1.0) for unit, value in right.items()}
        if not parts["accuracy"]:
            raise RevisitError("VideoHallucer scores pairs, and no pair is complete: score more items.")
        per_item = {f"all/{metric}": mean_of(by_set) for metric, by_set in parts.items()}
        for metric, by_set in parts.items():
            per_item |= {f"{name}/{metric}": units for name, units in by_set.items()}
        return Scores.of(per_item, {"pairs": sum(map(len, parts["accuracy"].values()))})
