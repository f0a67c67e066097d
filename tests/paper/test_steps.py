"""The selection of hallucinated words, and ranks at them, on captions with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from revisit.eval.benchmarks.base import Item
from revisit.paper import steps
from revisit.paper.objects import ObjectVocabulary
from revisit.paper.study import Caption
from word_tokenizers import train

pytestmark = pytest.mark.usefixtures("nltk_data")


def caption(text: str, truth: list[str], name: str = "1") -> Caption:
    tokenizer = train("bytes")
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    return Caption(Item(name, "Describe.", (Path("x.png"),), {"ground_truth": truth}), tokens)


def test_selection_follows_the_papers_rules() -> None:
    tokenizer = train("bytes")
    vocabulary = ObjectVocabulary.of(tokenizer)
    captions = [
        caption("There is a dog and a cat near the zebra", ["cat"], "a"),  # dog kept; zebra has several tokens
        caption("a dog on the table", ["zebra"], "b"),  # nothing in the image has a single-token word
        caption("a cat", ["cat"], "c"),  # nothing hallucinated
        caption("two dogs near a dog and a wine glass", ["cat"], "d"),  # dogs and dog kept; a pair is several tokens
    ]
    chosen = steps.select(captions, tokenizer, vocabulary)
    assert [(c.item.id, m.word, m.text) for c, kept in chosen.kept for m in kept] == [
        ("a", "dog", "dog"),
        ("d", "dog", "dogs"),
        ("d", "dog", "dog"),
    ]
    assert chosen.hallucinated == {"a", "b", "d"}
    reasons = {"word of several tokens": 2, "no ground-truth word": 2}
    assert chosen.counts == {"mentions": 9, "hallucinated": 7, "kept": 3, **reasons}


def test_ranks_leave_the_likeliest_token_out() -> None:
    tokenizer = train("bytes")
    vocabulary = ObjectVocabulary.of(tokenizer)
    one = caption("There is a dog near a cat and a cow", ["chair", "bench"])
    ((_, kept),) = steps.select([one], tokenizer, vocabulary).kept
    assert [m.word for m in kept] == ["dog", "cat", "cow"]
    token = dict(zip(vocabulary.words, vocabulary.ids, strict=True))
    logits = torch.zeros(len(kept), len(tokenizer))
    for number, mention in enumerate(kept):
        row = logits[number]
        row[one.tokens[mention.first]] = 10.0  # the token in the caption is the likeliest
        row[:number] = 5.0  # that many others are between
        row[token["bench"]] = 4.0
        row[token["seat"]] = 3.0  # a chair, but less likely than the bench
    found = steps.rank_steps(logits, one, kept, vocabulary)
    assert [step["rank"] for step in found] == [0, 1, 2]
    assert all(step["best"] == "bench" and step["likeliest"] for step in found)
