"""A grid that runs in milliseconds without torch: a benchmark with ratio metrics and an engine that answers by hash.

Run as a script (`python fake_grid.py OUTPUT [OPTIONS AS JSON]`) it is the process that the kill tests kill.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from revisit.benchmarks.base import Benchmark, Item, Metric, Scores, ratio
from revisit.decoding.settings import Decoding
from revisit.evaluation.engines.base import Engine, Job
from revisit.evaluation.plan import Plan
from revisit.evaluation.records import Answer
from revisit.evaluation.runner import run


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
        per_item = {"vowels": vowels, "yes": yes}
        return Scores({k: ratio(v.values()) for k, v in per_item.items()}, per_item, {"items": len(items)})


@dataclass(frozen=True)
class Shift:
    """A stand-in for a decoding method: settings and a name, as the runner sees them."""

    by: int = 0
    name = "shift"

    def settings(self) -> dict[str, Any]:
        return {"by": self.by}


class HashEngine(Engine):
    """Answers depend on prompt, images, method, decoding and the job's seed, and on nothing else."""

    def __init__(self, model: str, pause: float = 0.0, weights: str = "w1", invariant: bool = True) -> None:
        self.model, self.pause, self.weights, self.invariant = model, pause, weights, invariant
        self.asked: list[list[str]] = []
        self.closed = False

    def identity(self) -> dict[str, Any]:
        return {"name": self.model, "fingerprint": self.weights, "dtype": "float32"}

    def batch_invariant(self) -> bool:
        return self.invariant

    def answer(self, method: Any, decoding: Decoding, jobs: Sequence[Job], images: Sequence[list[Any]]) -> list[Answer]:
        self.asked.append([job.id for job in jobs])
        time.sleep(self.pause)
        out = []
        for job, pictures in zip(jobs, images, strict=True):
            pixels = [hashlib.sha256(p.tobytes()).hexdigest() for p in pictures]
            key = json.dumps([self.model, job.prompt, job.seed, method.settings(), decoding.temperature, pixels])
            raw = hashlib.sha256(key.encode()).digest()
            tokens = tuple(raw[: decoding.max_new_tokens])
            text = "".join(chr(97 + t % 26) for t in tokens)
            counters = {"steps": len(tokens), "applied": method.by}
            own = {"id": job.id, "item": job.content, "prompt": job.prompt}
            out.append(Answer(**own, text=text, tokens=tokens, counters=counters, seconds=self.pause / len(jobs)))
        return out

    def close(self) -> None:
        self.closed = True


def write_items(folder: Path, count: int) -> Path:
    """A data folder with `count` prompts of different lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items.txt").write_text("".join(f"prompt {i} {'x' * (i * 7 % 13)}\n" for i in range(count)))
    return folder


def make_plan(output: Path, data: Path, **changes: Any) -> Plan:
    """Two models, two methods, one benchmark."""
    models, methods = changes.pop("models", ("m1", "m2")), changes.pop("methods", (Shift(0), Shift(3)))
    values: dict[str, Any] = {
        "methods": dict.fromkeys(models, methods),
        "benchmarks": (Letters(),),
        "data": {"letters": data},
        "output": output,
        "batch_size": 4,
    }
    if "limit" in changes:
        values["limits"] = {"letters": changes.pop("limit")}
    return Plan(**{**values, **changes})


def lines_of(output: Path) -> dict[str, list[dict[str, Any]]]:
    """Cell folder → its stored lines in order, without the time and the checksum over it."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(output.glob("cells/*/answers.jsonl")):
        text = path.read_text()
        assert text == "" or text.endswith("\n")
        found[path.parent.name] = [
            {k: v for k, v in json.loads(line).items() if k not in ("seconds", "check")} for line in text.splitlines()
        ]
    return found


def numbers_of(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries of results.json without times and commands."""
    return [{k: v for k, v in cell.items() if k not in ("seconds", "provenance")} for cell in cells]


if __name__ == "__main__":
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    pause = options.pop("pause", 0.002)
    run(make_plan(Path(sys.argv[1]), Path(sys.argv[2]), **options), engine_for=lambda m: HashEngine(m, pause))
    assert "torch" not in sys.modules
