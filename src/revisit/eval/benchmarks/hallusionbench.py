"""HallusionBench: yes/no questions about figures and edited figures, scored in groups.

Every answer gets a label: "1" correct, "0" incorrect, "2" unclear. By default a rule sets it (VLMEvalKit's yes/no
extraction against the gold answer), which a note states; the official judge is a language model, which can be reached through
any OpenAI-compatible endpoint. The accuracies are computed from the labels as in the official code.
Data: HallusionBench.json and its figures (tianyi-lab/HallusionBench).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric, PerUnit, Scores, ratio
from revisit.eval.benchmarks.io.data import Draft
from revisit.eval.benchmarks.judged import Judged
from revisit.eval.benchmarks.yes_no import parse_vlmevalkit
from revisit.io import records
from revisit.io.records import AnswerRow, Record

Row = Mapping[str, Any]


def key(row: Row, *fields: str) -> str:
    """Join category, subcategory, set and the named ids like the official code."""
    return "_".join(str(row[name]) for name in ("category", "subcategory", "set_id", *fields))


def item_key(row: Row) -> str:
    """Return the name of one question about one figure."""
    return key(row, "figure_id", "question_id")


# ---------------------------------------------------------------------------------------------------- labels


def rule_label(prediction: str, gold: str | int) -> str:
    """Label a prediction by the rule; `gold` is 1 for yes and 0 for no."""
    answer = parse_vlmevalkit(prediction)
    if answer == "unknown":
        return "2"
    return "1" if (answer == "yes") == (str(gold) == "1") else "0"


def judge_label(reply: str) -> str:
    """Parse a judge's reply by the official rule; result files have the labels themselves."""
    lower = reply.lower().strip()
    return lower if lower in ("0", "1", "2") else "0" if "incorrect" in lower else "1" if "correct" in lower else "2"


# -------------------------------------------------------------------------------------------------- accuracies


def has_figure(row: Row) -> bool:
    """Return True if a question has a figure. The category VS also has questions without one, as figure 0."""
    return not (row["category"] == "VS" and int(row["figure_id"]) == 0)


def is_correct(row: Row, label: str) -> bool:
    """Return whether the label is 1; without a figure, an unclear answer counts as right too."""
    return int(label) == 1 or (not has_figure(row) and int(label) == 2)


def _groups(rows: Iterable[Row], right: Mapping[str, bool], *fields: str) -> PerUnit:
    """Return group name -> (100 if all its answers are right else 0, 1)."""
    groups: dict[str, bool] = {}
    for row in rows:
        name = key(row, *fields)
        groups[name] = groups.get(name, True) and right[item_key(row)]
    return {name: (100.0 * good, 1.0) for name, good in groups.items()}


def accuracies(rows: list[Row], right: Mapping[str, bool]) -> dict[str, PerUnit]:
    """Compute the terms of the five official accuracies, whose units are questions, groups or figures."""
    return {
        "qAcc": _groups(rows, right, "question_id"),
        "fAcc": _groups(filter(has_figure, rows), right, "figure_id"),
        "aAcc": {item_key(r): (100.0 * right[item_key(r)], 1.0) for r in rows},
        "easy_aAcc": _groups((r for r in rows if str(r["visual_input"]) != "2"), right, "question_id"),
        "hard_aAcc": _groups((r for r in rows if str(r["visual_input"]) == "2"), right, "question_id"),
    }


def figure_counts(rows: list[Row], right: Mapping[str, bool]) -> dict[str, float]:
    """Count figures that are right, wrong and in between, and the mean share of right answers per figure."""
    figures: dict[str, list[bool]] = {}
    for row in filter(has_figure, rows):
        figures.setdefault(key(row, "figure_id"), []).append(right[item_key(row)])
    good, bad = sum(all(f) for f in figures.values()), sum(not any(f) for f in figures.values())
    share = ratio((sum(f) / len(f), 1.0) for f in figures.values())
    return {"fig_correct": good, "fig_wrong": bad, "fig_inconsistent": len(figures) - good - bad, "fig_score": share}


