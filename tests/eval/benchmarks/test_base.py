"""The base class of benchmarks and the registry: built-in ones, a file, an installed package, and errors for wrong classes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import revisit
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import Item, Metric, get, names, ratio
from revisit.eval.benchmarks.base import BENCHMARKS, check_answers
from revisit.eval.log import read_logs

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorials" / "places.py"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the classes that a test registers."""
    monkeypatch.setattr(BENCHMARKS, "registered", {})


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


class Length(revisit.Benchmark):
    """The length of the answer to one question."""

    least: int = 1

    name = "length"
    max_new_tokens = 4
    metrics = (Metric("long"),)
    headline = "long"


def test_every_built_in_benchmark_is_complete() -> None:
    published = "amber chair dash_b hallusionbench llava_bench mme mmhal mmmu mmvp naturalbench phd pope repope vqav2"
    videos = "eventhallusion moving vidhal videohallucer"
    assert names() == sorted([*published.split(), *videos.split(), "captions", "choice", "yesno"])
    for name in names():
        benchmark = get(name)
        assert benchmark.name == name
        assert benchmark.version.startswith(name)
        assert benchmark.headline in {metric.name for metric in benchmark.metrics}
        assert benchmark.max_new_tokens > 0


def test_names_and_options() -> None:
    assert get("LLaVA-Bench").name == "llava_bench"
    cached = get("hallusionbench", judge_cache="x.jsonl")
    assert cached.judge_cache == Path("x.jsonl")  # type: ignore[attr-defined]
    assert cached.options() == {"judge": "none", "judge_model": "gpt-4", "part": "all"}  # a run's identity
    assert get("phd", modes="ccs,base").options()["modes"] == ["ccs", "base"]
    with pytest.raises(RevisitError, match="Did you mean 'pope'"):
        get("popee")
    with pytest.raises(RevisitError, match="must be"):
        get("hallusionbench", part="perhaps")


def test_ratio_and_printing() -> None:
    assert ratio([(1.0, 2.0), (2.0, 2.0)]) == 0.75
    assert math.isnan(ratio([(0.0, 0.0)]))
    assert Metric("m", show=100, decimals=1).text(0.1234) == "12.3"
    assert Metric("m").text(math.nan) == "-"
    assert get("pope").metric("coco_random/F1").better == "higher"
    assert get("pope").metric("something").better is None


@pytest.mark.parametrize(
    ("ids", "answered", "message"),
    [
        ("", "", "Nothing to score"),
        ("aa", "a", "Duplicate item 'a'"),
        ("ab", "b", "1 of 2 items have no answer"),
        ("a", "ab", "1 answers match no item"),
    ],
)
def test_every_item_needs_one_answer(ids: str, answered: str, message: str) -> None:
    with pytest.raises(RevisitError, match=message):
        check_answers([Item(name, "?") for name in ids], dict.fromkeys(answered, "yes"))


def test_importing_benchmarks_stays_light() -> None:
    code = (
        "import sys, revisit.eval.benchmarks as b; [b.get(n) for n in b.names()]; "
        "print([m for m in ('torch', 'transformers', 'nltk', 'spacy', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# -- classes from elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:Mine", "There is no file '.*nowhere.py' for the benchmark"),
        ("plain.py:Missing", r"plain\.py has no class 'Missing'"),
        ("plain.py:NUMBER", "must be a class derived from revisit.Benchmark"),
        ("plain.py:Nameless", "needs a name that can be typed"),
        ("plain.py:Bare", "needs a class attribute 'metrics'"),
        ("plain.py:Clash", "a benchmark named 'pope' already exists"),
        ("plain.py:Headless", "its headline 'x' is not one of its metrics"),
        ("broken.py:Mine", r"broken\.py could not be run: ZeroDivisionError"),
    ],
)
def test_wrong_classes_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("1 / 0")
    attributes = "max_new_tokens, headline, metrics = 1, 'm', (Metric('m'),)"
    Path("plain.py").write_text(
        "from revisit.eval.benchmarks import Benchmark, Metric\nNUMBER = 3\n"
        "class Nameless(Benchmark):\n    pass\n"
        "class Bare(Benchmark):\n    name = 'bare'\n"
        f"class Clash(Benchmark):\n    name = 'pope'\n    {attributes}\n"
        f"class Headless(Benchmark):\n    name = 'headless'\n    {attributes}\n    headline = 'x'\n"
    )
    with pytest.raises(RevisitError, match=message):
        get(text)


def test_the_tutorial_benchmark_is_evaluated_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISIT_CACHE", str(tmp_path / "cache"))
    assert len(TUTORIAL.read_text().splitlines()) <= 40
    printed = run(
        *("eval", "--benchmark", f"{TUTORIAL}:Places:prompt=Please describe this image in detail."),
        *("--method", "greedy,revisit", "--data", "scenes:unusual:4", "--quiet", "--out", tmp_path / "run"),
    )
    assert "places" in printed.lower()
    greedy, ours = (log.scores for log in read_logs(tmp_path / "run"))
    assert greedy is not None
    assert greedy.metrics["accuracy"] > 0.5  # the embedded model was trained on these places
    assert ours is not None
    assert ours.shown["accuracy"].better == "higher"
    assert "accuracy" in run("compare", tmp_path / "run")
