"""Three vision tokens of one picture, word by word: over the whole vocabulary, and over nine object words alone.

The paper chose picture, tokens and words by hand; here a rule does. The picture shows the most objects that have a single-token
word, the words are those and the likeliest others, and the tokens are the ones that say three of the shown words best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from revisit.benchmarks.base import Item
from revisit.evaluation.records import Stored
from revisit.evaluation.runner import Reporter
from revisit.explain.prefill import prefill_states
from revisit.models.parts import Head, ModelParts
from revisit.paper.objects import ObjectVocabulary
from revisit.paper.study import Result, Subject
from revisit.report.document import Block, Table

WORDS, TOKENS = 9, 3


def vision_words(subject: Subject, reporter: Reporter) -> Result:
    """Log-probability and probability (%) of the words at each token, read at the last layer with the decoder's norm."""
    vocabulary, model = subject.vocabulary, subject.loaded[0]
    item = max(subject.items, key=lambda item: len(shown_words(item, vocabulary)))
    head, seen = prefill_states(model, subject.inputs([item]), [ModelParts.of(model).depth])
    last = seen.states[0]  # (tokens, d)
    with torch.inference_mode():
        shares = head.logits(last, vocabulary.tensor(head.device)).float().softmax(-1).cpu()  # (tokens, object words)
    words, tokens = choose(shares, shown_words(item, vocabulary))
    with torch.inference_mode():
        full, among = log_probabilities(head, last[tokens], vocabulary.tensor(head.device)[words])
    return {
        "image": item.id,
        "ground_truth": item.meta["ground_truth"],
        "tokens": tokens,
        "rows": [
            {
                "word": vocabulary.words[word],
                "tokens": [{"full": pair(full[t, w]), "words": pair(among[t, w])} for t in range(len(tokens))],
            }
            for w, word in enumerate(words)
        ],
    }


def pair(log_probability: Tensor) -> list[float]:
    """A log-probability and its probability in percent."""
    return [float(log_probability), 100 * float(log_probability.exp())]


def shown_words(item: Item, vocabulary: ObjectVocabulary) -> list[int]:
    """One word for each object of the picture, its category's name where that is one token, as indices into the vocabulary."""
    found = []
    for category in sorted(item.meta["ground_truth"]):
        places = vocabulary.places([category])
        found += [next((p for p in places if vocabulary.words[p] == category), *places[:1])] if places else []
    return found


def choose(shares: Tensor, shown: list[int]) -> tuple[list[int], list[int]]:
    """(words, tokens): the shown words and the likeliest others; a token for each of three shown words, each token once.

    `shares` (tokens, words) are probabilities among the object words. Shown words that some token says best come first.
    """
    best = shares.amax(0)  # (words,)
    order = sorted(shown, key=lambda word: -float(best[word]))[:WORDS]
    others = [word for word in best.argsort(descending=True, stable=True).tolist() if word not in order]
    tokens: list[int] = []
    for word in (order + others)[:TOKENS]:
        ranked = shares[:, word].argsort(descending=True, stable=True).tolist()
        tokens += [next(token for token in ranked if token not in tokens)] if len(tokens) < len(ranked) else []
    return (order + others)[:WORDS], tokens


def log_probabilities(head: Head, states: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the words over the whole vocabulary, and among themselves.  -> (tokens, words) twice"""
    full = head.logits(states, torch.arange(head.vocabulary, device=words.device)).float().log_softmax(-1)[:, words]
    return full.cpu(), full.log_softmax(-1).cpu()


def draw(result: Stored, name: str) -> list[Block]:
    """A row for each word, four columns for each vision token."""
    lines = [
        (row["word"], *(f"{v:.2f}" for token in row["tokens"] for kind in ("full", "words") for v in token[kind]))
        for row in result["rows"]
    ]
    heads = ("Word", *("log-prob", "%", "log-prob", "%") * len(result["tokens"]))
    caption = (
        f"Picture {result['image']}, which shows {', '.join(result['ground_truth'])}. Of each token first over the whole "
        "vocabulary, then among these words."
    )
    return [Table(heads, lines, caption, groups=[(f"vision token {token}", 4) for token in result["tokens"]])]
