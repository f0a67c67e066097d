"""`tiny`, loaded once for all tests and once for each, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import revisit
from revisit.embedded.samples import sample

QUESTION = "Please describe this image in detail."
Pair = tuple[Any, Any]


@pytest.fixture(scope="session")
def images() -> list[Any]:
    return [sample("usual").image(), sample("demo").image()]


@pytest.fixture(scope="session")
def pair() -> Pair:
    return revisit.load("tiny")


@pytest.fixture
def fresh() -> Pair:
    """A pair whose model a test may change."""
    return revisit.load("tiny")


@pytest.fixture(scope="session")
def answer(images: list[Any]) -> Callable[..., list[str]]:
    """Return a function that answers the question about images with a method."""

    def answer(pair: Pair, method: Any, chosen: Any = None, **options: Any) -> list[str]:
        model, processor = pair
        chosen = images if chosen is None else chosen
        inputs = revisit.prepare(processor, [QUESTION] * len(chosen), chosen)
        torch.manual_seed(0)
        options = {"max_new_tokens": 16, "do_sample": False, **options}
        output = revisit.generate(model, **inputs, method=method, processor=processor, **options)
        return revisit.generated_text(processor, output, inputs)

    return answer
