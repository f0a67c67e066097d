"""MME: two yes/no questions per image in 14 categories; a category's score is acc + acc_plus, 200 at best.

`acc_plus` counts an image only if both its questions are right. Parsing follows MME's calculation.py: the first four
characters decide. Data: MME_Benchmark_release_version, one folder per category (BradyFU's MME, on request from its
authors).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, get_args

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Benchmark, Item, Metric, PerUnit, Scores, ratio
from revisit.eval.benchmarks.io.data import Draft
from revisit.io import records
from revisit.io.records import Record

Hallucination = Literal["existence", "count", "position", "color"]  # the four that hallucination papers report
Perception = Literal[Hallucination, "posters", "celebrity", "scene", "landmark", "artwork", "OCR"]
Cognition = Literal["commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning"]
HALLUCINATION, PERCEPTION, COGNITION = get_args(Hallucination), get_args(Perception), get_args(Cognition)


def parse(text: str) -> str:
    """Return "yes" or "no" if the first four characters contain it (yes first), else "other"."""
    start = text.lower()[:4]
    return "yes" if "yes" in start else "no" if "no" in start else "other"


def score_answers(rows: Iterable[tuple[str, str, str, str]]) -> Scores:
    """Compute the scores from (category, image, answer, gold) rows; images without two questions are left out."""
    marked: dict[tuple[str, str], list[float]] = {}
    for category, image, answer, gold in rows:
        marked.setdefault((category, image), []).append(float(parse(answer) == gold.lower().strip()))
    images: dict[str, dict[str, list[float]]] = {}
    for (category, image), marks in marked.items():
        if len(marks) == 2:
            images.setdefault(category, {})[image] = marks
    if not images:
        category, image = next(iter(marked))
        raise RevisitError(f"MME needs two questions per image; {category}/{image} has {len(marked[category, image])}.")
    per_item: dict[str, PerUnit] = {"acc": {}, "acc_plus": {}}
    for category, group in images.items():
        acc = {f"{category}/{p}": (50 * sum(marks), 1.0) for p, marks in group.items()}
        plus = {f"{category}/{p}": (100.0 * (sum(marks) == 2), 1.0) for p, marks in group.items()}
        per_item["acc"] |= acc
        per_item["acc_plus"] |= plus
        per_item[f"{category}/acc"], per_item[f"{category}/acc_plus"] = acc, plus
        per_item[f"{category}/score"] = {p: (acc[p][0] + plus[p][0], 1.0) for p in acc}
    metrics = {name: ratio(units.values()) for name, units in per_item.items()}
    totals = {}
    for total, names in (("perception", PERCEPTION), ("cognition", COGNITION), ("hallucination", HALLUCINATION)):
        if any(name in images for name in names):
            totals[total] = sum(metrics[f"{name}/score"] for name in names if name in images)
    missing = [name for name in PERCEPTION + COGNITION if name not in images]
    notes = (f"Totals are over the categories that are present; missing: {', '.join(missing)}.",) if missing else ()
    return Scores(
        totals | metrics,
        per_item,
        {"images": float(len(per_item["acc"])), "left_out": float(len(marked) - len(per_item["acc"]))},
        notes,
    )


class MME(Benchmark):
    """MME: pairs of yes/no questions in fourteen categories.

    Args:
        categories: The categories to use, such as "existence,count,position,color"; by default all whose files are in the folder.
    """

    categories: tuple[Perception | Cognition, ...] = ()

    name = "mme"
    version: ClassVar[str] = "mme-official-1"
    max_new_tokens = 16
    headline = "acc_plus"
    metrics = tuple(
        Metric(name, "higher", 1, 2)
        for name in ("acc", "acc_plus", "score", "perception", "cognition", "hallucination")
    )

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write a text file with both questions of each image; an image whose second question is cut off is left out."""
        waiting: dict[str, str] = {}  # path of the image -> its first question
        for row in rows:
            category = row.need_choice("category", PERCEPTION + COGNITION, lower=False)
            question, gold = str(row["question"]).strip(), row.need_choice("answer", ("yes", "no"))
            path = f"mme/{category}/{Path(str(row['question_id'])).stem}"
            line = f"{question}\t{gold.capitalize()}\n"
            if path in waiting:
                out.image(path, row["image"], row.where)
                out.text(f"{path}.txt", waiting.pop(path) + line)
            else:
                waiting[path] = line
        if waiting and not out.images:
            raise RevisitError(
                "MME asks two questions per image, and these rows contain no complete pair; raise --limit."
            )

    def files(self, data_dir: Path) -> list[Path]:
        """Return the question files: `<category>/questions_answers_YN/*.txt` or `<category>/*.txt`."""
        folder = records.folder(data_dir, "mme")
        files = [
            path
            for category in self.categories or PERCEPTION + COGNITION
            for path in sorted((folder / category).glob("questions_answers_YN/*.txt"))
            or sorted((folder / category).glob("*.txt"))
        ]
        if not files:
            raise RevisitError(f"MME's category folders not found: put them in {folder}; they come from {self.source}.")
        return files

    def load(self, data_dir: Path) -> list[Item]:
        folder = records.folder(data_dir, "mme")
        items = []
        for path in self.files(data_dir):
            category = path.relative_to(folder).parts[0]
            folders = (folder / category / "images", folder / category)
            images = [file for home in folders for file in sorted(home.glob(f"{path.stem}.*")) if file.suffix != ".txt"]
            image = images[0] if images else folders[0] / f"{path.stem}.jpg"
            for number, line in enumerate(filter(str.strip, records.read_text(path).split("\n")), 1):
                question, _, gold = line.strip().rpartition("\t")
                if gold.lower() not in ("yes", "no"):
                    raise RevisitError(f"{path} line {number} is not 'question <tab> Yes or No'.")
                meta = {"category": category, "image": path.stem, "gold": gold}
                items.append(Item(f"{category}/{path.stem}/{number}", question, (image,), meta))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        metas = ((item.id, item.meta) for item in items)
        return score_answers((m["category"], m["image"], answers[name], m["gold"]) for name, m in metas)
