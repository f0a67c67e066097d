"""Benchmarks from outside: the decorator, a file, an installed package, and the errors for wrong ones."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import revisit
from revisit.cli.main import app
from revisit.errors import RevisitError
from revisit.eval.benchmarks import Item, Metric, Scores, get, names, registry
from revisit.eval.log import read_logs

TUTORIAL = Path(__file__).parents[3] / "docs" / "tutorials" / "places.py"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry.BENCHMARKS, "registered", {})


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
    data_files = ("questions.json",)

    def load(self, data_dir: Path) -> list[Item]:
        rows = json.loads(self.files(data_dir)[0].read_text())
        return [Item(str(row["id"]), row["question"]) for row in rows]

    def score(self, items: list[Item], answers: Any) -> Scores:
        return Scores({"long": sum(len(answers[i.id]) >= self.least for i in items) / len(items)})


def test_decorated_classes_are_found_by_name() -> None:
    assert registry.register(Length) is Length
    assert "length" in names()
    assert get("length", least="3") == Length(least=3)
    assert (Length().version, Length().title, registry.title("length")) == ("length-1", "length", "length")
    assert registry.title("never registered") == "never registered"
    registry.register(Length)  # the same class again is no clash


def test_a_file_names_its_benchmark_for_score(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from revisit import Benchmark\n"
        "from revisit.eval.benchmarks import Item, Metric, Scores\n"
        "class Mine(Benchmark):\n"
        "    name, max_new_tokens, headline, metrics = 'mine', 4, 'right', (Metric('right'),)\n"
        "    data_files = ('gold.txt',)\n"
        "    def load(self, data_dir):\n"
        "        lines = self.files(data_dir)[0].read_text().split()\n"
        "        return [Item(str(n), '?', (), {'gold': gold}) for n, gold in enumerate(lines)]\n"
        "    def score(self, items, answers):\n"
        "        return Scores({'right': sum(answers[i.id] == i.meta['gold'] for i in items) / len(items)})\n"
    )
    (tmp_path / "gold.txt").write_text("a b")
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"id": "0", "text": "a"}\n{"id": "1", "text": "x"}\n')
    found = json.loads(run("score", f"{file}:Mine", answers, "--data", tmp_path, "--json"))
    assert (found["benchmark"], found["metrics"]) == ("mine", {"right": 0.5})
    with pytest.raises(RevisitError, match=r"gold\.txt is missing: put it at"):
        get(f"{file}:Mine").load(tmp_path / "nowhere")


def test_an_installed_package_offers_one(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("length", f"{__name__}:Length", "revisit.eval.benchmarks")
    broken = EntryPoint("broken", "no_such_module:Thing", "revisit.eval.benchmarks")
    monkeypatch.setattr("revisit.registry.installed", lambda group: {"length": point, "broken": broken})
    assert get("length").name == "length"
    with pytest.raises(RevisitError, match=r"'broken' of the installed package .* could not be loaded: ModuleNotFound"):
        get("broken")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:Mine", "There is no file 'nowhere.py' for the benchmark"),
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
    rest = "max_new_tokens, headline, metrics = 1, 'm', (Metric('m'),)"
    Path("plain.py").write_text(
        "from revisit.eval.benchmarks import Benchmark, Metric\nNUMBER = 3\n"
        "class Nameless(Benchmark):\n    pass\n"
        "class Bare(Benchmark):\n    name = 'bare'\n"
        f"class Clash(Benchmark):\n    name = 'pope'\n    {rest}\n"
        f"class Headless(Benchmark):\n    name = 'headless'\n    {rest}\n    headline = 'x'\n"
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
