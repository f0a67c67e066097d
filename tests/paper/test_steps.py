"""Which hallucinated mentions are kept, and recall at them, on captions whose answer can be read off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from word_tokenizers import train

from revisit.benchmarks.base import Item
from revisit.paper import steps
from revisit.paper.objects import ObjectVocabulary
from revisit.paper.study import Caption, spoken

pytestmark = pytest.mark.usefixtures("nltk_data")


def caption(text: str, truth: list[str], name: str = "1") -> Caption:
    tokenizer = train("bytes")
    tokens = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    return Caption(Item(name, "Describe.", (Path("x.png"),), {"ground_truth": truth}), text, tokens)


def test_selection_follows_the_papers_rules() -> None:
    tokenizer = train("bytes")
    vocabulary, end = ObjectVocabulary.of(tokenizer), {tokenizer.eos_token_id}
    captions = [
        caption("There is a dog and a cat near the zebra", ["cat"], "a"),  # dog kept; zebra has several tokens
        caption("a dog on the table", ["zebra"], "b"),  # nothing in the picture has a single-token word
        caption("a cat", ["cat"], "c"),  # nothing hallucinated
        caption(
            "two dogs near a dog and a wine glass", ["cat"], "d"
        ),  # "dogs" and "dog" kept; a pair is several tokens
    ]
    chosen = steps.select(captions, tokenizer, vocabulary, end)
    assert [(c.item.id, m.word, m.text) for c, m in chosen.kept] == [
        ("a", "dog", "dog"),
        ("d", "dog", "dogs"),
        ("d", "dog", "dog"),
    ]
    assert chosen.hallucinated == {"a", "b", "d"}
    assert chosen.counts == {
        "mentions": 9,
        "hallucinated": 7,
        "kept": 3,
        "word of several tokens": 2,
        "no ground-truth word": 2,
    }


def test_spoken_leaves_out_the_end() -> None:
    one = caption("a cat", ["cat"])
    assert spoken(one, {one.tokens[-1]}) == one.tokens[:-1]
    assert spoken(one, set()) == one.tokens


def test_ranks_leave_the_likeliest_token_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train("bytes")
    vocabulary, end = ObjectVocabulary.of(tokenizer), {tokenizer.eos_token_id}
    one = caption("There is a dog near a cat and a cow", ["chair", "bench"])
    kept = steps.select([one], tokenizer, vocabulary, end).kept
    assert [m.word for _, m in kept] == ["dog", "cat", "cow"]
    token = dict(zip(vocabulary.words, vocabulary.ids, strict=True))
    logits = torch.zeros(len(one.tokens), len(tokenizer))
    for number, (_, mention) in enumerate(kept):
        row = logits[mention.first]
        row[one.tokens[mention.first]] = 10.0  # what was written is the likeliest
        row[:number] = 5.0  # that many others stand between
        row[token["bench"]] = 4.0
        row[token["seat"]] = 3.0  # a chair, but less likely than the bench

    class Fake:
        def states(self, _prompt: str, _images: Any, _tokens: Any) -> torch.Tensor:
            return torch.arange(len(one.tokens))[:, None]

        parts = SimpleNamespace(head=SimpleNamespace(all_logits=lambda states: logits[states[:, 0]]))

    monkeypatch.setattr("revisit.paper.study.open_image", lambda path: path)
    found = steps._measure(Fake(), kept, vocabulary, end)
    assert [step.rank for step, _ in found] == [0, 1, 2]
    assert all(step.best == "bench" for step, _ in found)
    assert all(greedy for _, greedy in found)
    rows = steps._recalls([step for step, _ in found], [1, 2, 3])
    assert [row["hits"] for row in rows] == [1, 2, 3]
    assert rows[-1]["recall"] == 1
