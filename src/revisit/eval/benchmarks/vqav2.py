"""VQAv2: open questions with ten human answers each, by the strict official rule and by the paper's token rule.

`accuracy` is the official number (GT-Vision-Lab/VQA vqaEval.py), including its surprises: when all ten answers are equal
nothing is normalized, so "Yes" scores 0 against ten times "yes". `token_max` is the ReVisiT paper's rule. They are
different metrics and never replace each other. Data: the official v2 questions and annotations, COCO val2014 images.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores
from revisit.eval.benchmarks.io import packaged
from revisit.io import records

QUESTIONS = "v2_OpenEnded_mscoco_val2014_questions.json"
ANNOTATIONS = "v2_mscoco_val2014_annotations.json"
SUFFIXES = {"none": "", "short": "\nAnswer the question using a single word or phrase."}

# ----------------------------------------------------------------------------------------------- normalizing
# The tables have the content of those in vqaEval.py, in our form.

_PUNCTUATION = ';/[]"{}()=+\\_->' + "<@`,?!"
_COMMA_IN_NUMBER = re.compile(r"\d,\d")
_PERIOD = re.compile(r"\.(?!\d)")
_PERIODS_REMOVED = 32  # the official call passes a flag constant of this value as the number of replacements
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {"none": "0"} | {word: str(n) for n, word in enumerate(_NUMBER_WORDS)}
_ARTICLES = {"a", "an", "the"}

# misspelling -> word with its apostrophes, and the irregular entries of the official table
CONTRACTIONS: dict[str, str] = json.loads(packaged("vqa_contractions.json"))


def one_line(text: str) -> str:
    """Replace newlines and tabs by blanks and strip the ends; applied to every answer and prediction."""
    return text.replace("\n", " ").replace("\t", " ").strip()


def strip_punctuation(text: str, period: re.Pattern[str] = _PERIOD) -> str:
    """Delete each symbol that has a blank next to it anywhere (or if there is a comma inside a number); replace it by a blank otherwise."""
    comma = _COMMA_IN_NUMBER.search(text) is not None
    out = text
    for symbol in _PUNCTUATION:
        delete = comma or f"{symbol} " in text or f" {symbol}" in text
        out = out.replace(symbol, "" if delete else " ")
    return period.sub("", out, count=_PERIODS_REMOVED)


def plain_words(text: str) -> str:
    """Lower the case, write number words as digits, drop articles and restore apostrophes."""
    words = (_NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in _ARTICLES)


@functools.cache  # the same answers occur many times
def normalize(text: str) -> str:
    """Apply the official processing of an answer: punctuation, then words."""
    return plain_words(strip_punctuation(text))


# -------------------------------------------------------------------------------------------------- accuracy


def ten_fold(matches: Sequence[bool]) -> float:
    """Return the mean over annotators of min(1, matches among the others / 3)."""
    total = sum(matches)
    return sum(min(1.0, (total - match) / 3) for match in matches) / len(matches)


def official_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Return the official accuracy of one prediction, between 0 and 1; texts are normalized only if the answers differ."""
    predicted, truths = one_line(prediction), [one_line(answer) for answer in answers]
    if len(set(truths)) > 1:
        predicted, truths = normalize(predicted), [normalize(truth) for truth in truths]
    return ten_fold([truth == predicted for truth in truths])


def token_max(prediction: str, answers: Sequence[str]) -> float:
    """Apply the paper's rule: the best min(1, matches / 3) of any single whitespace token of the prediction."""
    matches = Counter(normalize(one_line(answer)) for answer in answers)
    return max((min(1.0, matches[normalize(token)] / 3) for token in prediction.split()), default=0.0)


def score_answers(rows: Iterable[tuple[str, str, Sequence[str], str, str]]) -> Scores:
    """Apply both rules to (unit, prediction, ten answers, answer type, question type) rows; percent, unrounded."""
    points: dict[str, dict[str, float]] = {"accuracy": {}, "token_max": {}}
    for unit, prediction, answers, answer_type, question_type in rows:
        accuracy = official_accuracy(prediction, answers)
        points["token_max"][unit] = token_max(prediction, answers)
        for name in ("", f"answer_type/{answer_type}/", f"question_type/{question_type}/"):
            points.setdefault(f"{name}accuracy", {})[unit] = accuracy
    # Summed before the conversion to percent, as in the official code: this decides ties of the last printed digit.
    metrics = {name: 100 * sum(units.values()) / len(units) for name, units in points.items() if units}
    per_item = {name: {unit: (100 * value, 1.0) for unit, value in units.items()} for name, units in points.items()}
    return Scores(metrics, per_item, {"questions": float(len(points["accuracy"]))})


# ------------------------------------------------------------------------------------------------- benchmark


def read_list(path: Path, name: str) -> list[records.Record]:
    """Return the objects of the list `name` of an official file."""
    rows = records.record(records.read_json(path), str(path)).need_list(name)
    return [records.record(row, f"{path} {name} entry {number}") for number, row in enumerate(rows, 1)]


class VQAv2(Benchmark):
    """VQAv2: short answers, compared with those of ten people.

    Args:
        suffix: "short" adds a request for a word or phrase (LLaVA's evaluation), "none" is the question alone.
    """

    suffix: Literal["none", "short"] = "short"

    name = "vqav2"
    version: ClassVar[str] = "vqav2-official10+tokenmax-1"
    max_new_tokens = 16
    headline = "accuracy"
    metrics = (
        Metric("accuracy", "higher", 1, 2),
        Metric("token_max", "higher", 1, 2),
    )

    def load(self, data_dir: Path) -> list[Item]:
        questions, annotations = self.files(data_dir)
        truth = {row.need("question_id"): row for row in read_list(annotations, "annotations")}
        items = []
        for row in read_list(questions, "questions"):
            number = row.need("question_id")
            image = data_dir / "val2014" / f"COCO_val2014_{row.need_int('image_id'):012d}.jpg"
            if not image.exists() and image.with_suffix(".png").exists():  # generated scenes are PNG
                image = image.with_suffix(".png")
            prompt = row.need_text("question") + SUFFIXES[self.suffix]
            note = truth[number]
            answers = [records.record(a, note.where).need_text("answer") for a in note.need_list("answers")]
            types = tuple(note.get(f"{kind}_type", "unknown") for kind in ("answer", "question"))
            items.append(Item(str(number), prompt, (image,), {"answers": answers, "types": types}))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        return score_answers((i.id, answers[i.id], i.meta["answers"], *i.meta["types"]) for i in items)
