"""Runs a grid: asks every question once, stores every answer immediately, scores each cell when it is complete.

A resumed run equals an uninterrupted one: batches are cut from the complete list of items, whatever is already stored; a batch
with a missing answer is asked again as a whole, and only what is missing is added; every job has its own seed.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

from revisit.benchmarks.base import Benchmark, Item, PerUnit, Scores
from revisit.benchmarks.io import data
from revisit.benchmarks.io.files import file_digest
from revisit.decoding.method import Method
from revisit.decoding.settings import Decoding
from revisit.errors import RevisitError
from revisit.evaluation import statistics
from revisit.evaluation.engines.base import BadImage, Engine, Job, open_engine
from revisit.evaluation.environment import environment
from revisit.evaluation.identity import foreign_code
from revisit.evaluation.plan import Plan, PlannedCell, benchmark_label, label
from revisit.evaluation.records import Answer, RunRecord, ScoresRecord
from revisit.evaluation.store import Cell, Damaged, digest, locked, read_results, read_scores, write_record


class Reporter:
    """Is notified of a run's progress; this one shows nothing."""

    def plan(self, cells: Sequence[PlannedCell]) -> None:
        """These cells follow, each with a `start` of its own."""

    def start(self, title: str, total: int, done: int) -> None:
        """A piece of work of `total` steps begins, of which `done` are done already."""

    def advance(self, count: int) -> None:
        """`count` further steps are done."""

    def note(self, text: str) -> None:
        """Something a reader should know."""


@dataclass
class Questions:
    """The items of one benchmark: those that can be asked, and those whose image cannot be read."""

    ready: list[Item]
    contents: dict[str, str]  # id -> SHA-256 of the prompt and of every image's bytes, which an answer is tied to
    bad: dict[str, BadImage]
    files: dict[str, str]  # annotation file -> SHA-256
    total: int


