"""The paper's tables as shipped: complete, consistent, and equal to the paper where it is at hand."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import mean

import pytest

from revisit.paper import published

METHODS = set(published.NAMES)


@pytest.mark.parametrize("name", ["hallusionbench", "chair", "pope", "vqav2", "mmmu", "pope_full", "mmmu_subjects"])
def test_seven_methods_on_three_models(name: str) -> None:
    data = published.table(name)
    assert set(data) == {"LLaVA-1.5-7B", "Qwen2.5-VL-7B", "InternVL3-8B"}
    assert all(set(methods) == METHODS for methods in data.values())


def test_the_summary_of_pope_is_the_mean_of_its_nine_settings() -> None:
    for model, methods in published.table("pope_full").items():
        for method, values in methods.items():
            for metric in ("accuracy", "precision", "F1"):
                parts = [v for k, v in values.items() if k.endswith(f"/{metric}")]
                assert len(parts) == 9
                printed = published.table("pope")[model][method][metric]
                assert printed == pytest.approx(mean(parts), abs=0.0101), (model, method, metric)


def test_the_overall_of_mmmu_is_the_mean_of_its_subjects() -> None:
    for model, methods in published.table("mmmu_subjects").items():
        for method, values in methods.items():
            parts = [v for subject, v in values.items() if subject != "Overall"]
            assert len(parts) == 30
            assert values["Overall"] == published.table("mmmu")[model][method]["macro"]
            assert values["Overall"] == pytest.approx(mean(parts), abs=0.0101), (model, method)


def test_token_tables_follow_from_their_own_columns() -> None:
    """Final score = base + vision; final probability = their normalised product, as far as two decimals allow."""
    for case in published.table("cases"):
        scores = [row["base"][0] + row["vision"][0] for row in case["rows"]]
        assert all(abs(s - row["final"][0]) <= 0.011 for s, row in zip(scores, case["rows"], strict=True))
        total = sum(map(math.exp, scores))
        for score, row in zip(scores, case["rows"], strict=True):
            assert 100 * math.exp(score) / total == pytest.approx(row["final"][1], abs=0.25)
            assert 100 * math.exp(row["base"][0]) == pytest.approx(row["base"][1], rel=0.006, abs=0.006)


def test_every_number_stands_in_the_paper(shared: Path) -> None:
    text = (shared / "spec" / "paper.tex").read_text(encoding="utf-8")
    known = set(re.findall(r"-?\d+(?:\.\d+)?", text))
    for name in ("hallusionbench", "chair", "pope", "vqav2", "mmmu", "chair_models", "pope_full", "mmmu_subjects"):
        for methods in published.table(name).values():
            for values in methods.values():
                for value in values.values():
                    assert {f"{value:.2f}", f"{value:.1f}"} & known, (name, value)
