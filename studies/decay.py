"""Grounding decay: how much of a step's probability does the image move, by position in the answer?

Each caption is run twice by teacher forcing, with its image and without the vision tokens of the prompt. The moved probability is the total
variation distance of the two output distributions: 0 % if they are equal, 100 % if they share no token. Two published hypotheses are that
it decays along long answers, and that it is largest where the model is uncertain. Thoughts and answers of models that think are measured
separately.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from revisit.eval.report.document import Block, Cell, Table, Text
from revisit.eval.run import Reporter
from revisit.eval.statistics import mean_interval
from revisit.models.thoughts import thoughts_of
from revisit.paper.study import Caption, Result, Stored, Subject, number, share, track

Floats = NDArray[np.float64]
WORDS = ("all tokens", "object words", "other tokens")


@torch.no_grad()
def moved(subject: Subject, caption: Caption) -> Floats:
    """Return the moved probability at each token of a caption, and the model's entropy there in nats.  -> (tokens, 2)"""
    runs = [subject.forced(caption, vision=vision) for vision in (True, False)]
    log_p, log_q = (seen.head.all_logits(seen.text).double().log_softmax(-1) for seen in runs)
    distance = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    entropy = -(log_p.exp() * log_p).nansum(-1)
    found: Floats = torch.stack([distance, entropy], dim=1).cpu().numpy()
    return found


def in_thought(subject: Subject, caption: Caption) -> list[bool]:
    """Return which tokens of a caption belong to a thought."""
    thoughts = thoughts_of(*subject.loaded)
    if thoughts is None:
        return [False] * len(caption.tokens)
    prompt = subject.inputs([caption.item])["input_ids"][0].tolist()
    return thoughts.split(caption.tokens, thoughts.open_at_end(prompt)).in_thought


def run(subject: Subject, reporter: Reporter) -> Result:
    """Run the study: means by position, with intervals over captions, and rank correlations with position and entropy."""
    from scipy.stats import spearmanr

    captions = [caption for caption in subject.captions(reporter) if caption.tokens]
    objects = set(subject.vocabulary.ids)
    rows = []  # caption, position from 1, names an object, moved, entropy, within a thought
    for index, caption in enumerate(track(reporter, "with and without the image", captions)):
        count = Counter[bool]()  # tokens of the answer and of thoughts so far
        phases = in_thought(subject, caption)
        for token, values, thought in zip(caption.tokens, moved(subject, caption), phases, strict=True):
            count[thought] += 1
            rows.append((index, count[thought], token in objects, *values, thought))
    table = np.array(rows, float)
    thoughts = table[:, 5] > 0
    phase_names = {"thought, ": table[thoughts], "answer, ": table[~thoughts]} if thoughts.any() else {"": table}
    sets: dict[str, Floats] = {}
    for phase, found in phase_names.items():
        named = found[:, 2] > 0
        parts = zip(WORDS, (found, found[named], found[~named]), strict=True)
        sets |= {f"{phase}{words}": part for words, part in parts}
    bounds = [2**n for n in range(int(table[:, 1].max()).bit_length() + 1)]  # 1, 2–3, 4–7, …
    return {
        "captions": len(captions),
        "positions": [
            {"words": words, "first": a, "last": b - 1, **_mean(found[(found[:, 1] >= a) & (found[:, 1] < b)])}
            for words, found in sets.items()
            for a, b in pairwise(bounds)
        ],
        "correlations": [
            {
                "words": words,
                **_mean(found),
                **{
                    name: float(spearmanr(found[:, column], found[:, 3]).statistic) if len(found) > 2 else None
                    for name, column in (("position", 1), ("entropy", 4))
                },
            }
            for words, found in sets.items()
        ],
    }


def _mean(rows: Floats) -> Result:
    """Return the mean moved probability, with a 95 % interval over captions."""
    terms = {
        str(c): (float(own.sum()), float(len(own))) for c in np.unique(rows[:, 0]) for own in [rows[rows[:, 0] == c, 3]]
    }
    interval = mean_interval([[terms]]) if len(terms) > 1 else None
    return {
        "tokens": len(rows),
        "moved": float(rows[:, 3].mean()) if len(rows) else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
    }


def draw(result: Stored) -> list[Block]:
    """Draw the means by position, and the correlations."""
    names = dict.fromkeys(row["words"] for row in result["positions"])
    by_words = {words: [row for row in result["positions"] if row["words"] == words] for words in names}
    lines: list[tuple[Cell | str, ...]] = []
    for at in zip(*by_words.values(), strict=True):
        first, last = at[0]["first"], at[0]["last"]
        cells = [cell for row in at for cell in (str(row["tokens"]), share(row, "moved"))]
        lines.append((str(first) if first == last else f"{first}–{last}", *cells))
    related = [
        (row["words"], str(row["tokens"]), share(row, "moved"), number(row["position"]), number(row["entropy"]))
        for row in result["correlations"]
    ]
    caption = "Probability moved by the image (%), by position in the answer, with 95 % intervals over captions."
    text = f"{result['captions']} captions, each with its image and without it, by teacher forcing."
    heads = ("Words", "tokens", "moved (%)", "Spearman, position", "Spearman, entropy")
    groups = [(words, 2) for words in names]
    return [
        Text(text),
        Table(("Position", *("tokens", "moved (%)") * len(names)), lines, caption, groups=groups),
        Table(
            heads, related, "Rank correlation of the moved probability with the position and with the model's entropy."
        ),
    ]
