"""Which number tells words for what a picture shows from words for what it does not show?

The candidates are declared below. The first half of the pictures chooses among them (largest AUROC on the model's captions) and sets
the threshold (largest F1 of flagging absent objects); the second half measures. Texts are the model's own captions, and foils:
a template that lists what is there, with one object swapped for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from revisit.benchmarks.base import Item
from revisit.benchmarks.chair_words import WORDS, object_words
from revisit.evaluation.records import Stored
from revisit.evaluation.runner import Reporter
from revisit.explain.check import settings_of
from revisit.explain.support import TOP, ReadText, first_tokens, read_texts, say, word_places
from revisit.methods import as_method
from revisit.models.parts import ModelParts
from revisit.paper.pointing import read_boxes
from revisit.paper.study import Subject, images, number, track
from revisit.report.document import Block, Table, Text
from revisit.step.reference import jsd, plausible

ALPHA = 1e-5  # of the plausible set
NEIGHBORS = 8
QUANTILE = 0.9  # of the support that words get from another picture: the threshold that needs no labels
RESAMPLES = 1000


@dataclass(frozen=True)
class Reading:
    """What is known about one object word."""

    log_p: Tensor  # (V,) the model's log-probabilities where the word begins
    log_p_blank: float  # of the word, with a gray picture in place of the picture
    token: int
    chances: Tensor  # (layers, vision tokens) probability of the word over the whole vocabulary
    near: Tensor  # (vision tokens,) the word's share of the plausible set at the last layer
    divergence: Tensor  # (vision tokens,) to the model's distribution on that set


def top(values: Tensor, k: int = TOP) -> float:
    """Mean of the k largest."""
    return float(values.topk(min(k, len(values))).values.mean())


def nearest(reading: Reading, k: int) -> float:
    order = reading.divergence.argsort()[:k]
    return float(reading.near[order].mean())


# Higher means: more likely there. The layers of a row are the last, the middle (half the depth) or all of them.
CANDIDATES: dict[str, Callable[[Reading], float]] = {
    "model's probability": lambda r: float(r.log_p[r.token]),
    "model's entropy, negative": lambda r: float((r.log_p.exp() * r.log_p).nansum()),
    "difference to a gray picture": lambda r: float(r.log_p[r.token]) - r.log_p_blank,
    "least divergence, negative": lambda r: -float(r.divergence.min()),
    "nearest vision token": lambda r: nearest(r, 1),
    f"mean of the {NEIGHBORS} nearest": lambda r: nearest(r, NEIGHBORS),
    "largest, plausible set, last layer": lambda r: top(r.near, 1),
    f"mean of {TOP} largest, plausible set, last layer": lambda r: top(r.near),
    "largest, last layer": lambda r: top(r.chances[-1], 1),
    f"mean of {TOP} largest, last layer": lambda r: top(r.chances[-1]),
    "largest, middle layer": lambda r: top(r.chances[(len(r.chances) - 1) // 2], 1),
    f"mean of {TOP} largest, middle layer": lambda r: top(r.chances[(len(r.chances) - 1) // 2]),
    "largest, all layers (internal confidence)": lambda r: float(r.chances.max()),
    f"mean of {TOP} largest, mean of all layers": lambda r: top(r.chances[1:].mean(0)),
}


CHECK = "revisit.check"  # support as it gives it
OTHER = "another picture"  # the same from the vision tokens of another picture
JOINED: dict[str, Callable[[list[float]], float]] = {  # ways to join the tokens of a word
    "first": lambda each: each[0],
    "mean": lambda each: sum(each) / len(each),
    "least": min,
}


@dataclass(frozen=True)
class Unit:
    """One object word of a text."""

    picture: int
    present: bool
    tokens: int  # how many write it
    scores: dict[str, float]  # of the candidates, CHECK, OTHER and JOINED


Floats = NDArray[np.float64]


def auroc(scores: Floats, present: NDArray[np.bool_]) -> float:
    """The probability that a present word scores higher than an absent one; ties count half."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    n1 = int(present.sum())
    n0 = len(present) - n1
    return float((ranks[present].sum() - n1 * (n1 + 1) / 2) / (n1 * n0)) if n1 and n0 else float("nan")


def average_precision(scores: Floats, present: NDArray[np.bool_]) -> float:
    """Average precision of finding absent words, lowest score first; among equal scores, present words come first."""
    absent = ~present[np.lexsort((~present, scores))]
    precision = np.cumsum(absent) / np.arange(1, len(absent) + 1)
    return float(precision[absent].mean()) if absent.any() else float("nan")


