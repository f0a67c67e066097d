"""VidHal: three captions of a video that hallucinate ever more: choose the best one, or order them.

`mcqa` asks for the best caption, `naive_ordering` for all three in order, and `relative_ordering` for the better of two; its three answers
are merged into an order. Orders are scored by NDCG, from 0 for the worst order to 1 for the best; an order that lacks or repeats a
caption is 0. Parsing, merging and scoring follow pipelines/ (Lookuz/VidHal). The prompts are ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item, Metric, PerUnit, Scores
from revisit.eval.benchmarks.videos import VideoBenchmark
from revisit.io import records

LETTERS, PAIRS = "ABC", ("AB", "AC", "BC")
CHOOSE = "Which caption describes the video best? Reply with its letter only."
ORDER = (
    "Order these captions by how well they describe the video, the best one first. Reply with their letters only, separated by commas, "
    "such as B, A, C."
)


def parse_letter(answer: str) -> str:
    """Return the first A, B or C that is a word, in any case, or else the answer itself."""
    found = re.search(rf"\b[{LETTERS}{LETTERS.lower()}]\b", answer)
    return found[0].upper() if found else answer


def parse_order(answer: str) -> list[str]:
    """Return the letters of an order: capital letters that are words, or, if these are not three, those before punctuation."""
    answer = re.sub(r"(?<=[A-Z])(?=[A-Z])", ", ", answer)
    words = _letters(re.findall(r"\b[A-Z]\b", answer))
    if len(words) == len(LETTERS):
        return words
    marked = _letters(mark[0] for mark in re.findall(r"\b[A-Z][:.,]", answer))
    if len(marked) <= len(LETTERS):
        return marked or words
    # An explanation: the line or sentence with the most letters, the first of several.
    capital = r"(?<![a-zA-Z'])[A-Z]\b"
    lines = [re.findall(capital, line) for line in answer.split("\n")]
    parts = [line for line in lines if 1 < len(line) <= len(LETTERS)]
    sentences = [re.findall(capital, sentence) for sentence in answer.split(".")]
    parts += [sentence for sentence in sentences if len(sentence) > 1]
    best = max(([letter for letter in part if letter in LETTERS] for part in parts), key=len, default=[])
    return words if len(best) <= len(LETTERS) and len(words) > len(best) else best


def _letters(found: Iterable[str]) -> list[str]:
    """Drop repetitions next to each other, then letters that are no options."""
    return [letter for letter, _ in groupby(found) if letter in LETTERS]


def merge(better: Mapping[str, str]) -> list[str]:
    """Merge the better letter of AB and BC into an order; AC decides only if B is on the same side of both."""
    first, second = ([better[pair], pair.replace(better[pair], "")] for pair in ("AB", "BC"))
    if first[0] == second[1]:
        return [second[0], *first]
    if first[1] == second[0]:
        return [*first, second[1]]
    outer = [better["AC"], "AC".replace(better["AC"], "")]
    return ["B", *outer] if first[0] == "B" else [*outer, "B"]


def ndcg(order: Sequence[str], ranks: Mapping[str, int]) -> float:
    """Return the gain of an order, from 0 for the worst to 1 for the best."""
    if len(order) != len(LETTERS) or len(set(order)) != len(LETTERS):
        return 0.0

    def gain(ranked: Sequence[int]) -> float:
        return sum((len(LETTERS) + 1 - rank) / math.log2(place + 2) for place, rank in enumerate(ranked))

    worst, best = gain((3, 2, 1)), gain((1, 2, 3))
    return (gain([ranks[letter] for letter in order]) - worst) / (best - worst)


class VidHal(VideoBenchmark):
    """VidHal; a video is scored when all of its questions are answered.

    Args:
        task: "mcqa", "naive_ordering" or "relative_ordering".
    """

    task: Literal["mcqa", "naive_ordering", "relative_ordering"] = "mcqa"

    name = "vidhal"
    rule_options = ("task",)
    max_new_tokens = 32
    headline = "accuracy"
    metrics = (Metric("accuracy", "higher", 100, 1), Metric("ndcg", "higher", 1, 3))

    def files(self, data_dir: Path) -> list[Path]:
        return [self.require(data_dir / "vidhal" / name) for name in ("annotations.json", "options.json")]

    def load(self, data_dir: Path) -> list[Item]:
        annotations, options = self.files(data_dir)
        orders = records.record(records.read_json(options), str(options))
        items = []
        for row in records.read_records(annotations):
            video = row.need_text("video")
            captions = records.record(row.need("captions"), f"{row.where}, captions")
            shown = records.record(orders.need(video), f"{options}, {video}")
            ranks = {letter: shown.need_int(letter) for letter in LETTERS}
            texts = {letter: captions.need_text(str(rank)) for letter, rank in ranks.items()}
            meta = {"aspect": row.need_text("aspect"), "video": video, "ranks": ranks, "best": captions.need_text("1")}
            for letters in PAIRS if self.task == "relative_ordering" else [LETTERS]:
                named = list(zip(LETTERS, letters, strict=False))  # a pair is shown as A and B
                listed = "\n".join(f"{name}. {texts[letter]}" for name, letter in named)
                prompt = f"{ORDER if self.task == 'naive_ordering' else CHOOSE}\n\n{listed}"
                id = f"{video}/{letters}" if self.task == "relative_ordering" else video
                order = [name for name, _ in sorted(named, key=lambda pair: ranks[pair[1]])]
                answer = ", ".join(order) if self.task == "naive_ordering" else order[0]
                own = {**meta, "letters": letters, "answer": answer}
                items.append(self.item(id, prompt, own, annotations.parent / "videos" / f"{video}.mp4"))
        return items

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        videos: dict[str, list[Item]] = {}
        for item in items:
            videos.setdefault(item.meta["video"], []).append(item)
        needed = len(PAIRS) if self.task == "relative_ordering" else 1
        values = {video: self._value(own, answers) for video, own in videos.items() if len(own) == needed}
        if not values:
            raise RevisitError("VidHal scores videos, and no video has all of its answers: score more items.")
        metric = "accuracy" if self.task == "mcqa" else "ndcg"
        per_item: dict[str, PerUnit] = {metric: {}}
        for video, value in values.items():
            for name in (metric, f"{videos[video][0].meta['aspect']}/{metric}"):
                per_item.setdefault(name, {})[video] = (value, 1.0)
        return Scores.of(per_item, {"videos": len(values), "left_out": len(videos) - len(values)})

    def _value(self, items: Sequence[Item], answers: Mapping[str, str]) -> float:
        """Return the score of one video."""
        ranks, answer = items[0].meta["ranks"], answers[items[0].id]
        if self.task == "mcqa":
            letter = parse_letter(answer)
            return float(ranks.get(letter) == 1 or items[0].meta["best"].lower().strip(".") in letter)
        if self.task == "naive_ordering":
            return ndcg(parse_order(answer), ranks)
        better = {}
        for item in items:
            pair = item.meta["letters"]
            named = dict(zip(LETTERS, pair, strict=False)).get(parse_letter(answers[item.id]))
            better[pair] = named or max(pair, key=lambda letter: ranks[letter])  # an unreadable answer is wrong
        return ndcg(merge(better), ranks)
