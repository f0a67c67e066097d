"""MMVP: 300 questions with two options about 150 pairs of images that CLIP cannot tell apart; a pair counts if both are right.

The published grader is GPT-4, which replies yes or no to each answer (`judge=model`, or `judge=reviews` for its replies; the prompt is
ours). Without a judge, a rule of ours finds the option that an answer names; the version of such scores is `mmvp-none-1`. Data:
Questions.csv and the folder `MMVP Images` (Hub dataset MMVP/MMVP).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric, Scores
from revisit.eval.benchmarks.judged import Judged
from revisit.io import records

IMAGES = "MMVP Images"


def read_options(text: str) -> dict[str, str]:
    """Parse options by letter: "(a) Open (b) Closed" -> {"a": "open", "b": "closed"}."""
    parts = re.split(r"\(([ab])\)", text.lower())
    return {letter: option.strip(" .") for letter, option in zip(parts[1::2], parts[2::2], strict=True)}


def parse_letter(answer: str, options: Mapping[str, str]) -> str:
    """Return the option that an answer names: "(a)", a lone "A", or the words of just one option; empty if none."""
    lower = answer.lower()
    named = re.search(r"\(([ab])\)", lower) or re.match(r"\W*([ab])(?:\W*$|\s*[.):,])", lower)
    if named:
        return named[1]
    written = [letter for letter, option in options.items() if re.search(rf"\b{re.escape(option)}\b", lower)]
    return written[0] if len(written) == 1 else ""


def parse_verdict(reply: str) -> bool:
    """Return whether a judge's reply is the word yes and nothing else, as published."""
    return reply.lower() == "yes"


def score_pairs(rows: Iterable[tuple[str, bool]]) -> Scores:
    """Compute the accuracy of pairs and of questions, from (unit, right) rows; questions 2k−1 and 2k form a pair.

    An incomplete pair is left out, as published.
    """
    right = dict(rows)
    pairs: dict[int, list[str]] = {}
    for unit in right:
        pairs.setdefault((int(unit) - 1) // 2, []).append(unit)
    whole = {f"pair {number + 1}": units for number, units in pairs.items() if len(units) == 2}
    if not whole:
        raise RevisitError("MMVP scores pairs, and no pair is complete: score an even number of items.")
    per_item = {
        "pairs": {name: (float(all(right[unit] for unit in units)), 1.0) for name, units in whole.items()},
        "accuracy": {unit: (float(right[unit]), 1.0) for units in whole.values() for unit in units},
    }
    return Scores.of(per_item, {"pairs": len(whole), "left_out": len(right) - 2 * len(whole)})


class MMVP(Judged):
    """MMVP; with `judge=none` the option that an answer names decides."""

    name = "mmvp"
    system = "You check answers with care. Reply with one word, yes or no."
    max_new_tokens = 128
    headline = "pairs"
    metrics = (Metric("pairs", "higher", 100, 1), Metric("accuracy", "higher", 100, 1))

    def load(self, data_dir: Path) -> list[Item]:
        (path,) = self.files(data_dir)
        items = []
        for number, row in enumerate(records.read_records(path), 1):
            options = row.need_text("Options")
            meta = {"options": read_options(options), "answer": row.need_text("Correct Answer")}
            image = records.find_image(path.parent, f"{number}.jpg", IMAGES, "images")
            items.append(Item(str(number), f"{row.need_text('Question')} {options}", (image,), meta))
        return items

    def score_replies(self, items: list[Item], replies: Mapping[str, str]) -> Scores:
        return score_pairs((item.id, parse_verdict(replies[item.id])) for item in items)

    def score_unjudged(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        named = ((item, parse_letter(answers[item.id], item.meta["options"])) for item in items)
        return score_pairs((item.id, f"({letter})" == item.meta["answer"].strip().lower()) for item, letter in named)
