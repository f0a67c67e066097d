"""Captions with names withheld at every floor of a grid: what a promised rate costs, and how often the promise holds.

The captions of all images at all floors are decoded once and stored, so that an interrupted run resumes. Calibrations are then drawn from
them: one part of the images chooses a floor by learn then test, and the others measure it. Each prompt runs once per batch; its KV cache
serves every method and floor, and a caption is decoded again at a lower floor only if that could change it.
"""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

import revisit.decoding.floor as withholding
from revisit.calibration.bounds import Outcome, conformal_threshold, fixed_sequence
from revisit.decoding.decode import Decoded, decode
from revisit.decoding.row_guard import RowGuard
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks import chair
from revisit.eval.benchmarks.base import Item
from revisit.eval.benchmarks.chair import CaptionScore
from revisit.eval.report.document import Block, Table
from revisit.eval.report.figures import Plot, Series, curves
from revisit.eval.run import Reporter
from revisit.forward import states as vision
from revisit.forward.support import name_support
from revisit.io.files import LineFile
from revisit.io.records import read_json
from revisit.methods import as_method
from revisit.models.spelling import spelling_of
from revisit.paper.study import Result, Stored, Subject, percent, track

METHODS = ("greedy", "revisit")
FLOORS: tuple[float, ...] = (0.35, 0.18, 0.13, 0.075, 0.055, 0.0)  # the strictest first; 0 is without a floor
TINY_FLOORS: tuple[float, ...] = (0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.25, 0.15, 0.0)  # its vision tokens are surer
RATES, CONFIDENCE, SPLITS, SHARE = (0.3, 0.2, 0.1), 0.9, 20, 0.4  # share of the images that calibrates

Line = dict[str, Any]
T = TypeVar("T")
parse_caption, score_caption = functools.cache(chair.parse_caption), functools.cache(chair.score_caption)


def run(subject: Subject, reporter: Reporter, calibrated: Path | None = None) -> Result:
    """Decode what is missing, and return the measurements of every method and rate.

    Args:
        calibrated: The result of another run, whose images calibrate instead.
    """
    floors = TINY_FLOORS if subject.model == "tiny" else FLOORS
    with closing(LineFile(Path(subject.out) / "floors.jsonl")) as file:
        lines = {(line["image"], line["method"], line["floor"]): line for line in file.objects if "image" in line}
        for start in track(reporter, "captions", range(0, len(subject.items), subject.batch_size)):
            batch = subject.items[start : start + subject.batch_size]
            wanted = {(item.id, method, floor) for item in batch for method in subject.methods for floor in floors}
            if not wanted <= lines.keys():
                new = list(decode_batch(subject, batch, floors))
                file.append(new)
                lines |= {(line["image"], line["method"], line["floor"]): line for line in new}
    others = None if calibrated is None else read_json(calibrated)["result"]["losses"]
    return measure(subject.items, subject.methods, floors, lines, others)


def decode_batch(subject: Subject, batch: Sequence[Item], floors: Sequence[float]) -> Iterator[Line]:
    """Yield the captions of a batch by every method at every floor."""
    model, processor = subject.loaded
    model.set_attn_implementation("eager")  # six times as fast as torch's fused attention in bfloat16 on a CPU
    settings = Decoding(max_new_tokens=subject.max_new_tokens)
    inputs = subject.inputs(batch)
    length, rows = inputs["input_ids"].shape[1], range(len(batch))
    prompt = DynamicCache()
    with remembered_support():
        first = as_method("revisit", model, floor=floors[0])  # keeps the vision states that every method reads
        begun = decode(model, processor, inputs, first, Decoding(max_new_tokens=1), past_key_values=prompt)
        support = [answer.trace.rows[0].support for answer in begun]
        states = dict(vision._STATES_OF_CACHE[prompt])
        if prompt.get_seq_length() >= length:
            prompt.crop(length - 1 - prompt.get_seq_length())
        for name in subject.methods:
            known: dict[int, Decoded] = {}
            free: dict[int, Decoded] = {}  # without a floor
            for floor in (0.0, *floors[:-1]):
                method = as_method(name, model, floor=floor)
                if free:
                    spelling = spelling_of(processor.tokenizer)
                    guards = [RowGuard(spelling, support[row], floor) for row in rows]
                    known |= {row: free[row] for row in rows if guards[row].allows(free[row].tokens)}
                left = [row for row in rows if changes(known.get(row), floor)]
                started = time.process_time()
                found = []
                if left:
                    cache = copy(prompt, states, left)
                    found = decode(model, processor, part(inputs, left), method, settings, past_key_values=cache)
                seconds = (time.process_time() - started) / max(1, len(left))
                known |= dict(zip(left, found, strict=True))
                if not floor:
                    free, known = known, {}
                for row, item in enumerate(batch):
                    answer = (known or free)[row]
                    trace = answer.trace.rows[0]
                    yield {
                        "image": item.id,
                        "method": name,
                        "floor": floor,
                        "text": answer.text,
                        "tokens": len(answer.tokens),
                        "prevented": sorted({category for _, category in trace.prevented}),
                        "exhausted": trace.exhausted,
                        "seconds": round(seconds, 3) if row in left else 0.0,
                        "support": {} if floor else {key: round(value, 6) for key, value in support[row].items()},
                    }