def f1(scores: Floats, present: NDArray[np.bool_], threshold: float) -> float:
    """F1 of flagging the words below the threshold as absent."""
    flagged, absent = scores < threshold, ~present
    return float(2 * (flagged & absent).sum() / max(1, flagged.sum() + absent.sum()))


def best_threshold(scores: Floats, present: NDArray[np.bool_]) -> float:
    """The threshold with the largest F1, half way between two scores."""
    values = np.unique(scores)
    cuts = [*((values[1:] + values[:-1]) / 2), values[-1] + 1e-9]
    return float(max(cuts, key=lambda cut: f1(scores, present, cut)))


def interval(units: Sequence[Unit], name: str) -> tuple[float, float]:
    """95 % bootstrap interval of the AUROC, pictures being resampled."""
    rng = np.random.default_rng(0)
    scores, present = _columns(units, name)
    pictures = np.array([unit.picture for unit in units])
    groups = [np.flatnonzero(pictures == picture) for picture in np.unique(pictures)]
    drawn = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([groups[n] for n in rng.integers(len(groups), size=len(groups))])
        drawn.append(auroc(scores[rows], present[rows]))
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def check_study(subject: Subject, reporter: Reporter) -> dict[str, Any]:
    """The study; see the module."""
    model, processor = subject.loaded
    method = as_method(subject.methods[0], model)
    boxes = read_boxes(subject.folder)
    truth = {item.id: set(boxes.get(item.id, ())) for item in subject.items}
    decoded = subject.decode(method, reporter, "captions")
    captions = [processor.tokenizer.decode(tokens, skip_special_tokens=True).strip() for _, _, tokens in decoded]
    foils = [foil(place, sorted(truth[item.id])) for place, item in enumerate(subject.items)]
    texts = {"captions": captions, "foils": foils}
    units = {kind: list(_units(subject, found, truth, reporter, kind)) for kind, found in texts.items()}
    half = len(subject.items) // 2
    settings, _ = settings_of(model)
    chosen_on = [unit for unit in units["captions"] if unit.picture < half]
    measured = {kind: [unit for unit in found if unit.picture >= half] for kind, found in units.items()}
    validation = {name: auroc(*_columns(chosen_on, name)) for name in CANDIDATES}
    chosen = max(validation, key=validation.__getitem__)
    rows = []
    for name in CANDIDATES:
        row: dict[str, Any] = {"name": name, "validation": validation[name]}
        cut = best_threshold(*_columns(chosen_on, name))
        for kind, found in measured.items():
            columns = _columns(found, name)
            low, high = interval(found, name)
            precision = average_precision(*columns)
            row[kind] = {"auroc": auroc(*columns), "low": low, "high": high, "ap": precision, "f1": f1(*columns, cut)}
        rows.append(row)
    thresholds = {
        "settings": settings["threshold"],
        "validation": best_threshold(*_columns(chosen_on, CHECK)),
        "label-free": float(np.quantile(_columns(chosen_on, OTHER)[0], QUANTILE)),
    }
    several = [unit for found in units.values() for unit in found if unit.tokens > 1]
    return {
        "pictures": len(subject.items),
        "depth": ModelParts.of(model).depth,
        "settings": dict(settings),
        "chosen": chosen,
        "threshold": best_threshold(*_columns(chosen_on, chosen)),
        "rows": rows,
        "thresholds": thresholds,
        "check": {
            kind: {
                "auroc": auroc(*_columns(found, CHECK)),
                "f1": {rule: f1(*_columns(found, CHECK), cut) for rule, cut in thresholds.items()},
                "words": len(found),
                "absent": sum(not unit.present for unit in found),
            }
            for kind, found in measured.items()
        },
        "several_tokens": {"words": len(several), **{rule: auroc(*_columns(several, rule)) for rule in JOINED}},
    }


def _columns(units: Sequence[Unit], name: str) -> tuple[Floats, NDArray[np.bool_]]:
    return np.array([unit.scores[name] for unit in units]), np.array([unit.present for unit in units], bool)


def foil(number: int, truth: Sequence[str]) -> str:
    """A sentence that lists what is in a picture, with one object swapped for one that is not; empty where nothing is."""
    rng = np.random.default_rng(number)
    there = [name for name in sorted(truth) if " " not in name]
    others = sorted({name for name in WORDS.values() if " " not in name} - set(truth))
    if not there:
        return ""
    listed = list(rng.permutation(there)[:4])
    listed[int(rng.integers(len(listed)))] = str(rng.choice(others))
    phrases = [f"a {name}" for name in listed]
    return f"The image shows {', '.join(phrases[:-1])}{' and ' if phrases[1:] else ''}{phrases[-1]}."


