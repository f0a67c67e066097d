"""Vision-token projection: does a single vision token, read through the LM head, name something in its picture?

Every vision token of every picture is one unit. Its hidden state at each layer is projected over the whole vocabulary
and over the object vocabulary, with the decoder's final norm and without it, and recall@k counts whether a word of any
object of the picture is among the k likeliest. Only counts are kept: states live for one picture, logits for a slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from revisit.evaluation.runner import Reporter
from revisit.models.parts import Head, ModelParts, describe
from revisit.paper.objects import ObjectVocabulary, best_rank, recalls
from revisit.paper.study import Result, Subject, track
from revisit.step.reference import CHUNK_NUMBERS
from revisit.taps.forcing import last_logits
from revisit.taps.states import Capture, Hooks, no_image, normed, vision_mask

if TYPE_CHECKING:
    from revisit.models.types import Inputs, Model

KS = (1, 5, 10, 30)
CURVE = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100)


@dataclass
class Counts:
    """Hits of one way of reading the tokens: how many of them have a word of their picture before rank k."""

    ks: tuple[int, ...]
    full: Tensor = field(init=False)  # (ks,)
    objects: Tensor = field(init=False)  # (ks,)

    def __post_init__(self) -> None:
        self.full = torch.zeros(len(self.ks), dtype=torch.long)
        self.objects = torch.zeros(len(self.ks), dtype=torch.long)

    def add(self, full: Tensor, objects: Tensor) -> None:
        """Counts the ranks (tokens,) of some tokens over both vocabularies."""
        ks = torch.tensor(self.ks)
        self.full += (full.cpu()[:, None] < ks).sum(0)
        self.objects += (objects.cpu()[:, None] < ks).sum(0)


def ranks(
    head: Head, states: Tensor, objects: Tensor, truth: Sequence[int], numbers: int = CHUNK_NUMBERS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ranks of the best word of the picture over all tokens and over the object words, some states at a time.

    `objects` (words,) are the ids of the object vocabulary, `truth` indices into it. At most `numbers` logits exist
    at once.
    """
    places = torch.tensor(list(truth), device=objects.device, dtype=torch.long)
    for part in states.split(max(1, numbers // head.vocabulary)):
        logits = head.all_logits(part)  # (b, V)
        yield best_rank(logits, objects[places]), best_rank(logits[:, objects], places)


class States:
    """The vision states of one picture at every layer, and of the last layer before its norm too."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parts = ModelParts.of(model)

    @torch.inference_mode()
    def of(self, inputs: Inputs) -> tuple[dict[int, Tensor], Tensor]:
        """(hidden state index -> (tokens, d), the last layer's output before the final norm (tokens, d))."""
        mask = vision_mask(inputs["input_ids"], self.parts.vision_ids)
        if not bool(mask.any()):
            raise no_image(self.model)
        depth, raw = self.parts.depth, []

        def keep(hidden: Tensor) -> None:
            raw.append(hidden[0, mask[0].to(hidden.device)])

        with ExitStack() as stack:
            capture = Capture(self.parts, mask, tuple(range(depth + 1)), 1, stack)
            Hooks(stack).after(self.parts.layers[-1], keep)
            outputs = self.model(**inputs, use_cache=False, **last_logits(self.model))
        assert capture.last is not None
        if self.parts.head.transform is None:
            self.parts.head.calibrate(capture.last[0], outputs.logits[0, -1], describe(self.model))
        return capture.items[0].by_layer, raw[0].to(self.parts.head.device)

    def readings(self, by_layer: dict[int, Tensor], raw: Tensor) -> Iterator[tuple[tuple[int, bool], Tensor]]:
        """((layer, whether the final norm was applied), states) for every way of reading the tokens."""
        depth, norm = self.parts.depth, self.parts.final_norm
        for layer, states in by_layer.items():
            if layer == depth:
                yield (layer, False), raw
                yield (layer, True), states
            else:
                yield (layer, False), states
                yield (layer, True), normed(norm, states).to(states.device)


def projection(subject: Subject, reporter: Reporter) -> Result:
    """The study: recall@k per layer, with and without the final norm, over both vocabularies, with Wilson intervals."""
    items, vocabulary, states = subject.items, subject.vocabulary, States(subject.loaded[0])
    counts: dict[tuple[int, bool], Counts] = {}
    units = empty = 0
    for item in track(reporter, "vision tokens", items):
        truth = vocabulary.places(item.meta["ground_truth"])
        by_layer, raw = states.of(subject.inputs([item]))
        units += len(raw)
        if not truth:  # nothing to be found: all its tokens are misses
            empty += len(raw)
            continue
        head = states.parts.head
        with torch.inference_mode():
            for key, rows in states.readings(by_layer, raw):
                for full, objects in ranks(head, rows, vocabulary.tensor(head.device), truth):
                    counts.setdefault(key, Counts(CURVE)).add(full, objects)
    return {
        "images": len(items),
        "tokens": units,
        "tokens_without_ground_truth_word": empty,
        "vocabulary": {"full": states.parts.head.vocabulary, **vocabulary.summary()},
        "chance": chance(subject, vocabulary),
        "final_layer": states.parts.depth,
        "layers": [
            {
                "layer": layer,
                "norm": with_norm,
                "full": recalls(found.full.tolist(), units, CURVE),
                "objects": recalls(found.objects.tolist(), units, CURVE),
            }
            for (layer, with_norm), found in sorted(counts.items())
        ],
    }


def chance(subject: Subject, vocabulary: ObjectVocabulary) -> list[dict[str, float]]:
    """What a random order of the object words would give: 1 − C(words − shown, k) / C(words, k), over the pictures."""
    words = len(vocabulary.words)
    shown = [len(vocabulary.places(item.meta["ground_truth"])) for item in subject.items]
    return [
        {"k": k, "recall": sum(1 - math.comb(words - n, k) / math.comb(words, k) for n in shown) / len(shown)}
        for k in CURVE
        if k <= words
    ]
