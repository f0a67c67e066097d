"""Object vocabulary, ranks, and the intervals that the paper prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from revisit import RevisitError
from revisit.paper.objects import ObjectVocabulary, best_rank, recalls, without_top
from revisit.words import WORDS


def test_single_token_words(tokenizer: Any) -> None:
    vocabulary = ObjectVocabulary.of(tokenizer)
    assert {"dog", "cat", "table", "chair", "toilet", "seat", "person", "phone", "bench", "tie"} <= set(
        vocabulary.words
    )
    assert "zebra" not in vocabulary.words
    assert "wine glass" not in vocabulary.words
    for word, token in zip(vocabulary.words, vocabulary.ids, strict=True):
        assert tokenizer.decode([token]).strip() == word
        # the token is what the word becomes inside a sentence
        assert token in tokenizer.encode(f"the {word} sits", add_special_tokens=False)
    assert vocabulary.summary()["categories"] == len({WORDS[word] for word in vocabulary.words})


def test_words_of_an_image(tokenizer: Any) -> None:
    vocabulary = ObjectVocabulary.of(tokenizer)
    shown = {vocabulary.words[i] for i in vocabulary.places(["chair", "dog", "zebra"])}
    assert shown == {"chair", "seat", "dog"}


def test_a_tokenizer_without_object_words_raises() -> None:
    import families

    with pytest.raises(RevisitError, match="single token"):
        ObjectVocabulary.of(families.tokenizer())


def test_ranks_by_hand() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0], [1.0, 5.0, 4.0, 3.0, 2.0]])
    # targets 2 and 4: behind two tokens; behind one token
    assert best_rank(logits, torch.tensor([2, 4])).tolist() == [2, 1]
    assert best_rank(without_top(logits), torch.tensor([2, 4])).tolist() == [1, 0]
    # the likeliest token is no candidate, even if it is a target
    assert best_rank(logits, torch.tensor([1])).tolist() == [1, 0]
    assert best_rank(without_top(logits), torch.tensor([1])).tolist() == [0, 5]
    assert best_rank(without_top(logits), torch.tensor([1, 0])).tolist() == [0, 3]


def test_ranks_agree_with_sorting() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 40, generator=generator)
    targets = torch.tensor([3, 17, 29])
    for row, plain, rest in zip(
        logits, best_rank(logits, targets).tolist(), best_rank(without_top(logits), targets).tolist(), strict=True
    ):
        order = row.argsort(descending=True).tolist()
        assert plain == min(order.index(t) for t in targets.tolist())
        order = order[1:]
        assert rest == min(order.index(t) for t in targets.tolist() if t in order)


# (percent, units, printed bounds) of the paper's table of vision-token projections
PROJECTIONS = [
    (2.03, 1.96, 2.10),
    (7.87, 7.74, 8.00),
    (12.38, 12.23, 12.54),
    (21.72, 21.53, 21.91),
    (40.44, 40.21, 40.67),
    (69.56, 69.34, 69.78),
    (79.78, 79.59, 79.97),
    (89.24, 89.09, 89.39),
]


@pytest.mark.parametrize(("percent", "low", "high"), PROJECTIONS)
def test_wilson_intervals_of_the_projection_table(percent: float, low: float, high: float) -> None:
    (row,) = recalls([round(percent / 100 * 173_173)], 173_173, [1])
    assert [round(100 * row[key], 2) for key in ("recall", "low", "high")] == [percent, low, high]


@pytest.mark.parametrize(
    ("count", "percent", "low", "high", "printed"),
    [
        (120, 63.2, 56.1, 69.7, (56.0, 70.0)),
        (140, 73.7, 67.0, 79.4, (66.9, 79.6)),
        (182, 95.8, 91.9, 97.9, (91.6, 98.1)),
    ],
)
def test_wilson_intervals_of_the_step_table(
    count: int, percent: float, low: float, high: float, printed: tuple[float, float]
) -> None:
    """The printed bounds for n = 190 are up to 0.3 points wider than Wilson's (no common interval gives them)."""
    (row,) = recalls([count], 190, [50])
    assert [round(100 * row[key], 1) for key in ("recall", "low", "high")] == [percent, low, high]
    assert (100 * row["low"], 100 * row["high"]) == pytest.approx(printed, abs=0.32)
