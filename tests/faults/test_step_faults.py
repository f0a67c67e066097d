"""Thousands of random steps: the fast backends agree with the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
import random_cases


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["batched", "cached"])
def test_a_thousand_random_steps_agree_with_the_reference(backend: str) -> None:
    counts, differences = random_cases.run(range(92_000_000, 92_001_000), backend)
    print(f"\n{backend}: {dict(counts)}")
    assert not differences, differences
