"""MMHal-Bench: 96 open questions of eight kinds, whose answers a judge rates from 0 to 6.

A rating below 3 means that the answer hallucinates. The rule is that of RLHF-V's eval/ (LLaVA-RLHF's before): a reply with no
rating, or several, counts as 0. The judge's instructions are worded by us and ask for the same thing as the published ones, so
numbers are comparable with each other, not digit by digit with published ones. Data: mmhal-bench_answer_template.json
(RLHF-V/RLHF-V), which has the URL of each image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from revisit.eval.benchmarks.base import Item, Metric, PerUnit, Scores
from revisit.eval.benchmarks.judged import Judged
from revisit.io import records

KINDS = ("attribute", "adversarial", "comparison", "counting", "relation", "environment", "holistic", "other")
RATINGS = range(6, -1, -1)  # data/mmhal_judge.txt describes them


def parse_rating(reply: str) -> int | None:
    """Parse the rating in a judge's reply; None if there is none or more than one."""
    found = [rating for rating in RATINGS if f"rating: {rating}" in reply.lower()]
    return found[0] if len(found) == 1 else None


def score_ratings(rows: Iterable[tuple[str, str, int | None]]) -> Scores:
    """Compute mean rating, share of hallucinated answers and informativeness in percent, from (unit, kind, rating) rows."""
    rows = list(rows)
    ratings = [(unit, kind, rating or 0) for unit, kind, rating in rows]  # unread counts as 0
    per_item: dict[str, PerUnit] = {
        "score": {unit: (float(rating), 1.0) for unit, _, rating in ratings},
        "hallucination": {unit: (float(rating < 3), 1.0) for unit, _, rating in ratings},
        "informativeness": {unit: (100 * (rating - 3 * (rating >= 3)) / 3, 1.0) for unit, _, rating in ratings},
    }
    for kind in sorted({kind for _, kind, _ in rows}):
        per_item[f"{kind}/score"] = {unit: (float(rating), 1.0) for unit, other, rating in ratings if other == kind}
    bad = sum(rating is None for _, _, rating in rows)
    notes = (f"{bad} replies of the judge have no rating or several; they count as 0.",) if bad else ()
    return Scores.of(per_item, {"answers": len(rows), "unread_replies": bad}, notes)


class MMHal(Judged):
    """MMHal-Bench; without a judge only the length of the answers is reported."""

    name = "mmhal"
    temperature = 0.0
    max_new_tokens = 512
    headline = "score"
    metrics = (
        Metric("score", "higher", 1, 2),
        Metric("hallucination", "lower", 1, 2),
        Metric("informativeness", "higher", 1, 2),
        Metric("words", None, 1, 1),
    )

    def load(self, data_dir: Path) -> list[Item]:
        (path,) = self.files(data_dir)
        items = []
        for row in records.read_records(path):
            name = row.need_text("image_id")
            image = records.find_image(path.parent, f"{name}.jpg", "images", ".")
            meta = {
                "kind": row.need_choice("question_type", KINDS),
                "contents": ", ".join(row.need_list("image_content")),
                "reference": row.need_text("gt_answer"),
                "url": row.need_text("image_src"),
            }
            items.append(Item(name, row.need_text("question"), (image,), meta))
        return items

    def image_urls(self, image: Path, item: Item) -> tuple[str, ...]:
        return (item.meta["url"],)

    def score_replies(self, items: list[Item], replies: Mapping[str, str]) -> Scores:
        return score_ratings((item.id, item.meta["kind"], parse_rating(replies[item.id])) for item in items)
