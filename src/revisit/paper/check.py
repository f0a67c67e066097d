"""Which score best separates words for what an image shows from words for what it does not show?

The candidates are declared below. The first half of the images chooses among them (largest AUROC on the model's captions) and sets
the threshold (largest F1 of flagging absent objects); the second half measures. Texts are captions, of the model itself or of another
one, and foils: a template that lists what is there, with one object swapped for another. Of generated scenes, a further template
states a place, a count and a color, each of them wrong in half of the images; nothing is chosen on these.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from revisit.decoding.method import layers_of_32
from revisit.embedded.catalog import BY_NOUN, COLORS, PLACE_BY_NAME
from revisit.errors import RevisitError
from revisit.eval.benchmarks.base import Item
from revisit.eval.report.document import Block, Table, Text
from revisit.eval.run import Reporter
from revisit.explain.calibration import Floats, auroc, best_threshold, candidate_layers, category, f1
from revisit.explain.check import THRESHOLD, settings_of
from revisit.explain.checkable import WORD, is_content
from revisit.explain.prefill import logit_slices
from revisit.explain.support import TOP, ModelText, first_tokens, read_texts
from revisit.explain.tokens import token_text, word_tokens
from revisit.hooks.attention import watching
from revisit.hooks.states import vision_mask
from revisit.methods import as_method
from revisit.methods.sadt import agreeing, forms, normal, plural
from revisit.models.parts import ModelParts
from revisit.models.prompts import chat_text, prepare
from revisit.paper.study import Stored, Subject, images, number, percent, track
from revisit.step.reference import jsd, plausible
from revisit.words import CATEGORIES, WORDS

if TYPE_CHECKING:
    from revisit.hooks.attention import Call
    from revisit.models.types import Tokenizer

ALPHA = 1e-5  # of the plausible set
NEIGHBORS = 8
PATCHES = 4  # most attended vision tokens that SADT reads in each late layer
QUANTILE = 0.9  # of the support that words get from another image
RESAMPLES = 1000
COUNTS = ("one", "two", "three", "four")
RANGES = (0.01, 0.05, 0.2, 0.4, 0.6, 0.8)  # of support


@dataclass(frozen=True)
class Checked(Subject):
    """The images of a study, and who describes them."""

    writer: str | None = None  # the model whose captions are checked; by default the model itself


@dataclass(frozen=True)
class Reading:
    """What is known about one object word."""

    log_p: Tensor  # (V,) the model's log-probabilities where the word begins
    log_p_blank: float  # of the word, with a gray image in place of the image
    token: int
    chances: Tensor  # (layers, vision tokens) probability of the word over the whole vocabulary
    middle: Tensor  # (vision tokens,) its row of the middle layer
    near: Tensor  # (vision tokens,) the word's share of the plausible set at the last layer
    divergence: Tensor  # (vision tokens,) to the model's distribution on that set
    empty: Tensor  # (vision tokens,) bool: predicts the same word at every layer, and one that names nothing
    agreement: float  # share of the most attended vision tokens whose favorite is the word, in late layers
    rank: int  # how many kinds of objects the middle layer supports more
    state: Tensor  # (d,) last layer, where the word is predicted
    prompt: Tensor  # (d,) last layer, at the end of the prompt
    patches: Tensor  # (vision tokens, d) last layer
    attention: Tensor  # (vision tokens,) where the word is predicted, mean of late layers


def top(values: Tensor, k: int = TOP) -> float:
    """Return the mean of the k largest values."""
    return float(values.topk(min(k, len(values))).values.mean())


def nearest(reading: Reading, k: int) -> float:
    order = reading.divergence.argsort()[:k]
    return float(reading.near[order].mean())


def glsim(reading: Reading) -> float:
    """GLSim (arXiv:2508.19972): similarity to the prompt's end, and to the vision tokens that predict the word most.

    Weights 0.6 and 0.4, and 32 of 576 vision tokens, as released; the last layer, where the release takes the last two.
    """
    count = max(1, round(len(reading.patches) * 32 / 576))
    best = reading.patches[reading.chances[-1].topk(count).indices]
    return 0.6 * float(_cosine(reading.prompt, reading.state)) + 0.4 * float(_cosine(best, reading.state).mean())


def patch_cosine(reading: Reading) -> float:
    """Similarity to the most similar vision tokens (arXiv:2604.04863), at the last layer, without its trained classifier."""
    return top(_cosine(reading.patches, reading.state))


def dispersion(reading: Reading) -> float:
    """Entropy of the attention over vision tokens; arXiv:2604.04863 also joins neighboring patches, and trains a classifier."""
    share = reading.attention / reading.attention.sum()
    return -float(torch.special.xlogy(share, share).sum())


def _cosine(states: Tensor, other: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(states.float(), other.float(), dim=-1)


PROBABILITY = "model's probability"
# Higher means more likely present. Layers: the last, the middle (half the depth), or all that are read.
CANDIDATES: dict[str, Callable[[Reading], float]] = {
    PROBABILITY: lambda r: float(r.log_p[r.token]),
    "model's entropy, negative": lambda r: float((r.log_p.exp() * r.log_p).nansum()),
    "difference to a gray image": lambda r: float(r.log_p[r.token]) - r.log_p_blank,
    "attended tokens that say it (SADT)": lambda r: r.agreement,
    "GLSim": glsim,
    "patch cosine": patch_cosine,
    "attention dispersion, negative": lambda r: -dispersion(r),
    "least divergence, negative": lambda r: -float(r.divergence.min()),
    "nearest vision token": lambda r: nearest(r, 1),
    "nearest that names something": lambda r: float(r.near[int((r.divergence + 9.0 * r.empty).argmin())]),
    f"mean of the {NEIGHBORS} nearest": lambda r: nearest(r, NEIGHBORS),
    "largest, plausible set, last layer": lambda r: top(r.near, 1),
    f"mean of {TOP} largest, plausible set, last layer": lambda r: top(r.near),
    "largest, last layer": lambda r: top(r.chances[-1], 1),
    f"mean of {TOP} largest, last layer": lambda r: top(r.chances[-1]),
    "largest, middle layer": lambda r: top(r.middle, 1),
    f"mean of {TOP} largest, middle layer": lambda r: top(r.middle),
    "rank among kinds of objects, middle layer": lambda r: -float(r.rank),
    "largest, all layers (internal confidence)": lambda r: float(r.chances.max()),
    f"mean of {TOP} largest, mean of all layers": lambda r: top(r.chances[1:].mean(0)),
}


CHECK = "revisit.check"  # support as it gives it
OWN, OTHER = "layer", "other, layer"  # support by each layer, and by that of another image
JOINED: dict[str, Callable[[list[float]], float]] = {  # ways to join the tokens of a word
    "first": lambda each: each[0],
    "mean": lambda each: sum(each) / len(each),
    "least": min,
    "largest": max,
}


@dataclass(frozen=True)
class Unit:
    """One word of a text that is right or wrong about the image."""

    image: int
    kind: str  # object, place, count, color
    present: bool  # right
    tokens: int  # how many write it
    hijacked: bool  # whether the nearest vision token, which ReVisiT would select, is
    scores: dict[str, float]  # of the candidates, every layer, CHECK and JOINED


@dataclass(frozen=True)
class Stated:
    """A text about an image, and what is known about its words."""

    text: str
    judge: Callable[[str], tuple[str, bool] | None]  # kind of a word, and whether it is right; None: not known


def average_precision(scores: Floats, present: NDArray[np.bool_]) -> float:
    """Return the average precision of finding absent words, lowest score first; among equal scores, present words come first."""
    absent = ~present[np.lexsort((~present, scores))]
    precision = np.cumsum(absent) / np.arange(1, len(absent) + 1)
    return float(precision[absent].mean()) if absent.any() else float("nan")


def interval(units: Sequence[Unit], name: str) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the AUROC; images are resampled."""
    rng = np.random.default_rng(0)
    scores, present = _columns(units, name)
    images = np.array([unit.image for unit in units])
    groups = [np.flatnonzero(images == image) for image in np.unique(images)]
    drawn = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([groups[n] for n in rng.integers(len(groups), size=len(groups))])
        drawn.append(auroc(scores[rows], present[rows]))
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def two_groups(scores: Floats) -> float:
    """Return the threshold that splits scores into the two groups with the least variance inside (Otsu's rule, without labels)."""
    values = np.sort(scores)
    below = np.arange(1, len(values))
    sums = np.cumsum(values)[:-1]
    gap = (values.sum() - sums) / (len(values) - below) - sums / below
    place = int(np.argmax(below * (len(values) - below) * gap**2))
    return float(values[place : place + 2].mean())


