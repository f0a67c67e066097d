"""Which number tells words for what a picture shows from words for what it does not show?

The candidates are declared below. The first half of the pictures chooses among them (largest AUROC on the model's captions) and sets
the threshold (largest F1 of flagging absent objects); the second half measures. Texts are the model's own captions, and foils:
a template that lists what is there, with one object swapped for another. Of generated scenes, a further template states a place, a
count and a color, each of them wrong in half of the pictures; nothing is chosen on these.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from revisit.benchmarks.base import Item
from revisit.benchmarks.chair_words import WORDS, object_words
from revisit.embedded.catalog import BY_NOUN, COLORS, PLACE_BY_NAME
from revisit.evaluation.records import Stored
from revisit.evaluation.runner import Reporter
from revisit.explain.check import THRESHOLD, is_content, settings_of
from revisit.explain.support import TOP, WORD, ReadText, first_tokens, read_texts, say, word_places
from revisit.explain.tokens import token_text
from revisit.methods import as_method
from revisit.models.parts import ModelParts
from revisit.models.prompts import chat_text, prepare
from revisit.paper.pointing import read_boxes
from revisit.paper.study import Subject, images, number, percent, track
from revisit.report.document import Block, Table, Text
from revisit.step.reference import jsd, plausible

if TYPE_CHECKING:
    from revisit.models.parts import Head
    from revisit.models.types import Tokenizer

ALPHA = 1e-5  # of the plausible set
NEIGHBORS = 8
QUANTILE = 0.9  # of the support that words get from another picture: the threshold that needs no labels
RESAMPLES = 1000
COUNTS = ("one", "two", "three", "four")
RANGES = (0.01, 0.05, 0.2, 0.4, 0.6, 0.8)  # of support


@dataclass(frozen=True)
class Reading:
    """What is known about one object word."""

    log_p: Tensor  # (V,) the model's log-probabilities where the word begins
    log_p_blank: float  # of the word, with a gray picture in place of the picture
    token: int
    chances: Tensor  # (layers, vision tokens) probability of the word over the whole vocabulary
    near: Tensor  # (vision tokens,) the word's share of the plausible set at the last layer
    divergence: Tensor  # (vision tokens,) to the model's distribution on that set
    hijacked: Tensor  # (vision tokens,) bool: says the same irrelevant word at every layer


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
    "nearest vision token that is not hijacked": lambda r: float(
        r.near[int((r.divergence + 9.0 * r.hijacked).argmin())]
    ),
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
    """One word of a text that is right or wrong about the picture."""

    picture: int
    kind: str  # object, place, count, color
    present: bool  # right
    tokens: int  # how many write it
    hijacked: bool  # whether the nearest vision token, which ReVisiT would select, is
    scores: dict[str, float]  # of the candidates, every layer, CHECK, OTHER and JOINED


@dataclass(frozen=True)
class Stated:
    """A text about a picture, and what is known about its words."""

    text: str
    judge: Callable[[str], tuple[str, bool] | None]  # kind of a word, and whether it is right; None: not known


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
    texts = {
        kind: [Stated(text, partial(_object, truth[item.id])) for item, text in zip(subject.items, found, strict=True)]
        for kind, found in (("captions", captions), ("foils", foils))
    }
    fixed: list[tuple[int, list[str]]] = []  # of each text: vision tokens, and the words of the hijacked ones
    units = {kind: list(_units(subject, found, truth, reporter, kind, fixed)) for kind, found in texts.items()}
    others = list(_units(subject, attributes(subject.folder), truth, reporter, "attributes", []))
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
        "guess": THRESHOLD,
    }
    several = [unit for found in units.values() for unit in found if unit.tokens > 1]
    layers = [f"layer {number}" for number in range(ModelParts.of(model).depth + 1)]
    best = max(layers, key=lambda name: auroc(*_columns(chosen_on, name)))
    both = [unit for found in measured.values() for unit in found]
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
        "recommended": {
            "layer": layers.index(best),
            "threshold": best_threshold(*_columns(chosen_on, best)),
            "auroc": auroc(*_columns(measured["captions"], best)),
        },
        "reliability": _reliability(*_columns(both, CHECK)),
        "kinds": {
            kind: {
                "words": len(found),
                "wrong": sum(not unit.present for unit in found),
                **{name: auroc(*_columns(found, name)) for name in (CHECK, "model's probability")},
            }
            for kind in dict.fromkeys(unit.kind for unit in (*both, *others))
            if (found := [unit for unit in (*both, *others) if unit.kind == kind])
        },
        "another_picture": auroc(*_against_another(both)),
        "hijacking": {
            "vision_tokens": sum(len(words) for _, words in fixed) / max(1, sum(tokens for tokens, _ in fixed)),
            "selected": float(np.mean([unit.hijacked for unit in units["captions"]] or [False])),
            "words": [word for word, _ in Counter(word for _, words in fixed for word in words).most_common(5)],
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


def attributes(folder: Path) -> list[Stated]:
    """Of generated scenes: a sentence with a place, a count and a color, each wrong in half of the pictures; otherwise nothing."""
    found = []
    path = folder / "scenes.jsonl"
    for place, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else ()):
        shown, rng = json.loads(line), np.random.default_rng(place)
        tinted = next((thing for thing in shown["objects"] if thing["colour"]), shown["objects"][0])
        count = min(4, sum(thing["noun"] == tinted["noun"] for thing in shown["objects"]))
        right = {"place": shown["place"], "count": COUNTS[count - 1], "color": tinted["colour"] or "red"}
        said, known = dict(right), dict[str, tuple[str, bool]]()
        for kind, words in (("place", PLACE_BY_NAME), ("count", COUNTS), ("color", COLORS)):
            if rng.integers(2):
                said[kind] = str(rng.choice([word for word in words if word != right[kind]]))
            if kind != "color" or tinted["colour"]:
                known[said[kind].split()[0]] = kind, said[kind] == right[kind]
        noun = BY_NOUN[tinted["noun"]].plural if said["count"] != "one" else tinted["noun"]
        text = f"This is a {said['place']} with {said['count']} {said['color']} {noun}."
        found.append(Stated(text, partial(_known, known)))
    return found


def _known(known: Mapping[str, tuple[str, bool]], word: str) -> tuple[str, bool] | None:
    return known.get(word.lower())


def _object(truth: Collection[str], word: str) -> tuple[str, bool] | None:
    found = object_words().fullmatch(word)
    return None if found is None else ("object", WORDS[found.group(1).lower()] in truth)


def _units(
    subject: Subject,
    texts: Sequence[Stated],
    truth: Mapping[str, set[str]],
    reporter: Reporter,
    title: str,
    fixed: list[tuple[int, list[str]]],
) -> Iterator[Unit]:
    """Every known word of some texts, one text for each item, with its scores; `fixed` gets what hijacked vision tokens say."""
    model, processor = subject.loaded
    parts, tokenizer = ModelParts.of(model), processor.tokenizer
    chosen = settings_of(model)[0]["layer"]
    other: ReadText | None = None
    rows = [(place, item, stated) for place, (item, stated) in enumerate(zip(subject.items, texts, strict=False))]
    for place, item, stated in track(reporter, title, rows):
        words = [found.group() for found in WORD.finditer(stated.text)]
        if not any(stated.judge(word) for word in words):
            continue
        read, blank = (_read(subject, item, stated.text, gray) for gray in (False, True))
        spoken = [
            (known, own, first_tokens(tokenizer, stated.text[start:end], read.tokens[own[0]]))
            for start, end, own in word_places(stated.text, read.spans)
            if (known := stated.judge(stated.text[start:end])) is not None
        ]
        ids = sorted({token for _, own, firsts in spoken for token in (*firsts, *(read.tokens[n] for n in own))})
        tables, favorites = zip(
            *(_said(read.head, read.vision[layer], ids) for layer in sorted(read.vision)), strict=True
        )
        chances = dict(zip(ids, torch.stack(tables).movedim(-1, 0), strict=True))  # id -> (layers, vision tokens)
        elsewhere = dict(zip(ids, say(read.head, (other or blank).vision[chosen], ids).T, strict=True))
        hijacked = _hijacked(tokenizer, torch.stack(favorites[1:]), truth[item.id])
        fixed.append((len(hijacked), [token_text(tokenizer, int(t)) for t in favorites[-1][hijacked]]))
        last = read.head.all_logits(read.vision[parts.depth])  # (vision tokens, V)
        for (kind, present), own, firsts in spoken:
            reading = _reading(read, blank, own[0], chances[read.tokens[own[0]]], last, hijacked)
            scores = {name: score(reading) for name, score in CANDIDATES.items()}
            for layer in sorted(read.vision):
                scores[f"layer {layer}"] = max(top(chances[token][layer]) for token in firsts)
            scores[CHECK], scores[OTHER] = scores[f"layer {chosen}"], max(top(elsewhere[token]) for token in firsts)
            each = [top(chances[read.tokens[n]][chosen]) for n in own]
            scores |= {rule: join(each) for rule, join in JOINED.items()}
            selected = bool(hijacked[int(reading.divergence.argmin())])
            yield Unit(place, kind, present, len(own), selected, scores)
        other = read


@torch.no_grad()
def _said(head: Head, states: Tensor, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The probability that states give to some tokens, and their favorites.  (n, d) -> (n, ids), (n,)"""
    logits = head.all_logits(states)
    return (logits[:, list(ids)] - logits.logsumexp(-1, keepdim=True)).exp(), logits.argmax(-1)


