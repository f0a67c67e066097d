"""Benchmarks of yes/no questions about images: the published parsers of answers, the metrics, and the base class `YesNo`.

The parsers disagree on one answer in ten, so the parser is part of a score's version.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import model_validator
from typing_extensions import Self

from revisit.errors import RevisitError, unknown
from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores, mean_of
from revisit.eval.benchmarks.vqav2 import strip_punctuation
from revisit.io import records

Parser = Literal["official", "vcd", "opera", "harness", "vlmevalkit", "repope", "dash_b"]
SUFFIXES = {"none": "", "one-word": " Please answer this question with one word."}

# --------------------------------------------------------------------------------------------------- parsers
# A parser returns "yes", "no", or any other text for an answer that is neither.


def parse_official(text: str, label: str = "") -> str:
    """Parse like POPE's evaluate.py: first sentence only, commas dropped; "no" if No, no or not is a word of it, else "yes"."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "no", "not"} & set(words) else "yes"


def parse_opera(text: str, label: str = "") -> str:
    """Parse like OPERA's recorder: all sentences, full stops and commas dropped; NO and words in n't count as "no" too."""
    words = text.replace(".", "").replace(",", "").split(" ")
    negative = {"No", "no", "not", "NO"} & set(words) or any(word.endswith("n't") for word in words)
    return "no" if negative else "yes"


def parse_vcd(text: str, label: str = "") -> str:
    """Parse by VCD's rule, which uses the label: an answer is right if it contains the label anywhere, "know" included."""
    label = label.lower().strip()
    if label in text.lower().strip():
        return label
    return "no" if label == "yes" else "yes"


def parse_harness(text: str, label: str = "") -> str:
    """Parse like lmms-eval: the whole answer, lower-cased and stripped; anything but exactly yes or no is wrong."""
    return text.lower().strip()


def parse_vlmevalkit(text: str, label: str = "") -> str:
    """Parse like VLMEvalKit: yes or no if exactly one of them is a word, else unknown."""
    words = strip_punctuation(text.lower(), _LONE_PERIOD).split()
    if ("yes" in words) == ("no" in words):
        return "unknown"
    return "yes" if "yes" in words else "no"


def parse_repope(text: str, label: str = "") -> str:
    """Parse like RePOPE: yes if "yes" is anywhere in the answer, else no if "no" is, else no prediction at all."""
    lower = text.lower()
    return "yes" if "yes" in lower else "no" if "no" in lower else "unknown"


_LONE_PERIOD = re.compile(r"(?<!\d)\.(?!\d)")

PARSERS: dict[str, Callable[[str, str], str]] = {
    "official": parse_official,
    "vcd": parse_vcd,
    "opera": parse_opera,
    "harness": parse_harness,
    "vlmevalkit": parse_vlmevalkit,
    "repope": parse_repope,
    "dash_b": parse_repope,  # the same reading, but an answer without a prediction is wrong
}

# --------------------------------------------------------------------------------------------------- metrics

# (label, prediction) -> which of TP, FP, TN, FN, "wrong" (counts as an error only) or "left out" it is
_CELLS = {("yes", "yes"): "TP", ("no", "yes"): "FP", ("no", "no"): "TN", ("yes", "no"): "FN"}


def cell(label: str, prediction: str, parser: str = "official") -> str:
    """Return the cell that an answer counts in; parsers differ for an answer that is neither yes nor no."""
    if (label, prediction) in _CELLS:
        return _CELLS[label, prediction]
    if parser == "repope":
        return "left out"
    if parser == "vlmevalkit" and label == "yes":
        return "FN"  # not yes, so missed: recall counts it
    return "wrong"


