"""Your own questions and captions from a file: `yesno:FILE`, `choice:FILE` and `captions:FILE`.

A file is JSON lines, a JSON array, or a .csv, .tsv or .parquet table. A row has an image, a question and a label, under the names that
files of vision-language models use, and is identified by its `id`, or else by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from revisit.errors import RevisitError, listed
from revisit.eval.benchmarks import chair, language, mmmu
from revisit.eval.benchmarks.base import Item, Metric, Scores
from revisit.eval.benchmarks.videos import VideoBenchmark
from revisit.eval.benchmarks.yes_no import SUFFIXES, Parser, YesNo, score_answers
from revisit.io.finder import ImageFinder
from revisit.io.records import YES_NO, Fields, Record, read_list, read_records
from revisit.words import WORDS

IDS = ("id", "question_id", "index", "doc_id")
QUESTIONS = ("question", "text", "prompt", "query")
LABELS = ("label", "answer", "gt_answer", "ground_truth", "target", "objects", "references", "captions", "caption")
OPTIONS = ("options", "choices")
LETTERS = "ABCDEFGHIJ"


class Own(VideoBenchmark):
    """A file of items; subclasses read their labels and score answers.

    Args:
        file: The file.
        frames: How many frames to take from each video, evenly spaced; 8 by default.
        fps: How many frames to take per second, instead of `frames`.
    """

    file: str = ""

    source = "your own file"
    license = "your own"
    question: ClassVar[str] = ""  # for rows without one

    @property
    def default_data(self) -> str:
        return str(Path(self.file).expanduser().absolute().parent)

    def files(self, data_dir: Path) -> list[Path]:
        if not self.file:
            raise RevisitError(f"{self.title} needs a file: write {self.name}:questions.jsonl.")
        return [Path(self.file).expanduser()]

    def load(self, data_dir: Path) -> list[Item]:
        finder, items = ImageFinder(data_dir), []
        for number, row in enumerate(read_records(self.files(data_dir)[0]), 1):
            id = str(_first(row, IDS, number))
            try:
                items.append(self.row_item(row, id, finder))
            except RevisitError as error:  # the other rows are complete
                items.append(Item(id, "", error=str(error)))
        if items and all(item.error for item in items):
            raise RevisitError(items[0].error)
        return items

    def row_item(self, row: Record, id: str, finder: ImageFinder) -> Item:
        """Return the item of a row."""
        turns = row.get("conversations")  # of LLaVA's files: the user's turn, then the model's
        if isinstance(turns, list) and len(turns) > 1 and all(isinstance(turn, Mapping) for turn in turns):
            row = Record({"question": turns[0].get("value"), "label": turns[1].get("value"), **row}, row.where)
        question = _first(row, QUESTIONS, self.question)
        if not isinstance(question, str) or not question.strip():
            raise RevisitError(f"{row.where} has no question ({', '.join(QUESTIONS)}); it has: {listed(row)}.")
        label = _first(row, LABELS)
        if label is None:
            raise RevisitError(f"{row.where} has no label ({', '.join(LABELS)}); it has: {listed(row)}.")
        question = question.replace("<image>", "").replace("<video>", "").strip()
        prompt, meta = self.labelled(question, label, row)
        return self.item(id, prompt, meta, *finder.find(row))

    def labelled(self, question: str, label: object, row: Record) -> tuple[str, Fields]:
        """Return the prompt, and what scoring needs."""
        raise NotImplementedError  # every kind of file defines it


class OwnYesNo(Own):
    """Your own yes/no questions: `yesno:FILE`, with labels such as yes, no, true or 0.

    Args:
        parser: The rule that parses answers.
        suffix: "none" is the question alone, "one-word" adds a request for a single word.
    """

    parser: Parser = "official"
    suffix: Literal["none", "one-word"] = "none"

    name = "yesno"
    rule_options = ("parser",)
    max_new_tokens = 64
    headline = "accuracy"
    metrics = YesNo.metrics

    def labelled(self, question: str, label: object, row: Record) -> tuple[str, Fields]:
        text = str(label).strip().rstrip(".").lower()
        if text not in YES_NO:
            raise RevisitError(f"{row.where}: the label must be yes or no, not {str(label)[:80]!r}.")
        return question + SUFFIXES[self.suffix], {"label": YES_NO[text]}

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        return score_answers(((item.id, answers[item.id], item.meta["label"]) for item in items), self.parser)


class OwnChoice(Own):
    """Your own multiple-choice questions: `choice:FILE`, with `options` or columns A, B, …, and a letter or a text as the label."""

    name = "choice"
    max_new_tokens = 64
    headline = "accuracy"
    metrics = (Metric("accuracy", "higher", 100, 2), Metric("words", None, 1, 1))

    def labelled(self, question: str, label: object, row: Record) -> tuple[str, Fields]:
        options = _options(row)
        by_text = {text.strip().lower(): letter for letter, text in options.items()}
        answer = str(label).strip().strip("().")
        letter = answer.upper() if answer.upper() in options else by_text.get(str(label).strip().lower())
        if letter is None:
            raise RevisitError(
                f"{row.where}: the label {str(label)[:80]!r} is none of its options ({listed(options)})."
            )
        return mmmu.prompt(question, options), {"label": letter, "options": options}

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        read = {item.id: mmmu.read_choice(answers[item.id], item.meta["options"]) for item in items}
        right = {item.id: (float(read[item.id] == item.meta["label"]), 1.0) for item in items}
        unread = sum(letter is None for letter in read.values())
        counts = {"questions": len(items), "right": sum(n for n, _ in right.values()), "unread": unread}
        note = f"{unread} answers name no option and count as wrong."
        return Scores.of({"accuracy": right}, counts, (note,) if unread else ())


class OwnCaptions(Own):
    """Your own images: `captions:FILE`; labels are the objects in the image, or reference captions. Scored like CHAIR."""

    name = "captions"
    needs_nltk = True
    max_new_tokens = 512
    headline = "CHAIRs"
    metrics = chair.Chair.metrics
    question = chair.PROMPT

    @property
    def version(self) -> str:
        return chair.Chair().version.replace("chair", "captions")

    def labelled(self, question: str, label: object, row: Record) -> tuple[str, Fields]:
        names = [str(name).strip().lower() for name in read_list(label)]
        if len(names) == 1 and names[0] not in WORDS:  # a list in one cell, or one caption
            parts = [part.strip() for part in names[0].replace(";", ",").split(",")]
            names = parts if all(part in WORDS for part in parts) else names
        truth = {WORDS.get(name, name) for name in names if name in WORDS or " " not in name}
        for caption in (name for name in names if name not in WORDS and " " in name):
            truth.update(chair.parse_caption(caption).nodes)
        return question, {"ground_truth": sorted(truth)}

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        scores = chair.score_captions((item.id, answers[item.id], item.meta["ground_truth"]) for item in items)
        return replace(scores, notes=(*scores.notes, language.version()))


def _first(row: Record, names: tuple[str, ...], default: object = None) -> Any:
    """Return the first of these fields that the row has."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), default)


def _options(row: Record) -> dict[str, str]:
    """Return letter -> text."""
    value = _first(row, OPTIONS)
    if isinstance(value, Mapping):
        return {str(letter).upper(): str(text) for letter, text in value.items()}
    if value is not None:
        return dict(zip(LETTERS, map(str, read_list(value)), strict=False))
    options = {letter: str(row[letter]) for letter in LETTERS if row.get(letter) not in (None, "")}
    if len(options) < 2:
        raise RevisitError(
            f"{row.where} has no options ({', '.join(OPTIONS)}, or columns A, B, …); it has: {listed(row)}."
        )
    return options