def score_labels(rows: Iterable[Row], labels: Mapping[str, str], note: str = "") -> Scores:
    """Compute the accuracies in percent: over everything (the official leaderboard row), over VD and over VS."""
    rows = list(rows)
    right = {item_key(row): is_correct(row, str(labels[item_key(row)])) for row in rows}
    per_item: dict[str, PerUnit] = {}
    counts: dict[str, float] = {}
    for part, prefix in (("", ""), ("VD", "VD/"), ("VS", "VS/")):
        chosen = [row for row in rows if part in ("", row["category"])]
        if not chosen:
            continue
        per_item |= {prefix + name: units for name, units in accuracies(chosen, right).items()}
        counts |= {prefix + name: value for name, value in figure_counts(chosen, right).items()}
    for name, units in per_item.items():
        counts[f"{name}_correct"] = sum(n > 0 for n, _ in units.values())
        counts[f"{name}_total"] = len(units)
    return Scores.of(per_item, counts, (note,) if note else ())


# ------------------------------------------------------------------------------------------------- benchmark

FIELDS = ("category", "subcategory", "set_id", "figure_id", "question_id", "visual_input")
HUB_COLUMNS = (*FIELDS, "question", "gt_answer_details", "gt_answer", "filename")


class HallusionBench(Judged):
    """HallusionBench: yes/no questions about figures, some of them edited; with `judge=none` a rule parses yes and no.

    Args:
        part: The questions to use; the ReVisiT paper reports "VD".
    """

    judge_model: str = "gpt-4"
    part: Literal["all", "VD", "VS"] = "all"

    name = "hallusionbench"
    temperature = 0.0
    max_new_tokens = 128
    headline = "aAcc"
    metrics = tuple(Metric(name, "higher", 1, 2) for name in ("qAcc", "fAcc", "aAcc", "easy_aAcc", "hard_aAcc"))

    def load(self, data_dir: Path) -> list[Item]:
        path = self.files(data_dir)[0]
        items = []
        for row in records.read_records(path):
            name = row.get("filename")
            for field in FIELDS:
                row.need(field)
            row.need_choice("gt_answer", "01")
            row.need_choice("visual_input", "012")
            row.need_int("figure_id")
            if self.part not in ("all", row["category"]):
                continue
            figure = str(name).removeprefix("./")
            images = (records.find_image(path.parent, figure, ".", "hallusion_bench"),) if name else ()
            items.append(Item(item_key(row), row.need("question"), images, {"row": dict(row)}))
        return items

    @classmethod
    def write_rows(cls, rows: Iterable[Record], out: Draft) -> None:
        """Write one list of questions; a question without a figure has no file name, as in the official file."""
        entries = []
        for row in rows:
            fields = {name: row[name] for name in (*HUB_COLUMNS, "sample_note") if name in row}
            entry = {name: value if value is None else str(value) for name, value in fields.items()}
            entry["filename"] = None
            if str(row["visual_input"]) != "0":
                if not row["filename"]:
                    raise RevisitError(f"{row.where} has a figure but no file name.")
                entry["filename"] = str(row["filename"]).removeprefix("./")
                out.image(f"hallusionbench/{entry['filename']}", row.get("image"), row.where, named=True)
            entries.append(entry)
        out.text("hallusionbench/HallusionBench.json", json.dumps(entries, indent=1, ensure_ascii=False) + "\n")

    def answer_id(self, answer: AnswerRow) -> str | None:
        """Return the item's id, from the question's fields, which official result files repeat, or from its name."""
        record = answer.record
        return item_key(record) if all(field in record for field in FIELDS[:5]) else answer.key()

    def score_replies(self, items: list[Item], replies: Mapping[str, str]) -> Scores:
        note = f"By {self.judge_model}." if self.judge == "model" else "By the replies of a judge in the answer file."
        return score_labels((i.meta["row"] for i in items), {i.id: judge_label(replies[i.id]) for i in items}, note)

    def score_unjudged(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        labels = {i.id: rule_label(answers[i.id], i.meta["row"]["gt_answer"]) for i in items}
        note = "Rule-judged (yes/no extraction against the gold answer); the official judge is a language model."
        return score_labels((i.meta["row"] for i in items), labels, note)
