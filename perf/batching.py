"""Compare images per second in batches of 8 and one at a time, with the engine of `revisit eval`.

Before timing, every answer of the batched run must equal that of the single run, token for token. Both are then timed in
turns in one process, and the ratio of the best turns is printed. A batch takes as long as its longest answer, so captions,
which differ in length, gain less than short answers.

    python perf/batching.py [--model tiny] [--images 64] [--batch 8] [--turns 3] [--methods greedy,revisit] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from revisit import methods
from revisit.decoding.settings import Decoding
from revisit.eval.benchmarks import Item
from revisit.eval.benchmarks.io.places import scene_folder
from revisit.eval.engines.local import LocalEngine
from revisit.eval.log import Answer
from revisit.models.config import describe_model

PROMPT = "Please describe this image in detail."


def captions(folder: Path, count: int) -> list[Item]:
    """Return one description per image."""
    paths = sorted((folder / "val2014").iterdir())[:count]
    return [Item(path.stem, PROMPT, (path,)) for path in paths]


def questions(folder: Path, count: int) -> list[Item]:
    """Return one question per image: is there a ... in the image?"""
    rows = [json.loads(line) for line in (folder / "pope" / "coco_pope_random.json").read_text().splitlines()]
    first = {row["image"]: row["text"] for row in reversed(rows)}
    return [Item(name, first[name], (folder / "val2014" / name,)) for name in sorted(first)[:count]]


TASKS = {"captions": captions, "questions": questions}


def run(
    engine: LocalEngine, method: object, decoding: Decoding, work: Sequence[Item], batch: int
) -> tuple[dict[str, Answer], float]:
    """Return all answers and the seconds they took, including opening the images."""
    started = time.perf_counter()
    answers = {}
    for found in engine.stream(method, decoding, 0, [work[i : i + batch] for i in range(0, len(work), batch)]):
        for answer in found:
            assert isinstance(answer, Answer), answer
            answers[answer.id] = answer
    return answers, time.perf_counter() - started


def main() -> None:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--methods", default="greedy,revisit")
    parser.add_argument("--tasks", default="captions,questions")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    engine, about = LocalEngine(options.model), describe_model(options.model, False)
    folder = scene_folder(f"scenes:usual:{options.images}")
    decoding = Decoding(max_new_tokens=options.tokens)
    print(
        f"{options.model}, {options.images} images, at most {options.tokens} tokens, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {platform.machine()}\n"
    )
    print(f"| task | method | images/s, batch 1 | images/s, batch {options.batch} | ratio | ratio per turn |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    for task in options.tasks.split(","):
        work = TASKS[task](folder, options.images)
        for name in options.methods.split(","):
            method = methods.as_method(name, about)
            print(f"| {task} | {name} | {measure(engine, method, decoding, work, options)} |", flush=True)


def measure(
    engine: LocalEngine, method: object, decoding: Decoding, work: Sequence[Item], options: argparse.Namespace
) -> str:
    """Check equality first, then time both in turns; return the last four columns of a row."""
    single, _ = run(engine, method, decoding, work, 1)
    batched, _ = run(engine, method, decoding, work, options.batch)
    different = [id for id in single if single[id].tokens != batched[id].tokens]
    assert not different, f"{len(different)} answers differ between batch 1 and {options.batch}: {different}"
    times = [
        (run(engine, method, decoding, work, 1)[1], run(engine, method, decoding, work, options.batch)[1])
        for _ in range(options.turns)
    ]
    one, many = (min(column) for column in zip(*times, strict=True))
    turns = ", ".join(f"{a / b:.2f}" for a, b in times)
    return f"{len(work) / one:.2f} | {len(work) / many:.2f} | {one / many:.2f} | {turns}"


if __name__ == "__main__":
    main()
