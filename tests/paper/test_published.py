"""The paper's tables as shipped: complete, consistent, and equal to the paper where it is at hand."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest

from revisit.paper import published


def test_summaries_are_means_of_the_full_tables() -> None:
    for model, methods in published.table("pope_full").items():
        for method, values in methods.items():
            for metric in ("accuracy", "precision", "F1"):
                parts = [v for k, v in values.items() if k.endswith(f"/{metric}")]
                assert len(parts) == 9
                printed = published.table("pope")[model][method][metric]
                assert printed == pytest.approx(mean(parts), abs=0.0101), (model, method, metric)
    for model, methods in published.table("mmmu_subjects").items():
        for method, values in methods.items():
            parts = [v for subject, v in values.items() if subject != "Overall"]
            assert len(parts) == 30
            assert values["Overall"] == published.table("mmmu")[model][method]["macro"]
            assert values["Overall"] == pytest.approx(mean(parts), abs=0.0101), (model, method)


def test_every_number_is_in_the_paper(shared: Path) -> None:
    text = (shared / "spec" / "paper.tex").read_text(encoding="utf-8")
    known = set(re.findall(r"-?\d+(?:\.\d+)?", text))
    for name in ("hallusionbench", "chair", "pope", "vqav2", "mmmu", "chair_models", "pope_full", "mmmu_subjects"):
        for methods in published.table(name).values():
            for values in methods.values():
                for value in values.values():
                    assert {f"{value:.2f}", f"{value:.1f}"} & known, (name, value)
