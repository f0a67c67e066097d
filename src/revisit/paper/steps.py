"""Hallucinated steps: is a word for something that *is* in the picture still near the top when the model goes wrong?

A hallucinated step is the token at which a caption names an object that the picture does not show. Kept are those whose
word is one token, and whose picture has at least one single-token word for what it does show (the paper's rules). On
the output distribution of such a step, without its likeliest token, at-least-one recall@k asks whether any word of a
shown object is among the k likeliest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from revisit.evaluation.runner import Reporter
from revisit.models.types import Tokenizer
from revisit.paper.alignment import Mention, mentions
from revisit.paper.forcing import Forced
from revisit.paper.objects import ObjectVocabulary, best_rank, recalls
from revisit.paper.study import Caption, Result, Subject, images, spoken, track

KS = (1, 5, 10, 50, 100, 500)
CURVE = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)


@dataclass(frozen=True)
class Step:
    """A hallucinated mention that was kept, and the rank of the best word for a shown object there."""

    image: str
    word: str
    text: str
    position: int  # which generated token
    rank: int  # tokens before the best ground-truth word, the likeliest token not counted
    best: str  # that word


@dataclass
class Selection:
    """Which hallucinated mentions were kept, and why the others were not."""

    kept: list[tuple[Caption, Mention]]
    counts: dict[str, int]
    hallucinated: set[str]  # images with a hallucinated mention


def select(captions: list[Caption], tokenizer: Tokenizer, vocabulary: ObjectVocabulary, end: set[int]) -> Selection:
    """The hallucinated mentions of all captions, sorted by the paper's rules."""
    counts = dict.fromkeys(("mentions", "hallucinated", "kept", "word of several tokens", "no ground-truth word"), 0)
    kept, images = [], set()
    for caption in captions:
        reachable = bool(vocabulary.places(caption.truth))
        for mention in mentions(tokenizer, spoken(caption, end)):
            counts["mentions"] += 1
            if not mention.hallucinated(caption.truth):
                continue
            counts["hallucinated"] += 1
            images.add(caption.item.id)
            if not mention.alone or mention.word not in vocabulary:
                counts["word of several tokens"] += 1
            elif not reachable:
                counts["no ground-truth word"] += 1
            else:
                counts["kept"] += 1
                kept.append((caption, mention))
    return Selection(kept, counts, images)


def hallucinated_steps(subject: Subject, reporter: Reporter) -> Result:
    """The study: recall@k at the hallucinated steps, with Wilson intervals, and every step."""
    captions = subject.captions(reporter)
    model, processor = subject.loaded
    vocabulary, end = subject.vocabulary, subject.end
    chosen = select(captions, processor.tokenizer, vocabulary, end)
    forced = Forced(model, processor)
    by_caption: dict[str, list[tuple[Caption, Mention]]] = {}
    for caption, mention in chosen.kept:
        by_caption.setdefault(caption.item.id, []).append((caption, mention))
    steps: list[Step] = []
    agree = 0
    for pairs in track(reporter, "hallucinated steps", list(by_caption.values())):
        for step, greedy in _measure(forced, pairs, vocabulary, end):
            steps.append(step)
            agree += greedy
    size = forced.parts.head.vocabulary
    return {
        "captions": len(captions),
        "hallucinated_captions": len(chosen.hallucinated),
        "selection": chosen.counts,
        "vocabulary": {"full": size, **vocabulary.summary()},
        "greedy_agreement": agree / len(steps) if steps else None,
        "recall": _recalls(steps, [k for k in KS if k < size]),
        "curve": _recalls(steps, [k for k in CURVE if k < size]),
        "steps": [asdict(step) for step in steps],
    }


def _recalls(steps: list[Step], ks: list[int]) -> list[dict[str, float]]:
    return recalls([sum(step.rank < k for step in steps) for k in ks], len(steps), ks) if steps else []


def _measure(
    forced: Forced, pairs: list[tuple[Caption, Mention]], vocabulary: ObjectVocabulary, end: set[int]
) -> list[tuple[Step, bool]]:
    """The kept steps of one caption, each with whether the likeliest token is the one that was written."""
    caption = pairs[0][0]
    tokens = spoken(caption, end)
    rows = [mention.first for _, mention in pairs]
    states = forced.states(caption.item.prompt, images(caption.item), tokens)[rows]  # (steps, d)
    places = vocabulary.places(caption.truth)
    targets = vocabulary.tensor(states.device)[places]
    with torch.no_grad():
        logits = forced.parts.head.all_logits(states)  # (steps, V): a handful of steps
    ranks = best_rank(logits, targets, without_top=True).tolist()
    found = []
    for number, (_, mention) in enumerate(pairs):
        row = logits[number].clone()
        top = int(row.argmax())
        row[top] = -torch.inf
        best = vocabulary.words[places[int(row[targets].argmax())]]
        step = Step(caption.item.id, mention.word, mention.text, mention.first, ranks[number], best)
        found.append((step, top == tokens[mention.first]))
    return found
