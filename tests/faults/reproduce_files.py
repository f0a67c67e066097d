"""The defects that an audit found in reading files, each as one attempt: prints what happens, as a table.

    PYTHONPATH=tests python tests/faults/reproduce_files.py

Words after the script's name choose attempts. Needs no network; a minute or two.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import hostile_checkpoints
from test_checkpoints import refused
from test_runs import HashEngine, make_plan, write_items

import families
from revisit.errors import RevisitError
from revisit.evaluation.runner import run
from revisit.evaluation.verify import verify

sys.path.insert(0, str(Path(__file__).parents[1] / "step"))
from test_compiled import DAMAGE, copy_library, run_with

CHECKPOINTS = (
    "a tensor missing",
    "no tensors",
    "a tensor too many",
    "nan",
    "index names a pickle",
    "index leaves the folder",
    "weights truncated",
    "settings unknown",
    "template of broken syntax",
    "template that raises",
)


def checkpoint(name: str) -> Callable[[Path], str]:
    """What is said of a model folder that was damaged so."""

    def attempt(folder: Path) -> str:
        whole = families.save("llava", folder / "whole")
        began = time.monotonic()
        sentence = refused(name, whole, folder / "model")
        return f"after {time.monotonic() - began:.1f} s: {sentence}".replace(f"{folder}/", "")

    return attempt


def library(damage: str) -> Callable[[Path], str]:
    """The step that is chosen, and how many warnings there are, with such a library."""

    def attempt(folder: Path) -> str:
        DAMAGE[damage](copy_library(folder))
        name, count, *_ = run_with(folder).split(" ", 2)
        return f"{name}, {count} warning"

    return attempt


def changed_character(folder: Path) -> str:
    """One letter of a stored answer becomes another: found by --verify, and that answer alone is made again."""
    data = write_items(folder / "data", 12)
    run(make_plan(folder / "out", data), engine_for=HashEngine)
    path = next((folder / "out").glob("cells/*/answers.jsonl"))
    whole = path.read_text()
    place = whole.index('"text"') + len('"text":"x')
    path.write_text(whole[:place] + ("z" if whole[place] != "z" else "y") + whole[place + 1 :])
    found = verify(folder / "out").problems
    engines: list[HashEngine] = []

    def make(model: str) -> HashEngine:
        engines.append(HashEngine(model))
        return engines[-1]

    run(make_plan(folder / "out", data), engine_for=make)
    again = sum(len(batch) for engine in engines for batch in engine.asked)
    left = verify(folder / "out").problems
    return f"--verify: {len(found)} problem; resuming makes {again} answer again; --verify: {len(left)} problems"


ATTEMPTS: dict[str, Callable[[Path], str]] = {
    **{f"model folder: {name}": checkpoint(name) for name in CHECKPOINTS},
    **{f"compiled library: {damage}": library(damage) for damage in DAMAGE},
    "store: one character of an answer is changed": changed_character,
}


def main() -> None:
    assert set(CHECKPOINTS) <= hostile_checkpoints.REFUSED.keys()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name, attempt in ATTEMPTS.items():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                told = attempt(Path(folder))
            except RevisitError as error:
                told = f"refused: {error}"
        sys.stdout.write(json.dumps({"what": name, "happens": told}, ensure_ascii=False) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
