"""MMMU: college exam questions, 30 subjects, multiple choice or a short answer.

Parsing follows MMMU's eval_utils.py, including its seeded guess for answers that cannot be parsed. `micro` is the official
item-weighted accuracy, `macro` the ReVisiT paper's mean over subjects; they differ once items are filtered. Data: the
Hub dataset MMMU/MMMU as mmmu/questions.jsonl (`revisit data get mmmu`).
"""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark, HubDataset, Item, Metric, Scores, ratio
from revisit.eval.benchmarks.io import packaged
from revisit.eval.benchmarks.io.data import Draft
from revisit.io import records
from revisit.io.records import Record

CHOICE_REQUEST = "Answer with the option's letter from the given choices directly."
OPEN_REQUEST = "Answer the question using a single word or phrase."

# From MMMU's data_utils.py: domain -> subjects in the official order.
DOMAINS: dict[str, list[str]] = json.loads(packaged("mmmu_subjects.json"))
# The order in which the official script scores, on which the seeded guesses depend: alphabetical.
SUBJECTS = tuple(sorted(subject for subjects in DOMAINS.values() for subject in subjects))

Guess = Callable[[Sequence[str]], str]


def seeded_guess() -> Guess:
    """Return the official guess: Python's generator seeded 42 once, one draw per answer that cannot be parsed, in order."""
    return random.Random(42).choice


# ------------------------------------------------------------------------------------------- multiple choice


def read_choice(response: str, options: Mapping[str, str]) -> str | None:
    """Parse a multiple-choice response by the official rule; None where the official script guesses.

    The last option that is mentioned counts: as "(A)", else as " A ", else by its text in a response of more than five words.
    """
    for symbol in ",.!?;:'":
        response = response.strip(symbol)
    text = f" {response} "
    for form in ("({})", " {} "):
        if letter := _last({letter: text.rfind(form.format(letter)) for letter in options}):
            return letter
    if len(text.split()) <= 5:
        return None
    return _last({letter: text.lower().rfind(option.lower()) for letter, option in options.items()})


def _last(positions: Mapping[str, int]) -> str | None:
    """Return the letter with the last position, the first one of a tie; None if all are -1."""
    letter = max(positions, key=positions.__getitem__)
    return letter if positions[letter] >= 0 else None


# ---------------------------------------------------------------------------------------------- open answers

_GROUPED = re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b")
_SCIENTIFIC = re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+")
_SIMPLE = re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])")
_INDICATORS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")


def numbers_in(text: str) -> list[str]:
    """Find all numbers in `text`: with grouping commas, in scientific notation, and plain; one may be found twice."""
    return [match for pattern in (_GROUPED, _SCIENTIFIC, _SIMPLE) for match in pattern.findall(text)]


def normalize(text: str) -> list[str | float]:
    """Round a number to two decimals, or lower the case of a text; one character gets a blank on each side."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]


def key_parts(response: str) -> list[str]:
    """Return the ends of the response's lines that are likely to contain the answer, or else the whole response."""
    response = response.strip().strip(".").lower()
    lines = response.split("\n")
    parts = []
    for number, line in enumerate(lines, 1):
        indicators = (*_INDICATORS, "=") if number == len(lines) else _INDICATORS
        shortest = ""
        for tail in (line.split(word)[-1].strip() for word in indicators if word in line):
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest and shortest not in tuple(":,.!?;'"):
            parts.append(shortest)
    return parts or [response]


def parse_open(response: str) -> set[str | float]:
    """Return all readings of an open response that may count as its answer."""
    parts = key_parts(response)
    texts = parts + [number for part in parts for number in numbers_in(part)]
    return {reading for text in texts for reading in normalize(text)}


def open_is_correct(gold: str | Sequence[str], readings: Iterable[str | float]) -> bool:
    """Return whether a reading contains a gold text or equals a gold number."""
    golds = [n for answer in ([gold] if isinstance(gold, str) else gold) for n in normalize(answer)]
    strings = [g for g in golds if isinstance(g, str)]
    for reading in readings:
        if isinstance(reading, str) and any(g in reading for g in strings):
            return True
        if not isinstance(reading, str) and reading in golds:
            return True
    return False


# --------------------------------------------------------------------------------------------------- scoring


@dataclass(frozen=True)
class Question:
    """A question as scoring needs it; `options` (letter -> text) is empty if it is open, and any of `golds` is right."""

    id: str
    subject: str
    golds: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)

    def is_correct(self, response: str, guess: Guess) -> bool:
        """Return whether `response` is right; draw from `guess` if it cannot be parsed."""
        if self.options:
            return (read_choice(response, self.options) or guess(list(self.options))) in self.golds
        return open_is_correct(self.golds, parse_open(response))


