"""The probability that the image moves, for distributions with a known distance."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from revisit.eval.benchmarks.base import Item
from revisit.eval.run import Reporter
from revisit.models.thoughts import Thoughts
from revisit.paper.study import Caption
from studies import decay

WITH = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]])
WITHOUT = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.5, 0.5], [0.25, 0.25, 0.5]])


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A subject with two captions of three tokens, whose states are its distributions."""
    head = SimpleNamespace(all_logits=torch.log)
    monkeypatch.setattr(decay, "thoughts_of", lambda *_: None)
    captions = [Caption(Item(name, "?", (Path("x"),), {}), (0, 1, 2)) for name in "ab"]
    return SimpleNamespace(
        loaded=(None, None),
        inputs=lambda _: {"input_ids": torch.tensor([[9, 7]])},
        vocabulary=SimpleNamespace(ids=(1,)),
        captions=lambda _: captions,
        forced=lambda _, vision: SimpleNamespace(head=head, text=WITH if vision else WITHOUT),
    )


def test_distance_and_entropy_by_hand(subject: Any) -> None:
    found = decay.moved(subject, subject.captions(None)[0])
    assert found[:, 0] == pytest.approx([0.5, 1.0, 0.0])
    assert found[:, 1] == pytest.approx([math.log(2), 0.0, 1.5 * math.log(2)])


def test_means_by_position_and_words(subject: Any) -> None:
    result = decay.run(subject, Reporter())
    rows = {(row["words"], row["first"], row["last"]): (row["tokens"], row["moved"]) for row in result["positions"]}
    assert rows["all tokens", 1, 1] == (2, pytest.approx(0.5))
    assert rows["all tokens", 2, 3] == (4, pytest.approx(0.5))
    assert rows["object words", 2, 3] == (2, pytest.approx(1.0))  # token 1 names an object
    assert rows["object words", 1, 1] == (0, None)
    every = result["correlations"][0]
    assert (every["tokens"], every["moved"]) == (6, pytest.approx(0.5))
    assert every["entropy"] == pytest.approx(-1)
    text = str(decay.draw(result)[1])
    assert "2–3" in text
    assert np.isclose(every["low"], 0.5)  # the captions are alike


def test_thoughts_are_kept_apart(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt opens a thought, which the second token closes; positions start again with the answer."""
    monkeypatch.setattr(decay, "thoughts_of", lambda *_: Thoughts(open=7, close=1))
    result = decay.run(subject, Reporter())
    rows = {(row["words"], row["first"]): (row["tokens"], row["moved"]) for row in result["positions"]}
    assert rows["thought, all tokens", 1] == (2, pytest.approx(0.5))
    assert rows["thought, all tokens", 2] == (2, pytest.approx(1.0))
    assert rows["answer, all tokens", 1] == (2, pytest.approx(0.0))
    assert rows["answer, all tokens", 2] == (0, None)
    assert "thought, object words" in str(decay.draw(result)[1])