def changes(answer: Decoded | None, floor: float) -> bool:
    """Return whether a lower floor could change an answer."""
    return answer is None or answer.trace.rows[0].lowest_floor >= floor


def part(inputs: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Return the inputs of some rows without their pixels, which the KV cache holds."""
    return {name: value[list(rows)] for name, value in inputs.items() if name != "pixel_values"}


def copy(prompt: Any, states: Mapping[tuple[int, ...], list[Any]], rows: Sequence[int]) -> DynamicCache:
    """Return the KV cache of some rows, with their vision states."""
    copied = DynamicCache()
    for number, layer in enumerate(prompt.layers):
        copied.update(layer.keys[list(rows)], layer.values[list(rows)], number)
    vision._STATES_OF_CACHE[copied] = {layers: [items[row] for row in rows] for layers, items in states.items()}
    return copied


class remembered_support:
    """Read the support of an image's names once, for all methods and floors."""

    def __enter__(self) -> None:
        self.original, known = name_support, dict[int, dict[str, float]]()

        def remembered(head: Any, states: torch.Tensor, spelling: Any) -> dict[str, float]:
            key = hash(states.float().numpy().tobytes())
            if key not in known:
                known[key] = self.original(head, states, spelling)
            return known[key]

        vars(withholding)["name_support"] = remembered

    def __exit__(self, *_: object) -> None:
        vars(withholding)["name_support"] = self.original


# -- measurements ---------------------------------------------------------------------------------------------------


def measure(
    items: Sequence[Item],
    methods: Sequence[str],
    floors: Sequence[float],
    lines: Mapping[tuple[str, str, float], Line],
    others: Mapping[str, Sequence[Sequence[float]]] | None,
) -> Result:
    """Return the scores of each method and floor, and the calibrations drawn from them or from the losses of other images."""
    truth = {item.id: frozenset(item.meta["ground_truth"]) for item in items}
    scores = {key: score_caption(line["text"], truth[key[0]]) for key, line in lines.items() if key[0] in truth}
    grid, drawn, own = [], [], {}
    for method in methods:
        for floor in floors:
            rows = [lines[item.id, method, floor] for item in items]
            grid.append(
                {
                    "method": method,
                    "floor": floor,
                    **summary([scores[item.id, method, floor] for item in items]),
                    "tokens": mean(line["tokens"] for line in rows),
                    "seconds": mean(line["seconds"] for line in rows if line["seconds"]) if floor == 0 else None,
                    "exhausted": sum(line["exhausted"] for line in rows),
                }
            )
        # Of each image: its losses, floor by floor.
        own[method] = [[float(bool(scores[item.id, method, floor].hallucinated)) for floor in floors] for item in items]
        losses = own[method] if others is None else others[method]
        for rate in RATES:
            certified = certify(floors, losses, rate)
            tests = []
            for seed in range(SPLITS):
                _, test = split(items, seed)
                found = certify(floors, split(losses, seed)[0], rate)
                tests += [[scores[item.id, method, found[-1]] for item in test]] if found else []
            whole = certified[-1] if certified else None
            drawn.append(
                {"method": method, "rate": rate, "whole": whole, "certified": len(tests), **pooled(tests, rate)}
            )
    filters = [
        {"method": method, "rate": rate, **filter_splits(items, method, rate, lines, truth)}
        for method in methods
        for rate in RATES
    ]
    filtered = {
        method: [
            summary([score_caption(kept(lines[item.id, method, 0.0], floor), truth[item.id]) for item in items])
            for floor in floors
        ]
        for method in methods
    }
    return {
        "images": len(items),
        "grid": grid,
        "splits": drawn,
        "filters": filters,
        "filter_curves": filtered,
        "losses": own,
    }


def certify(floors: Sequence[float], losses: Sequence[Sequence[float]], rate: float) -> list[float]:
    """Return the floors that are certified by images' losses at every floor."""
    outcomes = (Outcome(floor, at) for floor, at in zip(floors, zip(*losses, strict=True), strict=True))
    return [outcome.floor for outcome in fixed_sequence(outcomes, rate, CONFIDENCE, "caption")]


def kept(line: Line, threshold: float) -> str:
    """Return a finished caption without the sentences that hold a name below a threshold."""
    return " ".join(text for text, _, low in sentences(line["text"], line["support"]) if low >= threshold)


def split(images: Sequence[T], seed: int) -> tuple[list[T], list[T]]:
    """Return a random division of images into those that calibrate and those that test."""
    shuffled = random.Random(seed).sample(list(images), len(images))
    cut = round(SHARE * len(images))
    return shuffled[:cut], shuffled[cut:]


def filter_splits(
    items: Sequence[Item],
    method: str,
    rate: float,
    lines: Mapping[tuple[str, str, float], Line],
    truth: Mapping[str, frozenset[str]],
) -> Line:
    """The same for a filter of finished captions: sentences with a name below a threshold are removed."""
    scored = {
        item.id: sentences(lines[item.id, method, 0.0]["text"], lines[item.id, method, 0.0]["support"])
        for item in items
    }
    tested = []
    for seed in range(SPLITS):
        calibrate, test = split(items, seed)
        critical = [
            max((low for _, names, low in scored[item.id] if not names <= truth[item.id]), default=-1.0)
            for item in calibrate
        ]
        threshold = conformal_threshold(critical, rate)
        if threshold is not None:
            texts = [kept(lines[item.id, method, 0.0], threshold) for item in test]
            tested.append([score_caption(text, truth[item.id]) for text, item in zip(texts, test, strict=True)])
    return {"certified": len(tested), **pooled(tested, rate)}


def sentences(text: str, support: Mapping[str, float]) -> list[tuple[str, set[str], float]]:
    """Return each sentence of a caption with the objects that it names and the least support of these."""
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        names = set(parse_caption(sentence).nodes)
        found.append((sentence, names, min((support.get(name, 1.0) for name in names), default=1.0)))
    return found


def summary(scores: Sequence[CaptionScore]) -> dict[str, float]:
    """Return the measures of a set of captions, as shares."""
    named, recalled = sum(len(s.named) for s in scores), sum(len(s.recalled) for s in scores)
    truth = sum(len(s.ground_truth) for s in scores)
    return {
        "chair_s": mean(bool(s.hallucinated) for s in scores),
        "chair_i": sum(len(s.hallucinated) for s in scores) / max(1, sum(len(s.parse.nodes) for s in scores)),
        "recall": recalled / truth,
        "precision": recalled / max(1, named),
        "f1": 2 * recalled / (named + truth),
        "repeats": mean(s.repeats for s in scores),
        "words": mean(len(s.parse.merged) for s in scores),
    }


def pooled(tests: Sequence[Sequence[CaptionScore]], rate: float) -> dict[str, Any]:
    """Return means over the test images of splits, and the number of splits in which the rate was exceeded on them."""
    if not tests:
        return {}
    rows = [summary(test) for test in tests]
    exceeded = sum(row["chair_s"] > rate for row in rows)
    return {"exceeded": exceeded, "largest": max(row["chair_s"] for row in rows)} | {
        key: mean(row[key] for row in rows) for key in rows[0]
    }


def draw(result: Stored) -> list[Block]:
    """Draw the grid, the calibrations, and the filter."""
    keys = ("chair_s", "chair_i", "precision", "recall", "f1", "repeats")
    titles = ("CHAIR_S", "CHAIR_I", "distinct precision", "recall", "distinct F1", "repeats", "words")

    def cells(row: Stored) -> tuple[str, ...]:
        return (
            *(percent(row[key], 1) if key in row else "–" for key in keys),
            f"{row['words']:.1f}" if "words" in row else "–",
        )

    grid = [(row["method"], str(row["floor"]), *cells(row)) for row in result["grid"]]
    blocks: list[Block] = [
        Table(("method", "floor", *titles), grid, f"{result['images']} images, every floor.", left=1)
    ]
    for part_name, what in (("splits", "learn then test"), ("filters", "a filter of finished captions")):
        rows = [
            (
                row["method"],
                str(row["rate"]),
                str(row.get("whole", "–")),
                str(row["certified"]),
                str(row.get("exceeded", "–")),
                *cells(row),
            )
            for row in result[part_name]
        ]
        header = ("method", "rate", "floor on all", "certified", "exceeded", *titles)
        blocks.append(Table(header, rows, f"Means over {SPLITS} random splits: {what}.", left=1))
    series = []
    for method in dict.fromkeys(row["method"] for row in result["grid"]):
        points: dict[str, Any] = {"floor": [row for row in result["grid"] if row["method"] == method]}
        points["filter"] = result["filter_curves"][method]
        for what, rows in points.items():
            recall, risk = ([100 * row[key] for row in rows] for key in ("recall", "chair_s"))
            series.append(Series(f"{method}, {what}", recall, risk))
    panel = Plot(series, xlabel="captions with an absent object, %", ylabel="recall, %")
    return [*blocks, curves("risk-recall", "Recall at every floor, and at every threshold of the filter.", [panel])]
