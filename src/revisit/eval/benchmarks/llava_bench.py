"""LLaVA-Bench-in-the-Wild: 60 open questions about 24 images, judged against GPT-4's answers.

Without a judge only the length of the answers is reported. A judge (any OpenAI-compatible endpoint) gives both answers a mark,
and the score is 100 x mean of ours / mean of the reference. The judge's instructions are worded by us and ask for the same
thing as the official ones, so numbers are comparable with each other, not digit by digit with published ones. Data:
questions.jsonl, context.jsonl, answers_gpt4.jsonl and images/ (liuhaotian/llava-bench-in-the-wild).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import Item, Metric, Scores
from revisit.eval.benchmarks.judged import Judged
from revisit.io import records

# The focus of the official rules in each category, in our words.
EMPHASIS = {
    "conv": "whether the answer is right, to the point and helpful",
    "detail": "whether the description is accurate and detailed, with places, counts and relations of what is seen",
    "complex": "whether the reasoning is sound, complete and grounded in what is seen",
}


def parse_marks(reply: str) -> tuple[float, float]:
    """Parse the two marks in the first line; (-1, -1) if it is not exactly two numbers, as published."""
    try:
        first, second = map(float, reply.split("\n")[0].replace(",", " ").split(" "))
        return first, second
    except ValueError:
        return -1.0, -1.0


def relative(marks: Iterable[tuple[float, float]]) -> float:
    """Compute 100 x mean second / mean first, the means rounded to three decimals first, as published."""
    marks = list(marks)
    first, second = (round(sum(pair[i] for pair in marks) / len(marks), 3) for i in (0, 1))
    return second / first * 100 if first else float("nan")


def score_marks(rows: Iterable[tuple[str, str, tuple[float, float]]]) -> Scores:
    """Compute the relative score over all and per category, from (unit, category, (reference mark, our mark)) rows."""
    rows = list(rows)
    metrics, per_item = {}, {}
    for category in ("all", *sorted({category for _, category, _ in rows})):
        part = {unit: marks for unit, kind, marks in rows if category in ("all", kind)}
        metrics[category] = relative(part.values())
        per_item[category] = {unit: (100 * second, first) for unit, (first, second) in part.items()}
    bad = sum(marks == (-1, -1) for _, _, marks in rows)
    notes = (f"{bad} replies of the judge could not be read and count as -1 to -1.",) if bad else ()
    return Scores(metrics, per_item, {"answers": float(len(rows)), "unread_replies": float(bad)}, notes)


class LlavaBench(Judged):
    """LLaVA-Bench-in-the-Wild; without a judge only the length of the answers is reported."""

    name = "llava_bench"
    system = "You grade answers carefully and fairly."
    max_new_tokens = 1024
    headline = "all"
    metrics = (
        *(Metric(name, "higher", 1, 1) for name in ("all", "conv", "detail", "complex")),
        Metric("words", None, 1, 1),
    )

    def load(self, data_dir: Path) -> list[Item]:
        questions, context, reference = map(records.read_records, self.files(data_dir))
        captions = {row.need("image"): row.need("caption") for row in context}
        answers = {row.need("question_id"): row.need("text") for row in reference}
        items = []
        for row in questions:
            image, number = row.need_text("image"), row.need("question_id")
            meta = {
                "category": row.need_choice("category", EMPHASIS),
                "emphasis": EMPHASIS[row["category"]],
                "context": captions[image],
                "reference": answers[number],
            }
            path = records.find_image(self.home(data_dir), image, "images", ".")
            items.append(Item(str(number), row.need_text("text"), (path,), meta))
        return items

    def score_replies(self, items: list[Item], replies: Mapping[str, str]) -> Scores:
        return score_marks((item.id, item.meta["category"], parse_marks(replies[item.id])) for item in items)