@dataclass(frozen=True)
class GridCell:
    """One model, method, benchmark and seed of a plan, with the engine that answers."""

    plan: Plan
    model: str
    engine: Engine
    method: Method
    benchmark: Benchmark
    questions: Questions
    plan_seed: int

    @property
    def names(self) -> tuple[str, str, str]:
        """What tables and folders call its model, method and benchmark."""
        return self.model, label(self.method), benchmark_label(self.benchmark)

    @cached_property
    def decoding(self) -> Decoding:
        """How its answers are drawn."""
        return self.plan.decoding_for(self.benchmark)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that could change an answer and is not in the item itself."""
        found: dict[str, Any] = {
            "model": dict(self.engine.identity()),
            "method": {
                "name": self.method.name,
                "settings": self.method.settings(),
                "foreign_code": foreign_code(self.method),
            },
            "benchmark": {
                "name": self.benchmark.name,
                "version": self.benchmark.version,
                "options": self.benchmark.options(),
            },
            "decoding": dict(self.decoding),
            "seed": self.seed,
        }
        if not self.engine.batch_invariant():  # then a job's answer may depend on its batch
            found["batches"] = {
                "size": self.plan.batch_size,
                "items": digest(list(self.questions.contents.items())),
            }
        return found

    @property
    def seed(self) -> int:
        """The seed of sampling; 0 without sampling."""
        return self.plan_seed if self.decoding.temperature is not None else 0

    @cached_property
    def store(self) -> Cell:
        """Its answers on disk."""
        return Cell(self.plan.output, self.names, self.identity)

    @cached_property
    def batches(self) -> list[list[Job]]:
        """All items in batches of similar prompt length, longest first, so that a run that lacks memory fails early."""
        contents = self.questions.contents
        jobs = [
            Job(item.id, item.prompt, item.images, job_seed(self.plan_seed, item.id), contents[item.id])
            for item in self.questions.ready
        ]
        # Pictures make a prompt longer than its text; stable, so ties keep the benchmark's order.
        jobs.sort(key=lambda job: -(len(job.prompt) + 1000 * len(job.images)))
        size = self.plan.batch_size
        return [jobs[start : start + size] for start in range(0, len(jobs), size)]

    def entry(self, lines: Mapping[str, Answer], bad: Mapping[str, BadImage]) -> dict[str, Any]:
        """Its entry in results.json as long as it is not scored."""
        totals: dict[str, float] = {}
        for line in lines.values():
            for counter, value in line.counters.items():
                totals[counter] = totals.get(counter, 0) + value
        model, method, benchmark = self.names
        about, data = self.identity, self.plan.data.get(self.benchmark.name)
        return {
            "key": self.store.key,
            "path": self.store.path.relative_to(self.plan.output).as_posix(),
            "status": "unfinished",
            "model": {"name": model, **about["model"]},
            "method": {"label": method, **about["method"]},
            "benchmark": {
                "label": benchmark,
                **about["benchmark"],
                "headline": self.benchmark.headline,
                "files": self.questions.files,
            },
            "decoding": about["decoding"],
            "seed": about["seed"],
            "batch_size": self.plan.batch_size,
            "items": self.questions.total,
            "answers": len(lines),
            "skipped": [{"id": i, "image": str(b.path), "reason": b.reason} for i, b in sorted(bad.items())],
            "new_tokens": sum(len(line.tokens) for line in lines.values()),
            "seconds": round(sum(line.seconds for line in lines.values()), 3),
            "counters": totals,
            "provenance": {
                "argv": environment()["argv"],
                "data": str(data) if data else None,
                "limit": self.plan.limits.get(self.benchmark.name),
                "seed": about["seed"],
                "batch_size": self.plan.batch_size,
            },
        }


def _checksum(path: Path) -> str | BadImage:
    try:
        return file_digest(path)
    except OSError as error:
        return BadImage(path, error.strerror or str(error))


def run(
    plan: Plan,
    reporter: Reporter | None = None,
    engine_for: Callable[[str], Engine] | None = None,
) -> dict[str, Any]:
    """Runs every cell of `plan` that is not finished, and scores all of them.

    Args:
        plan: What to run.
        reporter: Shows the progress.
        engine_for: Opens the engine of a model; by default the plan's.

    Returns:
        The content of results.json, of its cells only those of the plan.

    Raises:
        RevisitError: After the last cell, if images could not be read and `plan.skip_bad_images` is off. The answers to
            everything else are stored; cells with unread images have no metrics.
    """
    reporter = reporter or Reporter()
    engine_for = engine_for or (lambda model: open_engine(plan.engine, model, **plan.engine_options))
    check_files(plan)
    with locked(plan.output):
        checksums: dict[Path, str | BadImage] = {}  # each image is read once per run
        questions = [(b, load_questions(b, plan, checksums, reporter)) for b in plan.benchmarks]
        reporter.plan(planned_cells(plan, {benchmark_label(b): asked.total for b, asked in questions}))
        engines = {model: engine_for(model) for model in plan.methods}
        try:
            grid = [
                [
                    GridCell(plan, model, engine, method, benchmark, asked, seed)
                    for method in plan.methods[model]
                    for seed in plan.seeds
                ]
                for model, engine in engines.items()
                for benchmark, asked in questions
            ]
            results = Results(plan, [cell for cells in grid for cell in cells], reporter)
            for cells in grid:
                for cell in cells:
                    results.add(run_cell(cell, reporter))
                if cells[0].benchmark is plan.benchmarks[-1]:
                    cells[0].engine.close()  # makes room for the next model
        finally:
            for engine in engines.values():
                engine.close()
        return results.finish()


def planned_cells(plan: Plan, totals: Mapping[str, int] | None = None) -> list[PlannedCell]:
    """The cells of a plan with what results.json knows about them; nothing is written, and no model is opened.

    Args:
        plan: What to run.
        totals: Items by the label of their benchmark, where they are known already.
    """
    totals = totals or {benchmark_label(b): len(planned_items(b, plan)) for b in plan.benchmarks}
    try:
        earlier = read_results(plan.output)["cells"]
    except RevisitError:  # nothing was run, or the run will say what is wrong
        earlier = []
    known = {
        (e["model"]["name"], e["method"]["label"], e["benchmark"]["label"], e["seed"], digest(e["decoding"])): e
        for e in earlier
    }
    found = []
    for model, methods in plan.methods.items():
        for benchmark in plan.benchmarks:
            items, decoding = totals[benchmark_label(benchmark)], digest(dict(plan.decoding_for(benchmark)))
            for method in methods:
                for seed in plan.seeds if plan.decoding.temperature is not None else (0,):
                    names = (model, label(method), benchmark_label(benchmark), seed)
                    old = known.get((*names, decoding), {"answers": 0})
                    seconds = old["seconds"] / old["answers"] if old["answers"] and old["seconds"] else None
                    found.append(PlannedCell(*names, items, min(old["answers"], items), seconds))
    return found


def check_files(plan: Plan) -> None:
    """Raises RevisitError if a benchmark's file is missing, before an output folder is created."""
    for benchmark in plan.benchmarks:
        benchmark.files(plan.data[benchmark.name])