def _units(
    subject: Subject, texts: Sequence[str], truth: Mapping[str, set[str]], reporter: Reporter, kind: str
) -> Iterator[Unit]:
    """Every object word of some texts, one text for each item, with its scores."""
    model, processor = subject.loaded
    parts = ModelParts.of(model)
    chosen = settings_of(model)[0]["layer"]
    other: ReadText | None = None
    rows = [(*row, texts[row[0]]) for row in enumerate(subject.items) if object_words().search(texts[row[0]])]
    for place, item, text in track(reporter, kind, rows):
        read, blank = (_read(subject, item, text, gray) for gray in (False, True))
        for start, end, own in word_places(text, read.spans):
            found = object_words().fullmatch(text[start:end])
            if found is None:
                continue
            written = [read.tokens[n] for n in own]
            firsts = first_tokens(processor.tokenizer, text[start:end], written[0])
            each = [top(column) for column in say(parts.head, read.vision[chosen], written).T]
            reading = _reading(parts, read, blank, own[0])
            scores = {name: score(reading) for name, score in CANDIDATES.items()}
            scores |= {rule: join(each) for rule, join in JOINED.items()}
            for name, states in ((CHECK, read.vision[chosen]), (OTHER, (other or blank).vision[chosen])):
                scores[name] = max(top(column) for column in say(parts.head, states, firsts).T)
            yield Unit(place, WORDS[found.group(1).lower()] in truth[item.id], len(own), scores)
        other = read


def _read(subject: Subject, item: Item, text: str, gray: bool) -> ReadText:
    """One pass over a text and its pictures, or gray ones in their place."""
    model, processor = subject.loaded
    pictures = images(item)
    if gray:
        pictures = [Image.new("RGB", picture.size, (127, 127, 127)) for picture in pictures]
    return read_texts(model, processor, [pictures], [text], item.prompt, range(ModelParts.of(model).depth + 1))[0]


@torch.no_grad()
def _reading(parts: ModelParts, read: ReadText, blank: ReadText, place: int) -> Reading:
    head, token = parts.head, read.tokens[place]
    log_p = head.all_logits(read.states[place][None]).log_softmax(-1)[0]
    log_p_blank = float(head.all_logits(blank.states[place][None]).log_softmax(-1)[0, token])
    keep = plausible(log_p, ALPHA)
    keep[token] = True
    last = head.all_logits(read.vision[parts.depth])[:, keep].log_softmax(-1)  # (vision tokens, plausible)
    divergence = jsd(log_p[keep].log_softmax(-1), last)
    near = last[:, int(keep[:token].sum())].exp()
    chances = torch.stack([say(head, read.vision[layer], [token])[:, 0] for layer in sorted(read.vision)])
    return Reading(log_p, log_p_blank, token, chances, near, divergence)


def draw(result: Stored, name: str) -> list[Block]:
    """One row per candidate, measured on the second half of the pictures; the paper has no such study."""
    kinds = ("captions", "foils")
    lines = []
    for row in result["rows"]:
        cells = [row["name"], number(row["validation"], 3)]
        for found in (row[kind] for kind in kinds):
            area, low, high, precision, score = (number(found[key], 3) for key in ("auroc", "low", "high", "ap", "f1"))
            cells += [f"{area} [{low}, {high}]", precision, score]
        lines.append(cells)
    measured = {kind: result["check"][kind] for kind in kinds}
    counts = " and ".join(f"{m['words']} object words of {kind}, {m['absent']} absent" for kind, m in measured.items())
    caption = (
        f"How well a number tells present from absent objects: {counts}, in the second half of {result['pictures']} pictures. The first "
        f"half sets each threshold of F1 and chooses: {result['chosen']}. AUROC with 95 % intervals over pictures."
    )
    heads = ("Number", "validation AUROC", *("AUROC", "average precision", "F1") * 2)
    marked = frozenset(place for place, row in enumerate(result["rows"]) if row["name"] == result["chosen"])
    table = Table(heads, lines, caption, (("", 1), ("captions", 3), ("foils", 3)), marked)
    cuts = [
        (f"{kind}: {rule}", number(cut, 4), number(m["f1"][rule], 3), number(m["auroc"], 3))
        for kind, m in measured.items()
        for rule, cut in result["thresholds"].items()
    ]
    about = f"`revisit.check` as it is (layer {result['settings']['layer']} of {result['depth']}), by how its threshold is set."
    several = result["several_tokens"]
    rules = ", ".join(f"{rule} {number(several.get(rule), 3)}" for rule in JOINED)
    note = f"Words of several tokens: {several['words']}" + (f"; AUROC {rules}." if several["words"] else ".")
    return [table, Table(("Threshold", "value", "F1", "AUROC"), cuts, about), Text(note)]
