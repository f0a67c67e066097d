"""The registry, the parsing of options, and the arithmetic that all benchmarks share."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from revisit.errors import RevisitError
from revisit.eval.benchmarks import Item, Metric, get, names
from revisit.eval.benchmarks.base import check_answers, ratio


def test_every_registered_benchmark_is_complete():
    assert names() == [
        "amber",
        "chair",
        "dash_b",
        "hallusionbench",
        "llava_bench",
        "mme",
        "mmhal",
        "mmmu",
        "mmvp",
        "naturalbench",
        "phd",
        "pope",
        "repope",
        "vqav2",
    ]
    for name in names():
        benchmark = get(name)
        assert benchmark.name == name
        assert benchmark.version.startswith(name)
        assert benchmark.headline in {metric.name for metric in benchmark.metrics}
        assert benchmark.max_new_tokens > 0


def test_names_and_options_are_forgiving_and_exact():
    assert get("LLaVA-Bench").name == "llava_bench"
    assert get("hallusionbench", judge_cache="x.jsonl").judge_cache == Path("x.jsonl")
    with pytest.raises(RevisitError, match="Did you mean 'pope'"):
        get("popee")
    with pytest.raises(RevisitError, match="must be"):
        get("hallusionbench", part="perhaps")


def test_ratio_and_printing():
    assert ratio([(1.0, 2.0), (2.0, 2.0)]) == 0.75
    assert math.isnan(ratio([(0.0, 0.0)]))
    assert Metric("m", show=100, decimals=1).text(0.1234) == "12.3"
    assert Metric("m").text(math.nan) == "-"
    assert get("pope").metric("coco_random/F1").better == "higher"
    assert get("pope").metric("something").better is None


def test_nothing_is_scored_in_silence():
    with pytest.raises(RevisitError, match="Nothing to score"):
        check_answers([], {})
    with pytest.raises(RevisitError, match="1 of 1 items have no answer"):
        check_answers([Item("1", "?")], {})


def test_importing_benchmarks_stays_light():
    code = (
        "import sys, revisit.eval.benchmarks as b; [b.get(n) for n in b.names()]; "
        "print([m for m in ('torch', 'transformers', 'nltk', 'spacy', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
