"""An evaluation that runs in milliseconds without torch: a benchmark with ratio metrics, and an engine that answers with hashes.

The tests of kills run it as a script: `python fake_grid.py OUTPUT DATA [OPTIONS AS JSON]`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks.base import Benchmark, Item, Metric, Scores
from revisit.eval.config import EvalConfig
from revisit.eval.engines.base import Engine, item_seed
from revisit.eval.log import Answer, Log, read_logs
from revisit.eval.run import run
from revisit.io.files import read_lines


class Letters(Benchmark):
    """How many vowels the answer has among its letters; items come from `items.txt`, one prompt a line."""

    name = "letters"
    max_new_tokens = 7
    metrics = (Metric("vowels", "lower", 100.0, 1), Metric("yes", "higher", 100.0, 1))
    headline = "vowels"
    rule: str = "plain"
    suffix: str = ""

    @property
    def version(self) -> str:
        return f"letters-{self.rule}-1"

    def files(self, data_dir: Path) -> list[Path]:
        return [data_dir / "items.txt"]

    def load(self, data_dir: Path) -> list[Item]:
        lines = (data_dir / "items.txt").read_text().splitlines()
        images = data_dir / "images"
        return [
            Item(f"q{i}", line + self.suffix, (images / f"{i}.png",) if images.exists() else (), {})
            for i, line in enumerate(lines)
        ]

    def score(self, items: list[Item], answers: Mapping[str, str]) -> Scores:
        vowels = {i.id: (sum(c in "aeiou" for c in answers[i.id]) * 1.0, len(answers[i.id]) * 1.0) for i in items}
        yes = {i.id: (float(answers[i.id][0] < "n"), 1.0) for i in items}
        return Scores.of({"vowels": vowels, "yes": yes}, {"items": len(items)})


class Shift(Method):
    """A method with one setting."""

    by: int = 0
    name = "shift"


class HashEngine(Engine):
    """Answers depend on prompt, images, method, decoding and the item's seed, and on nothing else."""

    placement = ("cpu", "float32")

    def __init__(self, model: str, pause: float = 0.0, weights: str = "w1", invariant: bool = True) -> None:
        self.model, self.pause, self.weights, self.invariant = model, pause, weights, invariant
        self.batches: list[list[str]] = []
        self.closed = False

    def identity(self, batch_size: int, items: Sequence[Item]) -> dict[str, Any]:
        device, dtype = self.placement
        model = {"model": self.model, "fingerprint": self.weights, "dtype": dtype, "device": device}
        batching = None if self.invariant else {"size": batch_size}
        return {**model, "engine": "hash", "libraries": {"revisit": "0"}, "batching": batching}

    def answer(
        self, method: Any, decoding: Decoding, seed: int, items: Sequence[Item], images: Sequence[list[Any]]
    ) -> list[Answer]:
        self.batches.append([item.id for item in items])
        time.sleep(self.pause)
        out = []
        for item, shown in zip(items, images, strict=True):
            pixels = [hashlib.sha256(image.tobytes()).hexdigest() for image in shown]
            own = item_seed(seed, item.id)
            key = json.dumps([self.model, item.prompt, own, method.settings(), decoding.temperature, pixels])
            tokens = tuple(hashlib.sha256(key.encode()).digest()[: decoding.max_new_tokens])
            text = "".join(chr(97 + t % 26) for t in tokens)
            counters = {"steps": len(tokens), "applied": method.by}
            identity = {"id": item.id, "item": item.hash, "prompt": item.prompt}
            out.append(Answer(**identity, text=text, tokens=tokens, counters=counters, seconds=self.pause / len(items)))
        return out

    def close(self) -> None:
        self.closed = True


def write_items(folder: Path, count: int) -> Path:
    """Write a data folder with `count` prompts of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items.txt").write_text("".join(f"prompt {i} {'x' * (i * 7 % 13)}\n" for i in range(count)))
    return folder


def make_config(out: Path, data: Path, **changes: Any) -> EvalConfig:
    """Configure two models, two methods, one benchmark."""
    values: dict[str, Any] = {
        "model": ("m1", "m2"),
        "method": (Shift(by=0), Shift(by=3)),
        "benchmark": (Letters(),),
        "data": str(data),
        "out": str(out),
        "batch_size": 4,
    }
    return EvalConfig(**{**values, **changes})


def answers_of(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the stored answers of every log in their order, without their time; lines of other logs are skipped."""
    found = {}
    for path in sorted(out.glob("logs/*.jsonl")):
        answers = [line for line in read_lines(path)[0] if "log" in line and path.stem.endswith(line["log"])]
        found[path.name] = [{k: v for k, v in answer.items() if k != "seconds"} for answer in answers]
    return found


def numbers_of(logs: Iterable[Log]) -> list[Any]:
    """Return the scores of logs with their specs and totals, without times."""
    return [
        (log.spec, log.scores, {k: v for k, v in log.totals().items() if k != "seconds"}, log.request.items)
        for log in logs
    ]


def check_equal(out: Path, whole: Path) -> None:
    """Check that a run has the same answers and scores as an undisturbed one: nothing is lost, and nothing is doubled."""
    ours, theirs = answers_of(out), answers_of(whole)
    assert list(ours) == list(theirs)
    for log, answers in ours.items():
        assert sorted(answers, key=lambda x: x["id"]) == sorted(theirs[log], key=lambda x: x["id"])
    logs = [sorted(read_logs(folder), key=lambda log: log.path.name) for folder in (out, whole)]
    assert numbers_of(logs[0]) == numbers_of(logs[1])


if __name__ == "__main__":
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    pause = options.pop("pause", 0.002)
    run(make_config(Path(sys.argv[1]), Path(sys.argv[2]), **options), engine_for=lambda m: HashEngine(m, pause))
    assert "torch" not in sys.modules
