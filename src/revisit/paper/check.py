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
from revisit.decoding.loop import generate
from revisit.evaluation.runner import Reporter
from revisit.explain.check import TOP, ForcedText, force, say, settings_of, spellings, word_places
from revisit.methods import as_method
from revisit.models.images import open_image
from revisit.models.parts import ModelParts
from revisit.models.prompts import answers
from revisit.paper.pointing import read_boxes
from revisit.paper.study import Subject, track
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


@dataclass(frozen=True)
class Unit:
    """One object word of a text."""

    picture: int
    present: bool
    tokens: int  # how many write it
    scores: dict[str, float]
    default: float  # support as `revisit.check` gives it
    other: float  # the same from the vision tokens of another picture
    joined: dict[str, float]  # rules for words of several tokens


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
    scores = np.array([unit.scores[name] for unit in units])
    present = np.array([unit.present for unit in units])
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
    captions = list(_captions(subject, reporter))
    boxes = read_boxes(subject.folder)
    truth = {item.id: set(boxes.get(item.id, ())) for item in subject.items}
    foils = [(n, item, text) for n, item in enumerate(subject.items) if (text := foil(n, sorted(truth[item.id])))]
    texts = {"captions": captions, "foils": foils}
    units = {kind: list(_units(subject, rows, truth, reporter, kind)) for kind, rows in texts.items()}
    half = len(subject.items) // 2
    model = subject.loaded[0]
    settings, _ = settings_of(model)
    chosen_on = [unit for unit in units["captions"] if unit.picture < half]
    validation = {name: auroc(*_columns(chosen_on, name)) for name in CANDIDATES}
    chosen = max(validation, key=validation.__getitem__)
    threshold = best_threshold(*_columns(chosen_on, chosen))
    free = float(np.quantile([unit.other for unit in chosen_on], QUANTILE))
    measured = {kind: [unit for unit in found if unit.picture >= half] for kind, found in units.items()}
    rows = []
    for name in CANDIDATES:
        row: dict[str, Any] = {"name": name, "validation": validation[name]}
        cut = best_threshold(*_columns(chosen_on, name))
        for kind, found in measured.items():
            scores, present = _columns(found, name)
            low, high = interval(found, name)
            area, precision = auroc(scores, present), average_precision(scores, present)
            row[kind] = {"auroc": area, "low": low, "high": high, "ap": precision, "f1": f1(scores, present, cut)}
        rows.append(row)
    defaults = {}
    for kind, found in measured.items():
        scores, present = np.array([unit.default for unit in found]), np.array([unit.present for unit in found])
        labels = {
            "settings": settings["threshold"],
            "validation": best_threshold(*_default(chosen_on)),
            "label-free": free,
        }
        defaults[kind] = {
            "auroc": auroc(scores, present),
            "f1": {name: f1(scores, present, cut) for name, cut in labels.items()},
            "thresholds": labels,
            "words": len(found),
            "absent": int((~present).sum()),
        }
    return {
        "pictures": len(subject.items),
        "depth": ModelParts.of(model).depth,
        "settings": dict(settings),
        "chosen": chosen,
        "threshold": threshold,
        "rows": rows,
        "check": defaults,
        "several_tokens": _several([unit for found in units.values() for unit in found]),
    }


def _captions(subject: Subject, reporter: Reporter) -> Iterator[tuple[int, Item, str]]:
    """The model's own descriptions. They are not scored, so NLTK is not needed."""
    model, processor = subject.loaded
    method = as_method(subject.method, model)
    starts = range(0, len(subject.items), subject.batch_size)
    for start in track(reporter, "captions", list(starts)):
        items = subject.items[start : start + subject.batch_size]
        inputs = subject.inputs(items)
        output = generate(
            model,
            **inputs,
            method=method,
            processor=processor,
            max_new_tokens=subject.max_new_tokens,
            do_sample=False,
        )
        for number, (item, text) in enumerate(zip(items, answers(processor, output, inputs), strict=True), start):
            yield number, item, text


def _columns(units: Sequence[Unit], name: str) -> tuple[Floats, NDArray[np.bool_]]:
    return np.array([unit.scores[name] for unit in units]), np.array([unit.present for unit in units])


def _default(units: Sequence[Unit]) -> tuple[Floats, NDArray[np.bool_]]:
    return np.array([unit.default for unit in units]), np.array([unit.present for unit in units])


def _several(units: Sequence[Unit]) -> dict[str, Any]:
    """AUROC of the rules that join the tokens of a word, on words of several tokens."""
    found = [unit for unit in units if unit.tokens > 1]
    present = np.array([unit.present for unit in found], bool)
    rules = found[0].joined if found else {}
    return {"words": len(found), **{rule: auroc(np.array([u.joined[rule] for u in found]), present) for rule in rules}}


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
    subject: Subject,
    rows: Sequence[tuple[int, Item, str]],
    truth: Mapping[str, set[str]],
    reporter: Reporter,
    kind: str,
) -> Iterator[Unit]:
    """Every object word of some texts, with its scores."""
    model, processor = subject.loaded
    parts = ModelParts.of(model)
    layers = range(parts.depth + 1)
    chosen = settings_of(model)[0]["layer"]
    other: ForcedText | None = None
    for number, item, text in track(reporter, kind, [row for row in rows if object_words().search(row[2])]):
        pictures = [open_image(path) for path in item.images]
        gray = [Image.new("RGB", picture.size, (127, 127, 127)) for picture in pictures]
        forced, blank = (force(model, processor, [own], [text], item.prompt, layers)[0] for own in (pictures, gray))
        for start, end, own in word_places(text, forced.spans):
            found = object_words().fullmatch(text[start:end])
            if found is None:
                continue
            written = [forced.tokens[n] for n in own]
            reading = _reading(parts, forced, blank, own[0])
            ways = spellings(processor.tokenizer, text[start:end], written)
            yield Unit(
                picture=number,
                present=WORDS[found.group(1).lower()] in truth[item.id],
                tokens=len(own),
                scores={name: score(reading) for name, score in CANDIDATES.items()},
                default=_support(parts, forced.vision[chosen], ways),
                other=_support(parts, (other or blank).vision[chosen], ways),
                joined=_joined(parts, forced.vision[chosen], written),
            )
        other = forced


def _support(parts: ModelParts, states: Tensor, ways: Sequence[Sequence[int]]) -> float:
    return max(top(column) for column in say(parts.head, states, [way[0] for way in ways]).T)


def _joined(parts: ModelParts, states: Tensor, tokens: Sequence[int]) -> dict[str, float]:
    each = [top(column) for column in say(parts.head, states, tokens).T]
    return {"first": each[0], "mean": sum(each) / len(each), "least": min(each)}


@torch.no_grad()
def _reading(parts: ModelParts, forced: ForcedText, blank: ForcedText, place: int) -> Reading:
    head, token = parts.head, forced.tokens[place]
    log_p = head.all_logits(forced.states[place][None]).log_softmax(-1)[0]
    log_p_blank = float(head.all_logits(blank.states[place][None]).log_softmax(-1)[0, token])
    keep = plausible(log_p, ALPHA)
    keep[token] = True
    last = head.all_logits(forced.vision[parts.depth])[:, keep].log_softmax(-1)  # (vision tokens, plausible)
    divergence = jsd(log_p[keep].log_softmax(-1), last)
    near = last[:, int(keep[:token].sum())].exp()
    chances = torch.stack([say(head, forced.vision[layer], [token])[:, 0] for layer in sorted(forced.vision)])
    return Reading(log_p, log_p_blank, token, chances, near, divergence)