def _hijacked(tokenizer: Tokenizer, favorites: Tensor, truth: Collection[str]) -> Tensor:
    """Which vision tokens say one irrelevant word at every layer: no content word, or an object that is not there.  (layers, n) -> (n,)"""
    said = [token_text(tokenizer, int(token)).strip() for token in favorites[-1]]
    wrong = [not is_content(word) or (_object(truth, word) or ("", True))[1] is False for word in said]
    return torch.tensor(wrong, device=favorites.device) & (favorites == favorites[-1]).all(0)


def _read(subject: Subject, item: Item, text: str, gray: bool) -> ReadText:
    """One pass over a text and its pictures, or gray ones in their place."""
    model, processor = subject.loaded
    pictures = images(item)
    if gray:
        pictures = [Image.new("RGB", picture.size, (127, 127, 127)) for picture in pictures]
    inputs = prepare(processor, [item.prompt], [pictures], model.device)
    before = chat_text(processor, item.prompt, len(pictures))
    return read_texts(model, processor, inputs, [before], [pictures], [text], range(ModelParts.of(model).depth + 1))[0]


@torch.no_grad()
def _reading(read: ReadText, blank: ReadText, place: int, chances: Tensor, last: Tensor, hijacked: Tensor) -> Reading:
    head, token = read.head, read.tokens[place]
    log_p = head.all_logits(read.states[place][None]).log_softmax(-1)[0]
    log_p_blank = float(head.all_logits(blank.states[place][None]).log_softmax(-1)[0, token])
    keep = plausible(log_p, ALPHA)
    keep[token] = True
    table = last[:, keep].log_softmax(-1)  # (vision tokens, plausible)
    divergence = jsd(log_p[keep].log_softmax(-1), table)
    near = table[:, int(keep[:token].sum())].exp()
    return Reading(log_p, log_p_blank, token, chances, near, divergence, hijacked)