def planned_items(benchmark: Benchmark, plan: Plan) -> list[Item]:
    """The first items of a benchmark, as many as the plan wants."""
    folder = plan.data[benchmark.name]
    items = benchmark.load(folder)[: plan.limits.get(benchmark.name)]
    if not items:
        raise RevisitError(f"Benchmark {benchmark.name!r} has no items in {folder}.")
    return items


def load_questions(
    benchmark: Benchmark, plan: Plan, checksums: dict[Path, str | BadImage], reporter: Reporter
) -> Questions:
    """The first items of a benchmark, as many as the plan wants, hashed; items whose image file cannot be read are set apart."""
    folder = plan.data[benchmark.name]
    items = planned_items(benchmark, plan)
    fetched = data.fetched_items(folder)
    if fetched is not None and fetched < len(items):
        raise RevisitError(
            f"{folder} was downloaded with --limit {fetched} and has no pictures for other "
            f"items: use --limit {fetched}, or download everything to a new folder with `revisit data get {benchmark.name} DIR`."
        )
    if repeated := [id for id, count in Counter(item.id for item in items).items() if count > 1]:
        raise RevisitError(f"Benchmark {benchmark.name!r} has two items with the id {repeated[0]!r} in {folder}.")
    reporter.note(f"{benchmark.name}: {len(items)} items from {folder}")
    new = [path for path in dict.fromkeys(path for item in items for path in item.images) if path not in checksums]
    with ThreadPoolExecutor(4) as pool:
        checksums.update(zip(new, pool.map(_checksum, new), strict=True))
    contents, bad = {}, {}
    for item in items:
        sums = [checksums[path] for path in item.images]
        if unread := [s for s in sums if isinstance(s, BadImage)]:
            bad[item.id] = unread[0]
        else:
            contents[item.id] = digest([item.prompt, sums])
    files = {path.name: file_digest(path) for path in benchmark.files(folder)}
    return Questions([item for item in items if item.id in contents], contents, bad, files, len(items))


def job_seed(seed: int, id: str) -> int:
    """A seed of the item's own, the same in any batch and any order."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:7], "big")


def run_cell(cell: GridCell, reporter: Reporter) -> dict[str, Any]:
    """Answers what is missing, then scores; returns the cell's entry in results.json."""
    plan, benchmark, questions = cell.plan, cell.benchmark, cell.questions
    title = " · ".join(cell.names)
    bad = dict(questions.bad)
    with cell.store as store:
        for sentence in store.repairs:
            reporter.note(sentence)
        stored = [store.get(*asked) is not None for asked in questions.contents.items()]
        drawn = f" · seed {cell.seed}" if cell.decoding.temperature is not None else ""
        reporter.start(title + drawn, len(stored), sum(stored))
        todo = [batch for batch in cell.batches if any(store.get(job.id, job.content) is None for job in batch)]
        if todo:
            for answers in cell.engine.stream(cell.method, cell.decoding, todo):
                bad |= {answer.id: answer for answer in answers if isinstance(answer, BadImage)}
                reporter.advance(store.append(answer for answer in answers if isinstance(answer, Answer)))
        lines = {id: line for id, content in questions.contents.items() if (line := store.get(id, content)) is not None}
    entry = cell.entry(lines, bad)
    kept = [item for item in questions.ready if item.id in lines]
    if (bad and not plan.skip_bad_images) or not kept:
        reporter.note(f"{title}: {len(bad)} unreadable images, not scored")
        return {**entry, "status": "unreadable images"}
    scores = benchmark.score(kept, {id: line.text for id, line in lines.items()})
    write_record(
        store.path / "scores.json",
        {
            "key": store.key,
            "version": benchmark.version,
            "items": {id: questions.contents[id] for id in lines},
            "per_item": {metric: {u: list(t) for u, t in terms.items()} for metric, terms in scores.per_item.items()},
        },
        ScoresRecord,
    )
    return {**entry, "status": "complete", **scored(benchmark, scores, len(kept))}