def score_responses(questions: Iterable[Question], responses: Mapping[str, str]) -> Scores:
    """Compute the accuracies; seeded guesses are drawn in the official order, unknown subjects last."""
    guess = seeded_guess()
    rank = {subject: n for n, subject in enumerate(SUBJECTS)}
    ordered = sorted(questions, key=lambda q: rank.get(q.subject, len(rank)))
    right = {q.id: float(q.is_correct(responses[q.id], guess)) for q in ordered}
    sizes = Counter(q.subject for q in ordered)
    weight = {q.id: 1 / (sizes[q.subject] * len(sizes)) for q in ordered}
    per_item = {
        "micro": {i: (r, 1.0) for i, r in right.items()},
        "macro": {i: (r * weight[i], weight[i]) for i, r in right.items()},
    }
    # By the official formulas, and in the official order, whose rounding decides ties of the last printed digit.
    subjects = {s: ratio((right[q.id], 1.0) for q in ordered if q.subject == s) for s in sizes}
    metrics = {"micro": _pooled(subjects, sizes), "macro": sum(subjects.values()) / len(subjects)}
    for group, members in {**DOMAINS, **{s: (s,) for s in sizes}}.items():
        known = {s: subjects[s] for s in members if s in subjects}
        if known:
            per_item[f"{group}/accuracy"] = {q.id: (right[q.id], 1.0) for q in ordered if q.subject in members}
            metrics[f"{group}/accuracy"] = _pooled(known, sizes) if group in DOMAINS else known[group]
    counts = {"questions": float(len(right)), "correct": sum(right.values()), "subjects": float(len(sizes))}
    unread = sum(bool(q.options) and read_choice(responses[q.id], q.options) is None for q in ordered)
    note = f"{unread} multiple-choice responses could not be read and were guessed with seed 42."
    return Scores(metrics, per_item, counts, (note,) if unread else ())


def _pooled(accuracies: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """Return the mean accuracy of some subjects, weighted by their sizes."""
    return sum(accuracy * sizes[s] for s, accuracy in accuracies.items()) / sum(sizes[s] for s in accuracies)


def question(row: Record) -> Question:
    """Read the question in a row of the dataset; ids look like validation_Art_Theory_12."""
    item_id, answer = str(row.need("id")), str(row.need("answer"))
    subject = "_".join(item_id.split("_")[1:-1])
    if row.need("question_type") != "multiple-choice":
        return Question(item_id, subject, tuple(_texts(answer) or [answer]))
    options = _texts(row.need("options"))
    if not options:
        raise RevisitError(f"{row.where}: 'options' must be a list of texts, not {row['options']!r}.")
    return Question(item_id, subject, (answer,), {chr(ord("A") + n): text for n, text in enumerate(options)})


def _texts(value: object) -> list[str] | None:
    """Parse a list of texts, which the Hub dataset stores as the text of a Python list; None if it is something else."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            return None
    return value if isinstance(value, list) and all(isinstance(one, str) for one in value) else None


def prompt(text: str, options: Mapping[str, str]) -> str:
    """Return the official prompt; <image n> tags stay in the text."""
    if not options:
        return f"{text}\n{OPEN_REQUEST}"
    lines = "".join(f"({letter}) {option}\n" for letter, option in options.items())
    return f"{text}\n{lines}\n{CHOICE_REQUEST}"


# ------------------------------------------------------------------------------------------------- benchmark


class MMMU(Benchmark):
    """MMMU: college-level questions, multiple choice and open.

    Args:
        keep: "all" (the official 900), or "single-image" (the paper's 857: no question with several images).
    """

    keep: Literal["all", "single-image"] = "all"

    name = "mmmu"
    hub = HubDataset(("MMMU/MMMU",), ("validation",), configs=SUBJECTS)
    max_new_tokens = 128
    headline = "micro"
    metrics = (
        Metric("micro", "higher", 100, 1, rounded=3),
        Metric("macro", "higher", 100, 1, rounded=3),
        Metric("accuracy", "higher", 100, 1, rounded=3),
    )

    @property
    def version(self) -> str:
        return f"mmmu-official-{self.keep}-1"

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write one line per question, with its images among image_1 to image_7."""
        for row in rows:
            held = {n: row[f"image_{n}"] for n in range(1, 8) if any((row.get(f"image_{n}") or {}).values())}
            images = [out.image(f"mmmu/images/{row['id']}_{n}", image, row.where) for n, image in held.items()]
            entry = {k: row[k] for k in ("id", "question", "options", "answer", "question_type")}
            out.add("mmmu/questions.jsonl", entry | {"images": images})

    def load(self, data_dir: Path) -> list[Item]:
        rows = records.read_records(self.files(data_dir)[0])
        if self.keep == "single-image":
            rows = [row for row in rows if len(row.need("images")) == 1]
        items = []
        for row in rows:
            parsed = question(row)
            images = tuple(records.find_image(data_dir, name, ".", "mmmu") for name in row.need("images"))
            items.append(Item(parsed.id, prompt(row.need("question"), parsed.options), images, {"question": parsed}))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        return score_responses((item.meta["question"] for item in items), answers)