def _against_another(units: Sequence[Unit]) -> tuple[Floats, NDArray[np.bool_]]:
    """The support of words by their own picture and by another one, as if all were right and wrong: needs no labels."""
    own, other = (np.array([unit.scores[name] for unit in units]) for name in (CHECK, OTHER))
    return np.concatenate([own, other]), np.arange(2 * len(own)) < len(own)


def _reliability(scores: Floats, present: NDArray[np.bool_]) -> list[dict[str, float]]:
    """The calibration curve: of the words with a support in each range, how many are right."""
    ranges = np.searchsorted(RANGES, scores, side="right")
    return [
        {"up_to": end, "words": int(here.sum()), "right": float(present[here].mean()) if here.any() else float("nan")}
        for number, end in enumerate((*RANGES, 1.0))
        for here in [ranges == number]
    ]


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
    curve = [(f"below {r['up_to']}", str(r["words"]), percent(r["right"], 0)) for r in result["reliability"]]
    by_kind = [
        (kind, f"{m['words']} ({m['wrong']} wrong)", number(m[CHECK], 3), number(m["model's probability"], 3))
        for kind, m in result["kinds"].items()
    ]
    hijacking, entry = result["hijacking"], result["recommended"]
    said = ", ".join(repr(word) for word in hijacking["words"])
    more = (
        f"Vision tokens that say one irrelevant word at every layer: {percent(hijacking['vision_tokens'], 1)} % of all"
        f"{f' ({said})' if said else ''}; ReVisiT would select one at {percent(hijacking['selected'], 1)} % of the object words of "
        f"captions. Support against that by another picture, without labels: AUROC {number(result['another_picture'], 3)}. For "
        f'generation_config.json: "check": {{"layer": {entry["layer"]}, "threshold": {entry["threshold"]:.3g}, '
        f'"auroc": {entry["auroc"]:.3g}}}.'
    )
    return [
        table,
        Table(("Threshold", "value", "F1", "AUROC"), cuts, about),
        Table(
            ("Support", "words", "right, %"),
            curve,
            "Calibration: how many words of captions and foils are right, by support.",
        ),
        Table(("Words", "number", "AUROC of check", "of the model's probability"), by_kind, "By kind of word."),
        Text(f"{note} {more}"),
    ]
