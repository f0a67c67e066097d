"""Thousands of random steps: the fast backends agree with the reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from revisit.step.compiled import kernel

sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
import random_cases


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["batched", "compiled"])
def test_a_thousand_random_steps_agree_with_the_reference(backend: str) -> None:
    if backend == "compiled" and kernel.library() is None:
        pytest.skip("the compiled step was not built when the package was installed (no C compiler?)")
    counts, differences = random_cases.run(range(92_000_000, 92_001_000), backend)
    print(f"\n{backend}: {dict(counts)}")
    assert not differences, differences
