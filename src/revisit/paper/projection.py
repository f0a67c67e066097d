"""Vision-token projection: does a single vision token, read through the LM head, name something in its image?

Every vision token is one unit. Its hidden states are projected onto the whole vocabulary and onto the object vocabulary, below the last
layer both with the decoder's final norm and without it. Recall@k is the share of units for which a word of any object of the image is among
the k likeliest. States are kept for one image, logits for a slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from revisit.eval.report.document import Block, Cell, Table, Text
from revisit.eval.report.figures import Plot, Series, curves, recall_curve
from revisit.eval.run import Reporter
from revisit.explain.prefill import force
from revisit.forward.states import normed
from revisit.forward.support import logit_slices
from revisit.models.head import Head
from revisit.models.parts import ModelParts, vocabulary_size
from revisit.paper.objects import ObjectVocabulary, best_rank, recalls
from revisit.paper.study import Result, Stored, Subject, percent, share, track

KS = (1, 5, 10, 30)  # in the table
CURVE = (1, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100)
VOCABULARIES = {"full": "whole vocabulary", "objects": "object words"}


@torch.inference_mode()
def ranks(head: Head, states: Tensor, objects: Tensor, truth: Sequence[int]) -> Tensor:
    """Return the ranks of the image's best word among all tokens and among the object words.  (n, d) -> (2, n)

    `objects` (words,) are the ids of the object vocabulary, `truth` indices into it.
    """
    indices = torch.tensor(list(truth), device=objects.device, dtype=torch.long)
    slices = [
        torch.stack([best_rank(logits, objects[indices]), best_rank(logits[:, objects], indices)])
        for logits in logit_slices(head, states)  # (rows of the slice, V)
    ]
    return torch.cat(slices, dim=1).cpu()


def hits(ranks: Tensor) -> Tensor:
    """Count the ranks below each k of the curve.  (2, n) -> (2, ks)"""
    return (ranks[..., None] < torch.tensor(CURVE)).sum(1)


def projection(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: recall@k by layer, over both vocabularies."""
    items, vocabulary, parts = subject.items, subject.vocabulary, ModelParts.of(subject.loaded[0])
    counts: dict[tuple[int, bool], Tensor] = {}  # (layer, normed) -> (2, ks)
    units = empty = 0
    for item in track(reporter, "vision tokens", items):
        truth = vocabulary.indices(item.meta["ground_truth"])
        (seen,) = force(subject.loaded[0], subject.inputs([item]), layers=range(parts.depth + 1))
        units += len(seen.vision[0])
        if not truth:  # nothing can be found: all tokens are misses
            empty += len(seen.vision[0])
            continue
        for layer, states in seen.vision.items():
            variants = {True: states}
            if layer < parts.depth:
                variants = {False: states, True: normed(parts.final_norm, states)}
            for norm, variant in variants.items():
                found = hits(ranks(seen.head, variant, vocabulary.tensor(seen.head.device), truth))
                counts[layer, norm] = counts.get((layer, norm), 0) + found
    return {
        "images": len(items),
        "tokens": units,
        "tokens_without_ground_truth_word": empty,
        "vocabulary": {"full": vocabulary_size(parts.model), **vocabulary.summary()},
        "chance": chance(subject, vocabulary),
        "final_layer": parts.depth,
        "layers": [
            {
                "layer": layer,
                "norm": norm,
                **{kind: recalls(row, units, CURVE) for kind, row in zip(VOCABULARIES, found.tolist(), strict=True)},
            }
            for (layer, norm), found in sorted(counts.items())
        ],
    }


def chance(subject: Subject, vocabulary: ObjectVocabulary) -> list[dict[str, float]]:
    """Compute the recall of a random order of the object words: 1 − C(words − shown, k) / C(words, k), mean over images."""
    words = len(vocabulary.words)
    shown = [len(vocabulary.indices(item.meta["ground_truth"])) for item in subject.items]
    return [
        {"k": k, "recall": sum(1 - math.comb(words - n, k) / math.comb(words, k) for n in shown) / len(shown)}
        for k in CURVE
        if k <= words
    ]


def last_layer(result: Stored, kind: str) -> dict[int, Stored]:
    """Return the recall at the final layer over one vocabulary, by k."""
    last = next(row for row in result["layers"] if row["layer"] == result["final_layer"])
    return {row["k"]: row for row in last[kind]}


def draw(result: Stored, name: str) -> list[Block]:
    """Draw recall at the final layer as a table and as curves, and recall by hidden state."""
    last = {kind: last_layer(result, kind) for kind in VOCABULARIES}
    by_chance = {row["k"]: row["recall"] for row in result["chance"]}
    lines: list[tuple[Cell | str, ...]] = [
        (f"top-{k}", *(share(last[kind][k], decimals=2) for kind in VOCABULARIES), percent(by_chance.get(k)))
        for k in KS
    ]
    words = result["vocabulary"]
    text = (
        f"{result['tokens']:,} vision tokens of {result['images']} images; a hit is a word for any object of the image. Whole vocabulary: "
        f"{words['full']:,} tokens; object vocabulary: {words['words']} words of {words['categories']} categories."
    )
    ordered = [recall_curve(label, list(last[kind].values())) for kind, label in VOCABULARIES.items()]
    ordered.append(Series("object words, random order", [100 * y for y in by_chance.values()], list(by_chance)))
    by_layer = []
    for kind, label in VOCABULARIES.items():
        for norm, how in ((True, "final norm"), (False, "no norm")):
            rows = [row for row in result["layers"] if row["norm"] is norm]
            found = [100 * row[kind][0]["recall"] for row in rows]
            by_layer.append(Series(f"{label}, {how}", found, [row["layer"] for row in rows]))
    panels = [
        Plot(ordered, "final layer", "k", "recall@k (%)", log=True),
        Plot(by_layer, "by layer", "hidden state (0: projector output)", "recall@1 (%)"),
    ]
    layers = []
    for row in result["layers"]:
        cells = [next(r for r in row[kind] if r["k"] == k) for kind in VOCABULARIES for k in (1, 10)]
        layers.append((str(row["layer"]), "final" if row["norm"] else "none", *(percent(c["recall"]) for c in cells)))
    heads = ("Top-k", *VOCABULARIES.values(), "object words, random order")
    caption = "At-least-one recall@k (%) of single vision tokens at the final layer, with 95 % Wilson intervals."
    drawn = "Single vision tokens read through the LM head: recall@k at the final layer (left), and recall@1 at every hidden state (right)."
    listed = "Recall (%) by hidden state (0 is the projector's output), with the decoder's final norm and without it."
    groups = [(label, 2) for label in VOCABULARIES.values()]
    states = ("Hidden state", "Norm", *("@1", "@10") * 2)
    by_state = Table(states, layers, listed, groups, left=2, folded=len(layers) > 20)
    return [Text(text), Table(heads, lines, caption), curves(name, drawn, panels), by_state]