def _read(rows: Iterable[tuple[str, str, str]], parser: str) -> tuple[dict[str, str], dict[str, bool]]:
    """Return unit -> cell, and unit -> True if its label is yes, from (unit, answer, label) rows."""
    parse = PARSERS[parser]
    cells, labels = {}, {}
    for unit, answer, label in rows:
        label = label.lower().strip()
        if label not in ("yes", "no"):
            raise RevisitError(f"Item {unit}: the label must be yes or no, not {label!r}.")
        cells[unit] = cell(label, parse(answer, label), parser)
        labels[unit] = label == "yes"
    return cells, labels


def score_recalls(rows: Iterable[tuple[str, str, str]], parser: str = "dash_b") -> Scores:
    """Compute DASH-B's metrics over (unit, answer, label) rows: accuracy, the recalls of yes and no, and their harmonic mean."""
    cells, labels = _read(rows, parser)
    right = {unit: (float(cell in ("TP", "TN")), float(cell != "left out")) for unit, cell in cells.items()}
    per_item = {
        "accuracy": right,
        "TPR": {unit: value for unit, value in right.items() if labels[unit]},
        "TNR": {unit: value for unit, value in right.items() if not labels[unit]},
    }
    scores = Scores.of(per_item, {"right": sum(n for n, _ in right.values()), "answers": len(right)})
    tpr, tnr = scores.metrics["TPR"], scores.metrics["TNR"]
    scores.metrics["harmonic"] = 2 * tpr * tnr / (tpr + tnr) if tpr + tnr else math.nan
    return scores


def score_answers(rows: Iterable[tuple[str, str, str]], parser: str = "official") -> Scores:
    """Compute the metrics over (unit, answer, label) rows. Precision and F1 without any yes answer are undefined (NaN)."""
    cells, labels = _read(rows, parser)
    tp, fp, tn, fn = ({u: float(c == kind) for u, c in cells.items()} for kind in ("TP", "FP", "TN", "FN"))
    counted = {u: float(c != "left out") for u, c in cells.items()}
    yes = {u: float(labels[u]) if parser == "harness" else tp[u] + fp[u] for u in cells}  # lmms-eval counts labels
    per_item = {
        "accuracy": {u: (tp[u] + tn[u], counted[u]) for u in cells},
        "precision": {u: (tp[u], tp[u] + fp[u]) for u in cells},
        "recall": {u: (tp[u], tp[u] + fn[u]) for u in cells},
        "F1": {u: (2 * tp[u], 2 * tp[u] + fp[u] + fn[u]) for u in cells},
        "yes_ratio": {u: (yes[u], counted[u]) for u in cells},
    }
    counts = {kind: float(sum(c == kind for c in cells.values())) for kind in ("TP", "FP", "TN", "FN")}
    scores = Scores.of(per_item, {**counts, "other": len(cells) - sum(counts.values())})
    p, r = scores.metrics["precision"], scores.metrics["recall"]
    scores.metrics["F1"] = 2 * p * r / (p + r) if p + r else math.nan
    if parser in ("harness", "vlmevalkit"):  # the two harnesses divide 0 by 0 to 0
        scores.metrics.update({name: 0.0 for name, value in scores.metrics.items() if math.isnan(value)})
    return scores


def score_settings(rows: Iterable[tuple[str, str, str, str]], parser: str = "official") -> Scores:
    """Compute the metrics per setting, and their means over settings, from (unit, answer, label, setting) rows.

    VLMEvalKit pools the rows of all settings instead.
    """
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for unit, answer, label, setting in rows:
        groups.setdefault(setting, []).append((unit, answer, label))
    parts = {setting: score_answers(group, parser) for setting, group in groups.items()}
    if len(parts) == 1:
        return next(iter(parts.values()))
    if parser == "vlmevalkit":
        pooled = score_answers((row for group in groups.values() for row in group), parser)
        metrics, per_item = dict(pooled.metrics), dict(pooled.per_item)
    else:
        names = next(iter(parts.values())).metrics
        metrics = {name: sum(part.metrics[name] for part in parts.values()) / len(parts) for name in names}
        # These are means within a setting, so their mean over settings is a weighted sum over items.
        per_item = {
            name: mean_of({setting: part.per_item[name] for setting, part in parts.items()})
            for name in ("accuracy", "yes_ratio")
        }
    for setting, part in parts.items():
        metrics |= {f"{setting}/{name}": value for name, value in part.metrics.items()}
        per_item |= {f"{setting}/{name}": units for name, units in part.per_item.items()}
    counts = {f"{setting}/{k}": v for setting, part in parts.items() for k, v in part.counts.items()}
    return Scores(metrics, per_item, counts)