def check_study(subject: Subject, reporter: Reporter) -> dict[str, Any]:
    """Run the study; see the module."""
    writer = subject
    if isinstance(subject, Checked) and subject.writer:
        writer = replace(subject, model=subject.writer)
    method = as_method(subject.methods[0], writer.loaded[0])
    truth = [set(item.meta["ground_truth"]) for item in subject.items]
    tokenizer = writer.loaded[1].tokenizer
    captions = [
        tokenizer.decode(tokens, skip_special_tokens=True).strip()
        for _, _, tokens in writer.decode(method, reporter, "captions")
    ]
    foils = [foil(place, sorted(there)) for place, there in enumerate(truth)]
    texts = {
        kind: [Stated(text, partial(_object, there)) for there, text in zip(truth, found, strict=True)]
        for kind, found in (("captions", captions), ("foils", foils))
    }
    texts["attributes"] = attributes(subject.folder)[: subject.limit]
    reader = Reader(subject)
    units: dict[str, list[Unit]] = {kind: [] for kind in texts}
    for place, item in enumerate(track(reporter, "texts", subject.items)):
        own = {kind: found[place] for kind, found in texts.items() if place < len(found)}
        for kind, unit in reader.units(place, item, own, truth[place]):
            units[kind].append(unit)
    found: dict[str, Any] = _known({**_measured(units, subject), "hijacking": reader.hijacking(units["captions"])})
    return found