def scored(benchmark: Benchmark, scores: Scores, n: int) -> dict[str, Any]:
    """Metrics with intervals, in the order the benchmark reports them; an undefined value is null."""
    metrics = {}
    for name, value in scores.metrics.items():
        how = benchmark.metric(name)
        found = metric_interval(name, value, scores.per_item, full=100 / how.show)
        metrics[name] = {
            "value": _finite(value),
            "low": _finite(found.low) if found else None,
            "high": _finite(found.high) if found else None,
            "interval": found.kind if found else None,
            "level": statistics.LEVEL if found else None,
            "better": how.better,
            "show": how.show,
            "decimals": how.decimals,
            "rounded": how.rounded,
            "n": n,
        }
    return {"metrics": metrics, "counts": scores.counts, "notes": list(scores.notes)}


def metric_interval(
    name: str, value: float, per_item: Mapping[str, PerUnit], full: float = 1.0
) -> statistics.Interval | None:
    """The metric's interval: from its own terms, or, if it is the plain mean of its sub-settings, from theirs."""
    parts = statistics.strata(name, value, per_item)
    if parts == [name]:
        return statistics.interval(per_item[name], full=full)
    return statistics.mean_interval([[per_item[part]] for part in parts]) if parts else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class Results:
    """results.json, which is rewritten after every cell and can be read at any time.

    Every planned cell is in it from the start, as `unfinished` until it is scored.
    """

    def __init__(self, plan: Plan, grid: Sequence[GridCell], reporter: Reporter) -> None:
        self.path = plan.output / "results.json"
        self.plan = plan
        self.started = time.time()
        earlier = self._read(reporter)["cells"] if self.path.exists() else []
        kept = [old for old in earlier if (plan.output / old["path"]).exists()]  # somebody may delete a cell
        self.entries = {_place(entry): entry for entry in kept}
        self.ours = []  # the keys of the plan's cells
        for cell in grid:
            entry = cell.entry({}, cell.questions.bad)
            self.ours.append(_place(entry))
            if not self._is_scored(cell, self.entries.get(self.ours[-1])):
                self.entries[self.ours[-1]] = entry
        self._write("running")

    def _is_scored(self, cell: GridCell, old: Mapping[str, Any] | None) -> bool:
        """Whether an earlier entry has the result of all that is planned for a cell now."""
        if old is None or old["status"] != "complete" or old["key"] != cell.store.key:
            return False
        try:
            return read_scores(cell.store.path).items == cell.questions.contents
        except RevisitError:
            return False

    def _read(self, reporter: Reporter) -> dict[str, Any]:
        """The results of earlier commands; a damaged file is moved away, since the answers can restore its content."""
        try:
            return read_results(self.plan.output)
        except Damaged as error:
            aside = self.path.with_name("results.damaged.json")
            self.path.replace(aside)
            reporter.note(f"{error} It was moved to {aside.name}; rerun other commands to restore their results.")
            return {"cells": []}

    def add(self, entry: dict[str, Any]) -> None:
        """Adds a cell; replaces an earlier entry of the same settings under other code or weights."""
        self.entries[_place(entry)] = entry
        self._write("running")

    def finish(self) -> dict[str, Any]:
        """Writes the final state, and returns it with the cells of the plan; raises if there are unread images."""
        unread = {
            skipped["image"]: skipped["reason"]
            for entry in (self.entries[place] for place in self.ours)
            if entry["status"] != "complete"
            for skipped in entry["skipped"]
        }
        results = self._write("incomplete" if unread else "complete")
        cells = [cell for place, cell in zip(self.entries, results["cells"], strict=True) if place in self.ours]
        if unread:
            listed = "; ".join(f"{path} ({reason})" for path, reason in list(unread.items())[:5])
            more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
            skip = "" if self.plan.skip_bad_images else ", or add --skip-bad-images to score without those items"
            raise RevisitError(
                f"{len(unread)} image{'s' * (len(unread) > 1)} could not be read: {listed}{more}. All other answers are stored. "
                f"Fix the files and rerun the command{skip}."
            )
        return {**results, "cells": cells}

    def _write(self, status: str) -> dict[str, Any]:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        results = {
            "status": status,
            "written": now,
            "seconds": round(time.time() - self.started, 1),
            "environment": environment(),
            "settings": self.plan.to_json(),
            "cells": list(self.entries.values()),
        }
        return write_record(self.path, results, RunRecord)


def _place(entry: Mapping[str, Any]) -> str:
    """A key that is equal for two entries that only differ in code, weights and libraries."""
    benchmark = entry["benchmark"]
    return digest(
        [
            entry["model"]["name"],
            entry["model"].get("dtype"),
            entry["method"]["name"],
            entry["method"]["settings"],
            benchmark["name"],
            benchmark["version"],
            benchmark["options"],
            entry["decoding"],
            entry["seed"],
        ]
    )