RECALLS = tuple(Metric(name, "higher", 100, 2) for name in ("harmonic", "accuracy", "TPR", "TNR"))

# ------------------------------------------------------------------------------------------------- benchmark


@dataclass(frozen=True)
class ImageSource:
    """The images of a question file: folders below the data folder, and the URLs of folders to download them from."""

    folders: tuple[str, ...]
    urls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Questions:
    """One setting: a file of {"question_id", "image", "text", "label"} objects, as JSON lines or an array."""

    setting: str
    names: tuple[str, ...]  # possible file names
    images: ImageSource


class YesNo(Benchmark):
    """Yes/no questions about images, in settings with one question file each.

    A benchmark in this form is a subclass that sets `name`, `title`, `source`, `license` and `question_files`.

    Args:
        settings: The settings to use, such as "coco_random,gqa_popular"; by default all whose files are in the folder.
        parser: The rule that parses answers.
        suffix: "none" is the question alone (OPERA, RITUAL), "one-word" adds VCD's request for a single word.
    """

    settings: tuple[str, ...] = ()
    parser: Parser = "official"
    suffix: Literal["none", "one-word"] = "none"

    question_files: ClassVar[tuple[Questions, ...]]
    rule_options = ("parser",)
    max_new_tokens = 64
    headline = "F1"
    metrics: ClassVar[tuple[Metric, ...]] = (
        *(Metric(name, "higher", 100, 2) for name in ("accuracy", "precision", "recall", "F1")),
        Metric("yes_ratio", None, 100, 2),
        Metric("words", None, 1, 1),  # in runs: the mean length of an answer
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for setting in self.settings:
            if setting not in self._known():
                raise unknown("setting", setting, self._known())
        return self

    @classmethod
    def _known(cls) -> dict[str, Questions]:
        return {questions.setting: questions for questions in cls.question_files}

    def files(self, data_dir: Path) -> list[Path]:
        return [path for _, path in self._present(data_dir)]

    def _present(self, data_dir: Path) -> list[tuple[Questions, Path]]:
        """Return the files of the chosen settings; by default those that exist, at least one."""
        home = records.folder(data_dir, self.name, *(name for q in self.question_files for name in q.names))
        chosen = [self._known()[setting] for setting in self.settings] or self.question_files
        candidates = ((q, [home / name for name in q.names]) for q in chosen)
        files = [(q, next(filter(Path.exists, paths), paths[0])) for q, paths in candidates]
        present = [(q, path) for q, path in files if path.exists()]
        for _, path in files if self.settings else files[: not present]:
            self.require(path)
        return present

    def load(self, data_dir: Path) -> list[Item]:
        items = []
        for questions, path in self._present(data_dir):
            for row in records.read_records(path):
                image = records.find_image(data_dir, row.need_text("image"), *questions.images.folders)
                meta = {"label": row.need_text("label"), "setting": questions.setting}
                name = f"{questions.setting}/{row.need('question_id')}"
                items.append(Item(name, row.need_text("text") + SUFFIXES[self.suffix], (image,), meta))
        return items

    def image_urls(self, image: Path, item: Item) -> tuple[str, ...]:
        source = self._known()[item.meta["setting"]].images
        return tuple(f"{url}/{image.name}" for url in source.urls)

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        rows = ((item.id, answers[item.id], item.meta["label"], item.meta["setting"]) for item in items)
        return score_settings(rows, self.parser)
