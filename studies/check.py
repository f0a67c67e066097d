"""Which detector best separates words for objects in the image from words for absent objects?

The texts are captions, by the model itself or by another one, and foils: sentences that list the objects in the image, one of them replaced
by an absent one. The first half of the images sets each detector's threshold (largest F1 of flagging absent objects), the second half
measures. For generated scenes, another sentence states a place, a count and a color, each of them wrong in half of the images.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from revisit.decoding.method import layers_of_32
from revisit.embedded.catalog import BY_NOUN, COLORS, PLACE_BY_NAME
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.report.document import Block, Table
from revisit.eval.run import Reporter
from revisit.explain.calibration import candidate_layers
from revisit.explain.check import THRESHOLD, settings_of
from revisit.explain.checkable import WORD
from revisit.explain.support import ModelText, first_tokens, read_texts
from revisit.explain.sweep import Flags, Floats, auroc, best_threshold, quality
from revisit.forward.attention import watching
from revisit.forward.states import Hooks
from revisit.forward.support import TOP, logit_slices
from revisit.methods.sadt import agreeing, forms, normal
from revisit.models.parts import ModelParts, vision_mask
from revisit.models.prompts import chat_text, prepare
from revisit.models.tokens import token_text
from revisit.paper.study import Result, Subject, images, number, percent, track
from revisit.words import WORDS, category
from studies.detectors import CHECK, DETECTORS, PROBABILITY, Reading, average_precision

if TYPE_CHECKING:
    from revisit.forward.attention import Call

SADT_PATCHES = 4  # vision tokens with the most attention that SADT reads in each late layer
RESAMPLES = 1000
COUNTS = ("one", "two", "three", "four")
RANGES = (0.01, 0.05, 0.2, 0.4, 0.6, 0.8)  # of support
KINDS = ("captions", "foils")  # of texts whose object words are compared
Known = tuple[str, bool]  # kind of a word, and whether it is right about the image


@dataclass(frozen=True)
class Stated:
    """A text about an image, and a function that judges its words; it returns None for words that are not compared."""

    text: str
    judge: Callable[[str], Known | None]


@dataclass(frozen=True)
class Unit:
    """One word of a text, with its score by each detector, and its support by each layer."""

    image: int
    kind: str  # object, place, count, color
    right: bool
    scores: dict[str, float]


class Reader:
    """Read texts with the model and score their words, one image at a time."""

    def __init__(self, subject: Subject) -> None:
        self.model, self.processor = subject.loaded
        self.parts, self.tokenizer = ModelParts.of(self.model), self.processor.tokenizer
        self.states = range(self.parts.depth + 1)
        self.late = layers_of_32(20, 27, self.parts.depth)
        self.layers, self.layer = candidate_layers(self.model), settings_of(self.model)[0]

    @torch.no_grad()
    def words(
        self, item: Item, texts: Mapping[str, Stated]
    ) -> Iterator[tuple[str, tuple[int, int], Known, dict[str, float]]]:
        """Yield the name of the text, the span, the truth and the scores of every judged word, from one forward pass."""
        kept = {name: stated for name, stated in texts.items() if any(map(stated.judge, WORD.findall(stated.text)))}
        if not kept:
            return
        reads, states, attention = self._run(item, [stated.text for stated in kept.values()])
        judged = [
            (row, name, (start, end), own, known)
            for row, (name, read) in enumerate(zip(kept, reads, strict=True))
            for start, end, own in read.words
            if (known := kept[name].judge(read.text[start:end])) is not None
        ]
        firsts = [
            first_tokens(self.tokenizer, reads[row].text[slice(*at)], reads[row].tokens[own[0]])
            for row, _, at, own, _ in judged
        ]
        ids = {reads[row].tokens[n] for row, _, _, own, _ in judged for n in own}.union(*firsts)
        patches = torch.stack([reads[0].states.vision[state] for state in self.states])  # texts come after the image
        chances, favorites = self._vision(reads[0], sorted(ids))
        for (row, name, at, own, known), group in zip(judged, firsts, strict=True):
            read, place = reads[row], own[0]
            tokens = tuple(read.tokens[n] for n in own)
            attended = attention[:, row, place]  # (layers, vision tokens)
            best = attended[list(self.late)].topk(min(SADT_PATCHES, attended.shape[-1])).indices.tolist()
            predicted = [normal(favorites[layer][n]) for layer, some in zip(self.late, best, strict=True) for n in some]
            support = [
                max(float(chances[t][s].topk(min(TOP, attended.shape[-1])).values.mean()) for t in group)
                for s in self.states
            ]
            reading = Reading(
                read.states.head.all_logits(states[-1, row, place][None])[0].log_softmax(-1),
                tokens,
                torch.stack([chances[token] for token in tokens]),
                patches,
                prompt=states[:, row, 0],
                state=states[:, row, place],
                attention=attended,
                agreement=len(agreeing(predicted, forms(read.text[slice(*at)].lower()))) / len(predicted),
                support=support[self.layer],
            )
            scores = {detector: score(reading) for detector, score in DETECTORS.items()}
            yield name, at, known, scores | {f"layer {layer}": support[layer] for layer in self.layers}

    def _run(self, item: Item, texts: Sequence[str]) -> tuple[list[ModelText], Tensor, Tensor]:
        """Run the model on all texts about an image.

        Returns the texts, and the states (states, texts, tokens, d) and attention (layers, texts, tokens, vision tokens) at the
        positions that predict the tokens.
        """
        shown, count = images(item), len(texts)
        inputs = prepare(self.processor, [item.prompt] * count, [shown] * count, device=self.model.device)
        before = [chat_text(self.processor, item.prompt, shown)] * count
        start = inputs["input_ids"].shape[1] - 1
        mask = vision_mask(inputs["input_ids"][0], self.parts.vision_ids)
        states: list[Tensor] = []
        attention: list[Tensor] = []

        def watch(call: Call) -> None:
            attention.append(call.scores(start).softmax(-1).mean(1)[:, :, : start + 1][:, :, mask])

        with ExitStack() as stack:
            stack.enter_context(watching(self.parts, watch, "The study of check"))
            hooks = Hooks(stack)
            for state in self.states:
                hooks.state(self.parts, state, lambda hidden: states.append(hidden[:, start:].clone()))
            reads = read_texts(self.model, self.processor, inputs, before, [shown] * count, texts, self.states)
        return reads, torch.stack(states), torch.stack(attention)

    def _vision(self, read: ModelText, ids: Sequence[int]) -> tuple[dict[int, Tensor], dict[int, list[str]]]:
        """Read the vision tokens through the head: token -> (states, vision tokens), late layer -> their likeliest words."""
        tables, favorites = [], {}
        for state in self.states:
            logits = torch.cat(list(logit_slices(read.states.head, read.states.vision[state])))
            tables.append((logits[:, ids] - logits.logsumexp(-1, keepdim=True)).exp())
            if state in self.late:
                favorites[state] = [token_text(self.tokenizer, token).strip() for token in logits.argmax(-1).tolist()]
        return dict(zip(ids, torch.stack(tables).movedim(-1, 0), strict=True)), favorites


# -- texts ---------------------------------------------------------------------------------------------------------


def foil(seed: int, truth: Collection[str]) -> str:
    """Return a sentence that lists the objects in an image, one replaced by an absent one; empty if there are none."""
    rng = np.random.default_rng(seed)
    present = [name for name in sorted(truth) if " " not in name]
    absent = sorted({name for name in WORDS.values() if " " not in name} - set(truth))
    if not present:
        return ""
    listed = list(rng.permutation(present)[:4])
    listed[int(rng.integers(len(listed)))] = str(rng.choice(absent))
    phrases = [f"a {name}" for name in listed]
    return f"The image shows {', '.join(phrases[:-1])}{' and ' if phrases[1:] else ''}{phrases[-1]}."


def attributes(folder: Path) -> list[Stated]:
    """Return a sentence about each generated scene with a place, a count and a color, each wrong in half of them."""
    found = []
    path = folder / "scenes.jsonl"
    for seed, line in enumerate(path.read_text("utf-8").splitlines() if path.exists() else ()):
        shown, rng = json.loads(line), np.random.default_rng(seed)
        tinted = next((thing for thing in shown["objects"] if thing["colour"]), shown["objects"][0])
        count = min(4, sum(thing["noun"] == tinted["noun"] for thing in shown["objects"]))
        right = {"place": shown["place"], "count": COUNTS[count - 1], "color": tinted["colour"] or "red"}
        stated, known = dict(right), dict[str, Known]()
        for kind, words in (("place", PLACE_BY_NAME), ("count", COUNTS), ("color", COLORS)):
            if rng.integers(2):
                stated[kind] = str(rng.choice([word for word in words if word != right[kind]]))
            if kind != "color" or tinted["colour"]:
                known[stated[kind].split()[0]] = kind, stated[kind] == right[kind]
        noun = BY_NOUN[tinted["noun"]].plural if stated["count"] != "one" else tinted["noun"]
        text = f"This is a {stated['place']} with {stated['count']} {stated['color']} {noun}."
        found.append(Stated(text, known.get))
    return found


def judge_object(truth: Collection[str], word: str) -> Known | None:
    """Judge an object word by the categories in the image."""
    found = category(word)
    return None if found is None else ("object", found in truth)


# -- the study -----------------------------------------------------------------------------------------------------


def run(subject: Subject, reporter: Reporter, writer: str | None = None) -> Result:
    """Run the study with captions by the model itself, or by another model."""
    author = subject.replace(model=writer) if writer else subject
    truth = [set(item.meta["ground_truth"]) for item in subject.items]
    tokenizer = author.loaded[1].tokenizer
    captions = [tokenizer.decode(c.tokens, skip_special_tokens=True).strip() for c in author.captions(reporter)]
    foils = [foil(image, present) for image, present in enumerate(truth)]
    texts = {
        kind: [Stated(text, partial(judge_object, present)) for present, text in zip(truth, found, strict=True)]
        for kind, found in zip(KINDS, (captions, foils), strict=True)
    }
    texts["attributes"] = attributes(subject.folder)[: subject.limit]
    reader = Reader(subject)
    units: dict[str, list[Unit]] = {kind: [] for kind in texts}
    for image, item in enumerate(track(reporter, "texts", subject.items)):
        stated = {kind: found[image] for kind, found in texts.items() if image < len(found)}
        for kind, _, known, scores in reader.words(item, stated):
            units[kind].append(Unit(image, *known, scores))
    return measure(units, subject, reader)


def measure(units: Mapping[str, list[Unit]], subject: Subject, reader: Reader) -> Result:
    """Set thresholds on the first half of the images, and measure on the second."""
    half = len(subject.items) // 2
    first = [unit for unit in units["captions"] if unit.image < half]
    second = {kind: [unit for unit in units[kind] if unit.image >= half] for kind in KINDS}
    if any(len({unit.right for unit in found}) < 2 for found in (first, second["captions"])):
        raise RevisitError(
            "The captions of each half of the images must name both present and absent objects: use more images."
        )
    cut = best_threshold(*columns(first, CHECK))
    thresholds = {"the model's own": settings_of(reader.model)[1], "labels of the first half": cut, "fixed": THRESHOLD}
    every = [unit for kind in KINDS for unit in second[kind]] + units["attributes"]
    objects = [unit for unit in every if unit.kind == "object"]
    return {
        "images": len(subject.items),
        "layer": reader.layer,
        "depth": reader.parts.depth,
        "rows": [
            {
                "name": name,
                "validation": or_none(auroc(*columns(first, name))),
                **{
                    kind: _quality(found, name, best_threshold(*columns(first, name))) for kind, found in second.items()
                },
            }
            for name in DETECTORS
        ],
        "thresholds": thresholds,
        "check": {
            kind: {
                "f1": {rule: quality(*columns(found, CHECK), cut).f1 for rule, cut in thresholds.items()},
                "words": len(found),
                "absent": sum(not unit.right for unit in found),
            }
            for kind, found in second.items()
        },
        "layers": [
            {
                "layer": layer,
                "validation": or_none(auroc(*columns(first, f"layer {layer}"))),
                **{kind: or_none(auroc(*columns(found, f"layer {layer}"))) for kind, found in second.items()},
            }
            for layer in reader.layers
        ],
        "reliability": _reliability(*columns(objects, CHECK)),
        "kinds": {
            kind: {
                "words": len(found),
                "wrong": sum(not unit.right for unit in found),
                **{name: or_none(auroc(*columns(found, name))) for name in (CHECK, PROBABILITY)},
            }
            for kind in dict.fromkeys(unit.kind for unit in every)
            for found in [[unit for unit in every if unit.kind == kind]]
        },
    }


def columns(units: Sequence[Unit], name: str) -> tuple[Floats, Flags]:
    """Return a detector's scores of some words, and which of these words are right."""
    return np.array([unit.scores[name] for unit in units]), np.array([unit.right for unit in units], bool)


