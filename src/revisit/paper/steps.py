"""Hallucinated steps: when a caption names an absent object, does a word for a present one still rank near the top?

The study keeps hallucinated words of one token, in captions of images with at least one single-token word for a present object (the paper's
rules). At-least-one recall@k is the share of these steps at which a word for a present object is among the k likeliest tokens, not
counting the likeliest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from revisit.eval.report.document import Block, Table, Text
from revisit.eval.report.figures import Plot, curves, recall_curve
from revisit.eval.run import Reporter
from revisit.models.parts import vocabulary_size
from revisit.models.types import Tokenizer
from revisit.paper.objects import Mention, ObjectVocabulary, best_rank, mentions, recalls, without_top
from revisit.paper.study import Caption, Result, Stored, Subject, captions_text, percent, share, track

KS = (1, 5, 10, 50, 100, 500)  # in the table
CURVE = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)


@dataclass
class Selection:
    """The hallucinated words that were kept, and the number excluded for each reason."""

    kept: list[tuple[Caption, list[Mention]]]  # by caption, without captions that have none
    counts: dict[str, int]
    hallucinated: set[str]  # images with a hallucinated word


def select(captions: list[Caption], tokenizer: Tokenizer, vocabulary: ObjectVocabulary) -> Selection:
    """Select the hallucinated words of all captions by the paper's rules."""
    counts = dict.fromkeys(("mentions", "hallucinated", "kept", "word of several tokens", "no ground-truth word"), 0)
    found = Selection([], counts, set())
    for caption in captions:
        kept = []
        for mention in mentions(tokenizer, caption.tokens):
            counts["mentions"] += 1
            if mention.category in caption.truth:
                continue
            counts["hallucinated"] += 1
            found.hallucinated.add(caption.item.id)
            if not mention.alone or mention.word not in vocabulary.words:
                counts["word of several tokens"] += 1
            elif not vocabulary.indices(caption.truth):
                counts["no ground-truth word"] += 1
            else:
                counts["kept"] += 1
                kept.append(mention)
        if kept:
            found.kept.append((caption, kept))
    return found


def hallucinated_steps(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: recall@k at the hallucinated steps, with Wilson intervals, and every step."""
    captions = subject.captions(reporter)
    model, processor = subject.loaded
    vocabulary, size = subject.vocabulary, vocabulary_size(model)
    chosen = select(captions, processor.tokenizer, vocabulary)
    steps: list[Result] = []
    for caption, kept in track(reporter, "hallucinated steps", chosen.kept):
        forced = subject.forced(caption)
        with torch.no_grad():
            logits = forced.head.all_logits(forced.text[[mention.first for mention in kept]])  # (steps, V)
            steps += rank_steps(logits, caption, kept, vocabulary)
    ks = [k for k in CURVE if k < size]
    return {
        "captions": len(captions),
        "hallucinated_captions": len(chosen.hallucinated),
        "selection": chosen.counts,
        "vocabulary": {"full": size, **vocabulary.summary()},
        "greedy_agreement": sum(step["likeliest"] for step in steps) / len(steps) if steps else None,
        "recall": recalls([sum(step["rank"] < k for step in steps) for k in ks], len(steps), ks) if steps else [],
        "steps": steps,
    }


def rank_steps(logits: Tensor, caption: Caption, kept: list[Mention], vocabulary: ObjectVocabulary) -> list[Result]:
    """Rank the best word for a present object at each step of a caption, from logits (steps, V).

    `likeliest` is True if the token in the caption is the likeliest one, which is not counted.
    """
    indices = vocabulary.indices(caption.truth)
    targets = vocabulary.tensor(logits.device)[indices]
    top = logits.argmax(-1).tolist()
    others = without_top(logits)
    ranks, best = best_rank(others, targets).tolist(), others[:, targets].argmax(-1).tolist()
    return [
        {
            "image": caption.item.id,
            "word": mention.word,
            "position": mention.first,
            "rank": ranks[number],
            "best": vocabulary.words[indices[best[number]]],
            "likeliest": top[number] == caption.tokens[mention.first],
        }
        for number, mention in enumerate(kept)
    ]


def draw(result: Stored, name: str) -> list[Block]:
    """Draw the counts, a table of recall@k and its curve."""
    chosen = result["selection"]
    text = (
        f"{captions_text(result)}{chosen['hallucinated']} hallucinated words among {chosen['mentions']}, {chosen['kept']} kept "
        f"({chosen['word of several tokens']} are not one token, {chosen['no ground-truth word']} have no single-token "
        "ground-truth word)."
    )
    if not result["recall"]:
        return [Text(text + " There is no step to measure.")]
    agreement = percent(result["greedy_agreement"], 1)
    text += f" The likeliest token by teacher forcing is the one in the caption at {agreement} % of the kept steps."
    units, size = result["recall"][0]["units"], result["vocabulary"]["full"]
    rows = [row for row in result["recall"] if row["k"] in KS]
    lines = [(f"top-{row['k']:g}", f"{100 * row['k'] / size:.2g} %", share(row)) for row in rows]
    caption = (
        f"At-least-one recall of ground-truth words at {units:,} hallucinated steps, the likeliest token left out, with 95 % Wilson "
        "intervals."
    )
    curve = recall_curve("a present object's word in the top k", result["recall"])
    return [
        Text(text),
        Table(("Top-k", "of vocabulary", "recall@k (%)"), lines, caption),
        curves(name, caption, [Plot([curve], "", "k", "recall@k (%)", log=True)]),
    ]