def _known(found: Any) -> Any:
    """Replace undefined numbers (NaN) by None, such as the AUROC of words that are all right."""
    if isinstance(found, dict):
        return {key: _known(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_known(value) for value in found]
    return None if isinstance(found, float) and np.isnan(found) else found


def _measured(units: Mapping[str, list[Unit]], subject: Subject) -> dict[str, Any]:
    """Select on the first half of the images, and measure on the second."""
    model = subject.loaded[0]
    depth, half = ModelParts.of(model).depth, len(subject.items) // 2
    layer, threshold, _ = settings_of(model)
    chosen_on = [unit for unit in units["captions"] if unit.image < half]
    measured = {kind: [unit for unit in units[kind] if unit.image >= half] for kind in ("captions", "foils")}
    if len({unit.present for unit in chosen_on}) < 2 or len({unit.present for unit in measured["captions"]}) < 2:
        raise RevisitError(
            "The captions of each half of the images must name objects that are there and objects that are not: take more images."
        )
    validation = {name: auroc(*_columns(chosen_on, name)) for name in CANDIDATES}
    chosen = max(validation, key=validation.__getitem__)
    rows = []
    for name in (*CANDIDATES, CHECK):
        row: dict[str, Any] = {"name": name, "validation": auroc(*_columns(chosen_on, name))}
        cut = best_threshold(*_columns(chosen_on, name))
        for kind, found in measured.items():
            columns = _columns(found, name)
            low, high = interval(found, name)
            precision = average_precision(*columns)
            row[kind] = {"auroc": auroc(*columns), "low": low, "high": high, "ap": precision, "f1": f1(*columns, cut)}
        rows.append(row)
    thresholds = {
        "the model's own": threshold,
        "labels of the first half": best_threshold(*_columns(chosen_on, CHECK)),
        "two groups": two_groups(_columns(chosen_on, CHECK)[0]),
        "another image": float(np.quantile(_columns(chosen_on, f"{OTHER} {layer}")[0], QUANTILE)),
        "guess": THRESHOLD,
    }
    several = [unit for found in measured.values() for unit in found if unit.tokens > 1]
    layers = [
        {
            "layer": layer,
            "validation": auroc(*_columns(chosen_on, f"{OWN} {layer}")),
            "another_image": auroc(*_against_another(chosen_on, layer)),
            **{kind: auroc(*_columns(found, f"{OWN} {layer}")) for kind, found in measured.items()},
        }
        for layer in candidate_layers(model)
    ]
    best = max(layers, key=lambda found: float(found["validation"]))
    both = [unit for found in measured.values() for unit in found]
    others = units["attributes"]
    return {
        "images": len(subject.items),
        "depth": depth,
        "settings": {"layer": layer, "threshold": threshold},
        "chosen": chosen,
        "rows": rows,
        "thresholds": thresholds,
        "check": {
            kind: {
                "f1": {rule: f1(*_columns(found, CHECK), cut) for rule, cut in thresholds.items()},
                "words": len(found),
                "absent": sum(not unit.present for unit in found),
            }
            for kind, found in measured.items()
        },
        "layers": layers,
        "recommended": {
            "layer": best["layer"],
            "threshold": best_threshold(*_columns(chosen_on, f"{OWN} {best['layer']}")),
            "auroc": best["captions"],
        },
        "reliability": _reliability(*_columns(both, CHECK)),
        "kinds": {
            kind: {
                "words": len(found),
                "wrong": sum(not unit.present for unit in found),
                **{name: auroc(*_columns(found, name)) for name in (CHECK, PROBABILITY)},
            }
            for kind in dict.fromkeys(unit.kind for unit in (*both, *others))
            if (found := [unit for unit in (*both, *others) if unit.kind == kind])
        },
        "several_tokens": {
            "words": len(several),
            "absent": sum(not unit.present for unit in several),
            **{rule: auroc(*_columns(several, rule)) for rule in JOINED},
        },
    }


def _columns(units: Sequence[Unit], name: str) -> tuple[Floats, NDArray[np.bool_]]:
    return np.array([unit.scores[name] for unit in units]), np.array([unit.present for unit in units], bool)


def foil(number: int, truth: Sequence[str]) -> str:
    """Write a sentence that lists what is in an image, with one object swapped for an absent one; empty if nothing is there."""
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
    """Write a sentence about each generated scene with a place, a count and a color, each wrong in half of them."""
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
        found.append(Stated(text, partial(_stated, known)))
    return found


def _stated(known: Mapping[str, tuple[str, bool]], word: str) -> tuple[str, bool] | None:
    return known.get(word.lower())


def _object(truth: Collection[str], word: str) -> tuple[str, bool] | None:
    found = category(word)
    return None if found is None else ("object", found in truth)


@dataclass(frozen=True)
class Seen:
    """The predictions of the vision tokens of one image, read through the model's head at some layers."""

    layers: Sequence[int]
    chances: dict[int, Tensor]  # token -> (layers, vision tokens)
    said: dict[int, list[str]]  # layer -> the favorite word of each vision token
    last: Tensor  # (vision tokens, V) logits at the last layer
    empty: Tensor  # (vision tokens,) bool: the same favorite at every layer, and one that names nothing
    hijacked: Tensor  # (vision tokens,) bool: the same favorite at every layer, which names nothing or an absent object

    @classmethod
    @torch.no_grad()
    def of(cls, read: ModelText, tokenizer: Tokenizer, ids: Sequence[int], truth: Collection[str]) -> Seen:
        """Read the vision tokens before a text."""
        tables, favorites, logits = [], [], torch.empty(0)
        for _, states in sorted(read.vision.items()):
            logits = torch.cat(list(logit_slices(read.head, states)))
            tables.append((logits[:, ids] - logits.logsumexp(-1, keepdim=True)).exp())
            favorites.append(logits.argmax(-1))
        words = [[token_text(tokenizer, token).strip() for token in layer.tolist()] for layer in favorites]
        fixed = (torch.stack(favorites[1:]) == favorites[-1]).all(0)
        empty = fixed & fixed.new_tensor([not is_content(word) for word in words[-1]])
        wrong = fixed.new_tensor([_object(truth, word) == ("object", False) for word in words[-1]])
        layers = sorted(read.vision)
        chances = dict(zip(ids, torch.stack(tables).movedim(-1, 0), strict=True))
        return cls(layers, chances, dict(zip(layers, words, strict=True)), logits, empty, empty | (fixed & wrong))

    def support(self, tokens: Sequence[int], layer: int) -> float:
        """Compute the support of the best of some tokens like `revisit.check`."""
        row = self.layers.index(layer)
        return max((top(self.chances[token][row]) for token in tokens if token in self.chances), default=0.0)


class Reader:
    """Reads the texts of one image after another, and each text once more after a gray image."""

    def __init__(self, subject: Subject) -> None:
        self.model, self.processor = subject.loaded
        self.parts, self.tokenizer = ModelParts.of(self.model), self.processor.tokenizer
        self.layers = candidate_layers(self.model)
        self.late = [layer for layer in layers_of_32(20, 27, self.parts.depth) if layer in self.layers]
        listed = [(kind, form) for word, kind in WORDS.items() for form in (word, plural(word))]
        self.objects = {kind: list[int]() for kind in CATEGORIES}  # the first tokens of its words
        for kind, word in listed:
            self.objects[kind] += word_tokens(self.tokenizer, word)[:1]
        self.before: Seen | None = None  # the image before
        self.tokens, self.words = 0, Counter[str]()  # all vision tokens, and the words of the hijacked ones

    def units(
        self, place: int, item: Item, texts: Mapping[str, Stated], truth: Collection[str]
    ) -> list[tuple[str, Unit]]:
        """Return every known word of the texts about one image, with its scores."""
        kept = {kind: stated for kind, stated in texts.items() if any(map(stated.judge, WORD.findall(stated.text)))}
        if not kept:
            return []
        written = [stated.text for stated in kept.values()]
        reads, attention = self.read(item, written, gray=False)
        blanks, _ = self.read(item, written, gray=True)
        ids = {token for read in reads for token in read.tokens}.union(*self.objects.values())
        seen = Seen.of(reads[0], self.tokenizer, sorted(ids), truth)  # texts come after the image and change nothing
        found = []
        for (kind, stated), read, blank, attended in zip(kept.items(), reads, blanks, attention, strict=True):
            for start, end, own in read.words:
                word = stated.text[start:end]
                if (known := stated.judge(word)) is not None:
                    reading = self.reading(seen, read, blank, attended[:, own[0]], own[0], word)
                    scores = {name: score(reading) for name, score in CANDIDATES.items()}
                    selected = bool(seen.hijacked[int(reading.divergence.argmin())])
                    scores |= self.supports(seen, read, own, word)
                    found.append((kind, Unit(place, *known, len(own), selected, scores)))
        self.before = seen
        self.tokens += len(seen.hijacked)
        self.words.update(
            word for word, wrong in zip(seen.said[self.parts.depth], seen.hijacked.tolist(), strict=True) if wrong
        )
        return found

    def read(self, item: Item, texts: Sequence[str], gray: bool) -> tuple[list[ModelText], Tensor]:
        """Run one pass over texts and their image, or a gray one, and record the attention of late layers to the vision tokens.

        Returns:
            What was read, and the attention of the position that predicts each token, (texts, layers, tokens, vision tokens).
        """
        shown = images(item)
        if gray:
            shown = [Image.new("RGB", image.size, (127, 127, 127)) for image in shown]
        inputs = prepare(self.processor, [item.prompt] * len(texts), [shown] * len(texts), self.model.device)
        before = [chat_text(self.processor, item.prompt, len(shown))] * len(texts)
        start = inputs["input_ids"].shape[1] - 1
        mask = vision_mask(inputs["input_ids"][0], self.parts.vision_ids)
        layers: list[Tensor] = []

        def hook(call: Call) -> None:
            if call.layer in self.late:
                layers.append(call.scores(start).softmax(-1).mean(1)[:, :, : start + 1][:, :, mask])

        with torch.no_grad(), watching(self.parts, hook, "The study of check"):
            found = read_texts(self.model, self.processor, inputs, before, [shown] * len(texts), texts, self.layers)
        return found, torch.stack(layers, 1)

    @torch.no_grad()
    def reading(
        self, seen: Seen, read: ModelText, blank: ModelText, attention: Tensor, place: int, word: str
    ) -> Reading:
        """Measure everything about the word that begins at a token; attention is (late layers, vision tokens)."""
        token = read.tokens[place]
        assert read.states is not None  # both, after `read_texts`
        assert blank.states is not None
        first, states = read.states[0], [read.states[place], blank.states[place]]
        log_p, log_blank = read.head.all_logits(torch.stack(states)).log_softmax(-1)
        keep = plausible(log_p, ALPHA)
        keep[token] = True
        table = seen.last[:, keep].log_softmax(-1)  # (vision tokens, plausible)
        best = attention.topk(min(PATCHES, attention.shape[-1])).indices.tolist()
        spoken = [normal(seen.said[layer][n]) for layer, some in zip(self.late, best, strict=True) for n in some]
        half = self.parts.depth // 2
        own = seen.support(first_tokens(self.tokenizer, word, token), half)
        return Reading(
            log_p,
            float(log_blank[token]),
            token,
            seen.chances[token],
            seen.chances[token][self.layers.index(half)],
            near=table[:, int(keep[:token].sum())].exp(),
            divergence=jsd(log_p[keep].log_softmax(-1), table),
            empty=seen.empty,
            agreement=len(agreeing(spoken, forms(word.lower()))) / len(spoken),
            rank=sum(seen.support(tokens, half) > own for tokens in self.objects.values()),
            state=states[0],
            prompt=first,
            patches=read.vision[self.parts.depth],
            attention=attention.float().mean(0),
        )

    def supports(self, seen: Seen, read: ModelText, own: Sequence[int], word: str) -> dict[str, float]:
        """Return the support of a word by every layer, also of the image before, and by each way to join its tokens."""
        firsts, chosen = first_tokens(self.tokenizer, word, read.tokens[own[0]]), settings_of(self.model)[0]
        found = {}
        for layer in self.layers:
            found[f"{OWN} {layer}"] = seen.support(firsts, layer)
            found[f"{OTHER} {layer}"] = 0.0 if self.before is None else self.before.support(firsts, layer)
        each = [seen.support([read.tokens[n]], chosen) for n in own]
        return {**found, CHECK: found[f"{OWN} {chosen}"], **{rule: join(each) for rule, join in JOINED.items()}}

    def hijacking(self, captions: Sequence[Unit]) -> dict[str, Any]:
        """Count vision tokens that predict one irrelevant word at every layer, and how often ReVisiT would select one of them."""
        return {
            "vision_tokens": self.words.total() / max(1, self.tokens),
            "selected": float(np.mean([unit.hijacked for unit in captions] or [False])),
            "words": [word for word, _ in self.words.most_common(5)],
        }


def _against_another(units: Sequence[Unit], layer: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the support of words by their own image, as if all were right, and by another one, as if all were wrong."""
    own, other = (_columns(units, f"{name} {layer}")[0] for name in (OWN, OTHER))
    return np.concatenate([own, other]), np.arange(2 * len(own)) < len(own)


def _reliability(scores: Floats, present: NDArray[np.bool_]) -> list[dict[str, float]]:
    """Compute the calibration curve: the share of right words by ranges of support."""
    ranges = np.searchsorted(RANGES, scores, side="right")
    return [
        {"up_to": end, "words": int(here.sum()), "right": float(present[here].mean()) if here.any() else float("nan")}
        for number, end in enumerate((*RANGES, 1.0))
        for here in [ranges == number]
    ]


def draw(result: Stored, name: str) -> list[Block]:
    """Draw one row per candidate, measured on the second half of the images; the paper has no such study."""
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
        f"How well a number separates present from absent objects: {counts}, in the second half of {result['images']} images. The first "
        f"half sets each threshold of F1 and chooses: {result['chosen']}. AUROC with 95 % intervals over images."
    )
    heads = ("Number", "validation AUROC", *("AUROC", "average precision", "F1") * 2)
    marked = frozenset(place for place, row in enumerate(result["rows"]) if row["name"] == result["chosen"])
    table = Table(heads, lines, caption, (("", 1), ("captions", 3), ("foils", 3)), marked)
    cuts = [
        (rule, number(cut, 4), *(number(m["f1"][rule], 3) for m in measured.values()))
        for rule, cut in result["thresholds"].items()
    ]
    about = f"F1 of `revisit.check` (layer {result['settings']['layer']} of {result['depth']}), by how its threshold is set."
    curve = [(f"below {r['up_to']}", str(r["words"]), percent(r["right"], 0)) for r in result["reliability"]]
    by_kind = [
        (kind, f"{m['words']} ({m['wrong']} wrong)", number(m[CHECK], 3), number(m[PROBABILITY], 3))
        for kind, m in result["kinds"].items()
    ]
    by_layer = [
        (str(found["layer"]), *(number(found[key], 3) for key in ("validation", *kinds, "another_image")))
        for found in result["layers"]
    ]
    several, hijacking, entry = result["several_tokens"], result["hijacking"], result["recommended"]
    rules = ", ".join(f"{rule} {number(several[rule], 3)}" for rule in JOINED)
    said = ", ".join(repr(word) for word in hijacking["words"])
    notes = (
        f"Words of several tokens: {several['words']}, {several['absent']} absent; AUROC by how tokens are joined: {rules}. "
        f"Vision tokens that predict one irrelevant word at every layer: {percent(hijacking['vision_tokens'], 1)} % of all"
        f"{f' ({said})' if said else ''}; ReVisiT would select one at {percent(hijacking['selected'], 1)} % of the object words of "
        f'captions. For generation_config.json: "check": {{"layer": {entry["layer"]}, "threshold": {entry["threshold"]:.3g}, '
        f'"auroc": {entry["auroc"]:.3g}}}.'
    )
    return [
        table,
        Table(("Threshold", "value", "captions", "foils"), cuts, about),
        Table(
            ("Support", "words", "right, %"),
            curve,
            "Calibration: how many words of captions and foils are right, by support.",
        ),
        Table(("Words", "number", "AUROC of check", "of the model's probability"), by_kind, "By kind of word."),
        Table(
            ("Layer", "validation AUROC", "captions", "foils", "against another image"),
            by_layer,
            f"By layer: AUROC of the mean of {TOP} largest; last, of words against the same words about another image, without labels.",
            folded=True,
        ),
        Text(notes),
    ]