def or_none(value: float) -> float | None:
    """Replace NaN by None for JSON; the AUROC is NaN if all words are right."""
    return None if np.isnan(value) else float(value)


def _quality(units: Sequence[Unit], name: str, threshold: float) -> Result:
    scores, right = columns(units, name)
    low, high = interval(scores, right, [unit.image for unit in units])
    precision = average_precision(scores, right)
    values = {
        "auroc": auroc(scores, right),
        "low": low,
        "high": high,
        "ap": precision,
        "f1": quality(scores, right, threshold).f1,
    }
    return {key: or_none(value) for key, value in values.items()}


def interval(scores: Floats, right: Flags, groups: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the AUROC; groups of words (images) are resampled."""
    rng = np.random.default_rng(0)
    rows = [np.flatnonzero(np.array(groups) == group) for group in np.unique(groups)]
    drawn = []
    for _ in range(RESAMPLES):
        some = np.concatenate([rows[n] for n in rng.integers(len(rows), size=len(rows))])
        drawn.append(auroc(scores[some], right[some]))
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _reliability(scores: Floats, right: Flags) -> list[Result]:
    """Return the calibration curve: the share of right words by ranges of support."""
    ranges = np.searchsorted(RANGES, scores, side="right")
    return [
        {"up_to": end, "words": int(here.sum()), "right": float(right[here].mean()) if here.any() else None}
        for index, end in enumerate((*RANGES, 1.0))
        for here in [ranges == index]
    ]


def draw(result: Mapping[str, Any]) -> list[Block]:
    """Draw one row per detector, then the thresholds, the calibration, and `revisit.check` by kind of word and by layer."""
    measured = {kind: result["check"][kind] for kind in KINDS}
    lines = [
        [row["name"], number(row["validation"], 3), *(text for kind in KINDS for text in quality_cells(row[kind]))]
        for row in result["rows"]
    ]
    counts = " and ".join(f"{m['words']} object words of {kind}, {m['absent']} absent" for kind, m in measured.items())
    caption = (
        f"How well a score separates present from absent objects: {counts}, in the second half of {result['images']} images. The first "
        "half sets each threshold of F1. AUROC with 95 % intervals over images."
    )
    heads = ("Score", "validation AUROC", *("AUROC", "average precision", "F1") * 2)
    cuts = [
        (rule, number(cut, 4), *(number(m["f1"][rule], 3) for m in measured.values()))
        for rule, cut in result["thresholds"].items()
    ]
    about = f"F1 of `revisit.check` (layer {result['layer']} of {result['depth']}), by how its threshold is set."
    curve = [(f"below {r['up_to']}", str(r["words"]), percent(r["right"], 0)) for r in result["reliability"]]
    by_kind = [
        (kind, f"{m['words']} ({m['wrong']} wrong)", number(m[CHECK], 3), number(m[PROBABILITY], 3))
        for kind, m in result["kinds"].items()
    ]
    by_layer = [
        (str(found["layer"]), *(number(found[key], 3) for key in ("validation", *KINDS))) for found in result["layers"]
    ]
    return [
        Table(heads, lines, caption, (("", 1), ("captions", 3), ("foils", 3))),
        Table(("Threshold", "value", *KINDS), cuts, about),
        Table(("Support", "words", "right, %"), curve, "Calibration: how many object words are right, by support."),
        Table(("Words", "number", "AUROC of check", "of the model's probability"), by_kind, "By kind of word."),
        Table(
            ("Layer", "validation AUROC", *KINDS),
            by_layer,
            f"AUROC of the mean of {TOP} largest, by layer.",
            folded=True,
        ),
    ]


def quality_cells(found: Mapping[str, float | None]) -> list[str]:
    """Format AUROC with its interval, average precision and F1."""
    area, low, high, precision, score = (number(found[key], 3) for key in ("auroc", "low", "high", "ap", "f1"))
    return [f"{area} [{low}, {high}]", precision, score]
